"""The feature `image`: decode images, bring them to one size, and learn their channel moments.

    column ─ images ─▶ bytes or array per image ─ pixels ─▶ uint8 [C, H, W], or Unfit with a reason

Learning, refusing and encoding all run this pipeline. The engine asks for the refused rows of a
block first and then for its encoding, so the last decoded block is cached (`_Last`).
"""

from __future__ import annotations

import io
import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple, TypeAlias

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pydantic import Field

from echelon.core.errors import DataError
from echelon.data.prepare.steps import MADE, Columns, Feature, Values
from echelon.data.prepare.workdir import Learnt
from echelon.data.shards.statistics import Moments

if TYPE_CHECKING:
    from PIL.Image import Image as PillowImage


Fit: TypeAlias = Literal["stretch", "crop", "pad"]
Pixels: TypeAlias = NDArray[np.uint8]
Side = Annotated[int, Field(ge=1, le=65_500)]
Decoded: TypeAlias = tuple[Pixels, dict[int, str]]
"""All images of a block, and for those that could not be used the row and the reason."""


class Image(Feature):
    """uint8 [N, C, H, W] from encoded images, or from arrays of pixels.

    Learns mean and deviation of each channel of train (0 to 255) and, unless the recipe sets them,
    the size of the images and whether all are gray. Refuses an image that is missing, cannot be
    read, or has another size than those of train.
    """

    size: Side | tuple[Side, Side] | None = None
    """A side, or height and width; by default all images must have one size already."""
    channels: Literal[1, 3] | None = None
    """Gray or color; by default gray if all images of train are."""
    fit: Fit = "stretch"
    """How another aspect ratio is made to fit: stretched, center-cropped, or padded with black."""
    normalise: bool = False
    """Write float32 of mean 0 and deviation 1 per channel, which takes four times the space; by
    default the model normalizes."""

    passes: ClassVar[int] = 1

    def check(self, names: Mapping[str, pa.DataType]) -> None:
        super().check(names)
        (name,) = self.sources if len(self.sources) == 1 else ("",)
        if not name:
            raise DataError(f"feature {self.kind}: made of {len(self.sources)} columns: name one")
        kind = names[name]
        fits = pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or kind == MADE
        if not fits and not isinstance(kind, pa.FixedShapeTensorType):
            raise DataError(f"feature {self.kind}: column {name!r} is of type {kind}: no images")

    def look(self, at: int, block: Columns, learnt: Learnt) -> Learnt:
        grey, colour = _Channels(1), _Channels(3)
        sizes: set[tuple[int, ...]] = set()
        for image in self._decoded(block, Form(self._size, self.channels, self.fit)):
            if isinstance(image, Unfit):
                continue
            sizes.add(image.shape[1:])
            (grey if len(image) == 1 else colour).add(image)
        shown = sorted([int(side) for side in size] for size in sizes)[:3]
        return {"sizes": shown, "grey": grey.state(), "colour": colour.state()}

    def learn(self, at: int, partials: Iterable[Learnt], learnt: Learnt, scratch: Path) -> Learnt:
        grey, colour = Moments((1, 1, 1)), Moments((3, 1, 1))
        sizes: set[tuple[int, ...]] = set()
        for partial in partials:
            sizes |= {tuple(size) for size in partial["sizes"]}
            grey.merge(partial["grey"])
            colour.merge(partial["colour"])
        if not sizes:
            raise DataError(f"feature {self.kind}: train has no readable image")
        if len(sizes) > 1:
            shown = ", ".join(f"{height}×{width}" for height, width in sorted(sizes)[:3])
            raise DataError(f"feature {self.kind}: images are of {shown}, …: say their `size`")
        whole = grey
        if colour.count.any():
            # A gray image among color images counts with the same moments in all three channels.
            colour.merge(np.repeat(grey.state(), 3, 1))
            whole = colour
        std = np.where(whole.max > whole.min, whole.std, 1.0)
        shape = [len(whole.mean), *sizes.pop()]
        return {"shape": shape, "mean": whole.mean.copy(), "std": std}

    def refused(self, block: Columns, learnt: Learnt) -> Mapping[int, str]:
        return _last.of(self, block, learnt)[1]

    def encode(self, block: Columns, learnt: Learnt) -> dict[str, Values]:
        out, wrong = _last.of(self, block, learnt)
        if wrong:
            row, reason = next(iter(wrong.items()))
            raise DataError(f"feature {self.kind}: record {row} of its block: {reason}")
        _last.forget()
        if not self.normalise:
            return {self.name: out}
        mean, std = (learnt[name].astype(np.float32)[:, None, None] for name in ("mean", "std"))
        return {self.name: (out - mean) / std}

    def all_pixels(self, block: Columns, learnt: Learnt) -> Decoded:
        """Decode all images of a block, for `refused` and `encode`."""
        channels, height, width = learnt["shape"]
        form = Form(self._size, channels, self.fit)
        column: Any = block[self.sources[0]]
        out = np.zeros((len(column), channels, height, width), np.uint8)
        wrong: dict[int, str] = {}
        for row, image in enumerate(self._decoded(block, form)):
            if isinstance(image, Unfit):
                wrong[row] = str(image)
            elif image.shape != out.shape[1:]:
                wrong[row] = (
                    f"the image has {image.shape[1]}×{image.shape[2]} pixels; those of train have "
                    f"{height}×{width}: say their `size`"
                )
            else:
                out[row] = image
        return out, wrong

    @property
    def _size(self) -> tuple[int, int] | None:
        return (self.size, self.size) if isinstance(self.size, int) else self.size

    def _decoded(self, block: Columns, form: Form) -> Iterator[Pixels | Unfit]:
        name = self.sources[0]
        for image in images(block[name], self.kind, name):
            try:
                yield pixels(image, form)
            except Unfit as error:
                yield error


class _Channels:
    """Channel moments of images that come one by one; adds them up in small batches."""

    def __init__(self, channels: int) -> None:
        self._moments = Moments((channels, 1, 1))
        self._waiting: list[Pixels] = []

    def add(self, image: Pixels) -> None:
        if self._waiting and self._waiting[0].shape != image.shape:
            self._flush()
        self._waiting.append(image)
        if len(self._waiting) == _AT_ONCE:
            self._flush()

    def state(self) -> Any:
        self._flush()
        return self._moments.state()

    def _flush(self) -> None:
        if self._waiting:
            moments = Moments(self._waiting[0].shape)
            moments.add(np.stack(self._waiting))
            self._moments.merge(moments.state())
            self._waiting = []


_AT_ONCE = 64


class _Last:
    """A cache of the last decoded block, because `refused` and `encode` both need it."""

    def __init__(self) -> None:
        # One tuple, which is replaced but never changed, so threads need no lock.
        self._kept: tuple[Any, ...] | None = None

    def of(self, feature: Image, block: Columns, learnt: Learnt) -> Decoded:
        column, kept = block[feature.sources[0]], self._kept
        if kept is not None:
            known, settings, shape, found = kept
            if known() is column and settings == feature and shape == learnt["shape"]:
                return found  # type: ignore[no-any-return]
        new = feature.all_pixels(block, learnt)
        self._kept = (weakref.ref(column), feature, learnt["shape"], new)
        return new

    def forget(self) -> None:
        self._kept = None


_last = _Last()


# One image: from bytes or an array to pixels of one size and form


class Form(NamedTuple):
    """The form that all images are brought to; None leaves a property as it is."""

    size: tuple[int, int] | None
    """Height and width."""
    channels: int | None
    fit: Fit = "stretch"


class Unfit(Exception):
    """Raised for an image that cannot be used, with the reason."""


def images(column: Any, kind: str, name: str) -> Iterator[Any]:
    """Yield each image as its bytes or its pixels, or None if it is missing."""
    if isinstance(column, np.ndarray):
        yield from _arrays(column, kind, name)
    elif isinstance(column.type, pa.FixedShapeTensorType):
        yield from _arrays(column.to_numpy_ndarray(), kind, name)
    elif pa.types.is_binary(column.type) or pa.types.is_large_binary(column.type):
        yield from (scalar.as_buffer() for scalar in column)
    else:
        raise DataError(f"feature {kind}: column {name!r} is of type {column.type}: no images")


def _arrays(values: Any, kind: str, name: str) -> Iterator[Pixels]:
    fits = values.dtype == np.uint8 and values.ndim in (3, 4)
    if not fits or (values.ndim == 4 and values.shape[1] not in (1, 3)):
        raise DataError(
            f"feature {kind}: column {name!r} holds {values.dtype} {list(values.shape[1:])}: "
            f"images are uint8 [H, W], [1, H, W] or [3, H, W]"
        )
    yield from values


def pixels(image: Any, form: Form) -> Pixels:
    """Return the pixels of an image, uint8 [C, H, W]; raise Unfit if it cannot be used."""
    if image is None:
        raise Unfit("the image is missing")
    from PIL import Image

    if isinstance(image, np.ndarray):
        return _stacked(_formed(_from_array(image), form))
    try:
        with warnings.catch_warnings(), Image.open(io.BytesIO(image)) as opened:
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            if form.size is not None:
                height, width = form.size
                opened.draft(None, (width * _SHARP, height * _SHARP))
            opened.load()
            return _stacked(_formed(_upright(opened), form))
    except Unfit:
        raise
    except (OSError, ValueError, SyntaxError, Warning, Image.DecompressionBombError) as error:
        raise Unfit(f"not a readable image: {error}") from None


_SHARP = 2
"""A jpeg is decoded at the smallest scale that is at least so many times the wanted size."""


def _from_array(image: Pixels) -> PillowImage:
    from PIL import Image

    if image.ndim == 3:
        image = image[0] if len(image) == 1 else image.transpose(1, 2, 0)
    return Image.fromarray(np.ascontiguousarray(image))


def _upright(image: PillowImage) -> PillowImage:
    """Turn an image as its EXIF orientation says; cameras store the pixels unturned."""
    from PIL import ImageOps

    return ImageOps.exif_transpose(image)


def _formed(image: PillowImage, form: Form) -> PillowImage:
    image = image.convert("L" if _grey(image, form.channels) else "RGB")
    if form.size is None:
        return image
    height, width = form.size
    if image.size == (width, height):
        return image
    if form.fit == "stretch":
        return image.resize((width, height))
    from PIL import ImageOps

    change = ImageOps.fit if form.fit == "crop" else ImageOps.pad
    return change(image, (width, height))


def _grey(image: PillowImage, channels: int | None) -> bool:
    if image.mode.startswith(("I", "F")):
        raise Unfit(f"pixels of mode {image.mode}: those of 8 bits are taken")
    return image.mode in _GREY if channels is None else channels == 1


_GREY = ("1", "L", "LA")


def _stacked(image: PillowImage) -> Pixels:
    array = np.asarray(image)
    return array[None] if array.ndim == 2 else array.transpose(2, 0, 1)

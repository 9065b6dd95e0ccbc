"""Decode, resize, channel moments."""

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


# --- pixels ---
# One image after the other: from bytes or arrays to pixels of one size and form.

Fit: TypeAlias = Literal["stretch", "crop", "pad"]
Pixels: TypeAlias = NDArray[np.uint8]
_GREY = ("1", "L", "LA")
_SHARP = 2
"""A jpeg is decoded at the least size that is so many times the wanted one."""


class Form(NamedTuple):
    """What all images are to be like; None: as they are."""

    size: tuple[int, int] | None
    """Height and width."""
    channels: int | None
    fit: Fit = "stretch"


class Unfit(Exception):
    """An image that cannot be used, and why."""


def images(column: Any, kind: str, name: str) -> Iterator[Any]:
    """What is known of each image: its bytes, its pixels, or None where it is missing."""
    if isinstance(column, np.ndarray):
        yield from _arrays(column, kind, name)
    elif isinstance(column.type, pa.FixedShapeTensorType):
        yield from _arrays(column.to_numpy_ndarray(), kind, name)
    elif pa.types.is_binary(column.type) or pa.types.is_large_binary(column.type):
        yield from (scalar.as_buffer() for scalar in column)
    else:
        raise DataError(f"feature {kind}: column {name!r} is of type {column.type}: no images")


def pixels(image: Any, form: Form) -> Pixels:
    """uint8 [C, H, W]; raises Unfit."""
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


def _arrays(values: Any, kind: str, name: str) -> Iterator[Pixels]:
    fits = values.dtype == np.uint8 and values.ndim in (3, 4)
    if not fits or (values.ndim == 4 and values.shape[1] not in (1, 3)):
        raise DataError(
            f"feature {kind}: column {name!r} holds {values.dtype} {list(values.shape[1:])}: "
            f"images are uint8 [H, W], [1, H, W] or [3, H, W]"
        )
    yield from values


def _from_array(image: Pixels) -> PillowImage:
    from PIL import Image

    if image.ndim == 3:
        image = image[0] if len(image) == 1 else image.transpose(1, 2, 0)
    return Image.fromarray(np.ascontiguousarray(image))


def _upright(image: PillowImage) -> PillowImage:
    """Cameras note how they were held, and leave the turning to others."""
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


def _stacked(image: PillowImage) -> Pixels:
    array = np.asarray(image)
    return array[None] if array.ndim == 2 else array.transpose(2, 0, 1)


# --- image ---
# Images, decoded and brought to one size, with the figures that normalise them.

Side = Annotated[int, Field(ge=1, le=65_500)]
Decoded: TypeAlias = tuple[Pixels, dict[int, str]]
"""Every image, and why there is nothing in some places."""
_AT_ONCE = 64


class Image(Feature):
    """uint8 [N, C, H, W] from encoded bytes, or from arrays of such pixels.

    What is learnt is the mean and deviation of each channel of train (0 to 255), and, where the
    recipe does not say them, the size of its images and whether they are all grey. An image that
    is missing, cannot be read or has another size than those of train is refused.
    """

    size: Side | tuple[Side, Side] | None = None
    """A side, or height and width; left out: all have the same already."""
    channels: Literal[1, 3] | None = None
    """Grey or colours; left out: grey if all of train are."""
    fit: Fit = "stretch"
    """How another shape is made to fit: stretched, cut at its middle, or with black at its rims."""
    normalise: bool = False
    """float32 of mean 0 and deviation 1 per channel, at four times the space; else that is left
    to the model."""

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
            # A grey image among colours has the same in all three.
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
        """What `refused` and `encode` are made of."""
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
    """Moments of images that come one by one: a few at a time."""

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


class _Last:
    """The block that was decoded last: those that are asked which rows they refuse are then asked
    for the others, and to decode is most of their work."""

    def __init__(self) -> None:
        # In one piece, which threads replace but never change.
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

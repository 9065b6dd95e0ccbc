"""One image after the other: from bytes or arrays to pixels of one size and form."""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from echelon.core.errors import DataError

if TYPE_CHECKING:
    from PIL.Image import Image

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


def _from_array(image: Pixels) -> Image:
    from PIL import Image

    if image.ndim == 3:
        image = image[0] if len(image) == 1 else image.transpose(1, 2, 0)
    return Image.fromarray(np.ascontiguousarray(image))


def _upright(image: Image) -> Image:
    """Cameras note how they were held, and leave the turning to others."""
    from PIL import ImageOps

    return ImageOps.exif_transpose(image)


def _formed(image: Image, form: Form) -> Image:
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


def _grey(image: Image, channels: int | None) -> bool:
    if image.mode.startswith(("I", "F")):
        raise Unfit(f"pixels of mode {image.mode}: those of 8 bits are taken")
    return image.mode in _GREY if channels is None else channels == 1


def _stacked(image: Image) -> Pixels:
    array = np.asarray(image)
    return array[None] if array.ndim == 2 else array.transpose(2, 0, 1)

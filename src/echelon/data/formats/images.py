"""Images: folders of image files, with one sub-folder per class, and sheets of many small images.

The block parser (`cut`, `count`, `infer`, `parse`) serves recipes. Its records are the stored bytes
of the files. Each image is decoded once to find those that are damaged; the feature `image` of a
recipe decodes it again and scales it.

The strict reader `read_images` serves jobs without a recipe. It returns pixels, all of one size,
and also reads sheets.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from echelon.core.errors import DataError
from echelon.data.formats import remote
from echelon.data.formats.arrays import load_arrays, names_in
from echelon.data.formats.documents import Unreadable, cut_files, parse_files
from echelon.data.formats.files import IMAGE_SUFFIXES
from echelon.data.formats.records import Block, Parsed, Source
from echelon.data.formats.remote import Unreachable
from echelon.data.formats.streams import read_bytes
from echelon.data.shards.encode import dense_array

if TYPE_CHECKING:
    from PIL.Image import Image


# Block parser


def cut(source: Source, size: int) -> Iterator[Block]:
    return cut_files(source, size, "images", _MOST)


_MOST = 256
"""Images of a block, at most: a small file may be a large image, and a worker holds them all."""


def count(block: Block) -> int:
    return len(block.members)


def infer(block: Block, types: Mapping[str, Any]) -> pa.Schema | None:  # noqa: ARG001
    labels = [pa.field("label", pa.large_utf8())] if block.members[0][1] is not None else []
    return pa.schema([pa.field("image", pa.large_binary()), *labels])


def parse(block: Block, wanted: pa.Schema) -> Parsed:
    return parse_files(block, wanted, "image", pa.large_binary(), _load_image)


def _load_image(path: str) -> bytes:
    from PIL import Image, UnidentifiedImageError

    try:
        content = remote.read_whole(path)
        if not content:
            raise Unreadable("empty")
        with warnings.catch_warnings(), Image.open(io.BytesIO(content)) as image:
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            # Decodes a jpeg at an eighth of its size, which is enough to find damage.
            image.draft("RGB", (1, 1))
            image.load()
    except Unreachable:
        raise  # a server that fails ends the preparation; it does not make a record bad
    except UnidentifiedImageError:
        raise Unreadable("not an image of a known format") from None
    except (OSError, ValueError, SyntaxError, DataError, Image.DecompressionBombWarning) as error:
        raise Unreadable(f"not a readable image: {error}") from None
    return content


# Strict reader

_BATCH = 32 << 20
"""Bytes of pixels in a record batch, about."""
_AT_ONCE = 256
"""Files of a record batch of stored images."""
_THREADS = 4
_GREY = ("1", "L")


def read_images(
    path: Path,
    *,
    size: int | Sequence[int] | None = None,
    tile: int | None = None,
    stored: bool = False,
) -> Iterator[Any]:
    """Yield record batches with `x` uint8 [N, C, H, W] and, for class folders, `label`.

    `size` (one side, or height and width) scales all images; without it, images of different sizes
    are refused. C is 1 if all images are gray, else 3.

    A single file is a sheet of square images with the side `tile`. Its labels are the array
    `y_<name of the sheet>` of a `labels.npz` beside it.

    With `stored` a folder's files are returned undecoded, as `image`. New records for a model of
    prepared images are read that way.
    """
    if path.is_file():
        yield _sheet(path, tile)
        return
    files, labels = _image_files(path)
    if stored:
        yield from _as_stored(files, labels)
        return
    height, width, channels = _common_form(files, _wanted(size))
    step = max(1, _BATCH // (height * width * channels))
    mode = "L" if channels == 1 else "RGB"
    with ThreadPoolExecutor(_THREADS) as pool:
        for start in range(0, len(files), step):
            chosen = files[start : start + step]
            pixels = pool.map(lambda file: _pixels(file, mode, (width, height)), chosen)
            x = np.stack(list(pixels)).reshape(len(chosen), height, width, channels)
            columns = {"x": dense_array(x.transpose(0, 3, 1, 2))}
            if labels:
                columns["label"] = pa.array(labels[start : start + step])
            yield pa.record_batch(columns)


def _image_files(path: Path) -> tuple[list[Path], list[str]]:
    """Return all image files in order, and the class of each if they are in class folders."""
    folders = sorted(entry for entry in path.iterdir() if entry.is_dir())
    pairs = [(file, folder.name) for folder in folders for file in _images_in(folder)]
    loose = _images_in(path)
    if pairs and loose:
        raise DataError(f"{path}: images lie in class folders and beside them ({loose[0].name})")
    if not pairs and not loose:
        raise DataError(f"{path}: holds no images ({', '.join(IMAGE_SUFFIXES)})")
    return loose or [file for file, _ in pairs], [label for _, label in pairs]


def _images_in(folder: Path) -> list[Path]:
    return sorted(file for file in folder.iterdir() if file.suffix.lower() in IMAGE_SUFFIXES)


def _as_stored(files: Sequence[Path], labels: Sequence[str]) -> Iterator[Any]:
    for start in range(0, len(files), _AT_ONCE):
        chosen = slice(start, start + _AT_ONCE)
        contents = [read_bytes(file) for file in files[chosen]]
        columns = {"image": pa.array(contents, pa.large_binary())}
        if labels:
            columns["label"] = pa.array(labels[chosen], pa.large_utf8())
        yield pa.record_batch(columns)


def _wanted(size: int | Sequence[int] | None) -> tuple[int, int] | None:
    if size is None:
        return None
    pair = (size, size) if isinstance(size, int) else tuple(size)
    if len(pair) != 2 or min(pair) < 1:
        raise DataError(f"option size is {size}: give one side, or height and width")
    return pair


def _common_form(files: Sequence[Path], size: tuple[int, int] | None) -> tuple[int, int, int]:
    """Return height, width and channels of all images, reading only their headers."""
    channels, first = 1, None
    for file in files:
        with _opened(file) as image:
            if image.mode not in _GREY:
                channels = 3
            shape = (image.height, image.width)
        first = first or shape
        if size is None and shape != first:
            raise DataError(
                f"{file}: {shape[1]}×{shape[0]} pixels, but {files[0].name} has "
                f"{first[1]}×{first[0]}: set the option `size` to scale all to one"
            )
    assert first is not None
    return (*(size or first), channels)


def _pixels(file: Path, mode: str, size: tuple[int, int]) -> np.ndarray[Any, Any]:
    with _opened(file) as image:
        try:
            plain = image.convert(mode)
        except (OSError, ValueError, SyntaxError) as error:
            raise DataError(f"{file}: not a readable image: {error}") from None
        return np.asarray(plain if plain.size == size else plain.resize(size))


def _opened(file: Path) -> Image:
    from PIL import Image, UnidentifiedImageError

    try:
        return Image.open(file)
    except (UnidentifiedImageError, OSError, SyntaxError) as error:
        raise DataError(f"{file}: not a readable image: {error}") from None


def _sheet(path: Path, tile: int | None) -> Any:
    if tile is None:
        raise DataError(f"{path}: one image is read as a sheet: set the option `tile` to a side")
    x = read_tiles(path, tile)
    columns = {"x": dense_array(x)}
    labels = path.with_name("labels.npz")
    name = f"y_{path.stem}"
    if labels.is_file() and name in names_in(labels):
        (column,) = load_arrays(labels, [name]).values()
        if len(column) != len(x):
            raise DataError(f"{labels}: {name!r} has {len(column)} labels for {len(x)} tiles")
        columns["y"] = dense_array(column)
    return pa.record_batch(columns)


def read_tiles(path: str | Path, side: int) -> np.ndarray[Any, Any]:
    """Return the square tiles of one large image, row by row: uint8 [N, C, side, side]."""
    path = Path(path)
    with _opened(path) as image:
        width, height = image.size
        if side < 1 or width % side or height % side:
            raise DataError(f"{path}: {width}×{height} pixels cannot be cut into tiles of {side}")
        sheet = _pixels(path, "L" if image.mode in _GREY else "RGB", image.size)
    tiles = sheet.reshape(height // side, side, width // side, side, -1)
    channels = tiles.shape[-1]
    return np.ascontiguousarray(tiles.transpose(0, 2, 4, 1, 3)).reshape(-1, channels, side, side)

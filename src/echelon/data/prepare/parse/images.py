"""Images of one file each, as the bytes they are stored in; the folder they lie in is their class.

They are decoded here once, to find those that cannot be; what size and form they get is a
matter of features.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import pyarrow as pa

from echelon.core.errors import DataError
from echelon.data.prepare import remote
from echelon.data.prepare.blocks import Block
from echelon.data.prepare.inputs import Source
from echelon.data.prepare.parse.files import Unreadable, cut_files, parse_files
from echelon.data.prepare.parse.parsed import Parsed
from echelon.data.prepare.unreachable import Unreachable

_MOST = 256
"""Images of a block: a few bytes may be a large one, and all of a block are held at once."""


def cut(source: Source, size: int) -> Iterator[Block]:
    return cut_files(source, size, "images", _MOST)


def count(block: Block) -> int:
    return len(block.members)


def infer(block: Block, types: Mapping[str, Any]) -> pa.Schema | None:  # noqa: ARG001
    labels = [pa.field("label", pa.large_utf8())] if block.members[0][1] is not None else []
    return pa.schema([pa.field("image", pa.large_binary()), *labels])


def parse(block: Block, wanted: pa.Schema) -> Parsed:
    return parse_files(block, wanted, "image", pa.large_binary(), _image)


def _image(path: str) -> bytes:
    from PIL import Image, UnidentifiedImageError

    try:
        content = remote.read_whole(path)
        if not content:
            raise Unreadable("empty")
        with warnings.catch_warnings(), Image.open(io.BytesIO(content)) as image:
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            image.draft("RGB", (1, 1))  # of a jpeg an eighth of the size is enough to see it
            image.load()
    except Unreachable:
        raise
    except UnidentifiedImageError:
        raise Unreadable("not an image of a known format") from None
    except (OSError, ValueError, SyntaxError, DataError, Image.DecompressionBombWarning) as error:
        raise Unreadable(f"not a readable image: {error}") from None
    return content

"""What folders of shards contain: the columns, the manifest, and the description of prepared data.

    set/                    one set of shards
        manifest.json       schema, statistics, and for every shard its rows, bytes and checksums
        shard-00000.arrow   one record batch each
    prepared/               what a recipe writes
        prepared.json       counts, splits and the checksums of all files that are not shards
        train/, valid/, …   one set each

A column has one of four kinds:

| kind     | one sample                  | stored as                                |
|----------|-----------------------------|------------------------------------------|
| dense    | numbers of one fixed shape  | the number, or a fixed-shape tensor      |
| sequence | numbers, as many as it has  | large_list                               |
| sparse   | a row of a CSR matrix       | large_list of (index, value) pairs       |
| string   | text                        | large_utf8                               |
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

import numpy as np
import pyarrow as pa

from echelon.core.errors import DataError
from echelon.core.files import sha256_file

if TYPE_CHECKING:
    import torch


# Columns

Kind: TypeAlias = Literal["dense", "sequence", "sparse", "string"]


# Arrow packs booleans into bits and numpy has no bfloat16: both are kept as plain integers.
_STORAGE = {"bool": "uint8", "bfloat16": "uint16"}
_FLOATS = ("float16", "bfloat16", "float32", "float64")
DTYPES = (
    *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
    *_FLOATS,
)
"""Names of types, which are the same in torch and numpy."""
_INT32_LIMIT = 2**31


@dataclass(frozen=True, slots=True)
class Field:
    """One column: its kind, the type of its numbers and the shape of a dense sample."""

    name: str
    kind: Kind
    dtype: str = ""
    shape: tuple[int, ...] = ()
    width: int = 0
    """Number of columns of the CSR matrix that sparse rows belong to."""

    @property
    def torch_dtype(self) -> torch.dtype:
        import torch  # on use: writing shards does not need it

        assert self.dtype in DTYPES, self.dtype
        found: torch.dtype = getattr(torch, self.dtype)
        return found

    @property
    def is_floating(self) -> bool:
        return self.dtype in _FLOATS

    @property
    def storage(self) -> np.dtype[Any]:
        """The type that the numbers are stored as."""
        return np.dtype(_STORAGE.get(self.dtype, self.dtype))

    @property
    def index_storage(self) -> np.dtype[Any]:
        """The type that the column numbers of a sparse row are stored as."""
        return np.dtype(np.int32 if self.width < _INT32_LIMIT else np.int64)

    @property
    def item_bytes(self) -> int:
        """Bytes of one dense sample."""
        return self.storage.itemsize * math.prod(self.shape)

    @property
    def item(self) -> np.dtype[Any]:
        """One dense sample as a single opaque item, which numpy copies without looking inside."""
        size = self.item_bytes
        return np.dtype(f"u{size}" if size in (1, 2, 4, 8) else f"V{size}")

    def arrow_type(self) -> Any:
        if self.kind == "string":
            return pa.large_utf8()
        number = pa.from_numpy_dtype(self.storage)
        if self.kind == "dense":
            return pa.fixed_shape_tensor(number, self.shape) if self.shape else number
        if self.kind == "sequence":
            return pa.large_list(number)
        index = pa.from_numpy_dtype(self.index_storage)
        return pa.large_list(pa.struct([("index", index), ("value", number)]))

    def __str__(self) -> str:
        if self.kind == "string":
            return "string"
        if self.kind == "sparse":
            return f"sparse {self.dtype} of width {self.width}"
        return " ".join([self.kind, self.dtype, *([str(list(self.shape))] if self.shape else [])])

    def to_json(self) -> dict[str, Any]:
        plain: dict[str, Any] = {"name": self.name, "kind": self.kind}
        if self.kind != "string":
            plain["dtype"] = self.dtype
        if self.kind == "dense":
            plain["shape"] = list(self.shape)
        if self.kind == "sparse":
            plain["width"] = self.width
        return plain

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> Field:
        """Raises KeyError, TypeError or ValueError where `plain` is not a field."""
        field = cls(
            str(plain["name"]),
            plain["kind"],
            plain.get("dtype", ""),
            tuple(int(size) for size in plain.get("shape", ())),
            int(plain.get("width", 0)),
        )
        if field.kind not in get_args(Kind):
            raise ValueError(f"kind {field.kind!r}")
        if field.kind != "string" and field.dtype not in DTYPES:
            raise ValueError(f"dtype {field.dtype!r}")
        return field


Schema: TypeAlias = tuple[Field, ...]


def arrow_schema(schema: Schema) -> Any:
    return pa.schema([pa.field(field.name, field.arrow_type()) for field in schema])


def float32_of_bfloat16(stored: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return stored bfloat16 numbers (uint16) as float32 of the same value."""
    return (stored.astype(np.uint32) << 16).view(np.float32)


def same_schema(expected: Schema, found: Schema, where: str) -> None:
    """Raise DataError unless the columns equal those of the batches before."""
    names = [field.name for field in expected]
    if names != [field.name for field in found]:
        given = ", ".join(field.name for field in found)
        raise DataError(f"{where}: the columns are {given}; before they were {', '.join(names)}")
    for old, new in zip(expected, found, strict=True):
        if old != new:
            raise DataError(f"{where}: column {new.name!r} is {new}; before it was {old}")


def check_names(schema: Schema) -> None:
    """Raise DataError if two columns of a batch would have the same name."""
    names = [field.name for field in schema]
    lengths = [length_name(field.name) for field in schema if field.kind == "sequence"]
    for name in (*names, *lengths):
        if [*names, *lengths].count(name) > 1:
            raise DataError(f"two columns of a batch would be called {name!r}")


def length_name(sequence: str) -> str:
    """Return the name of the column with the lengths of a column's sequences."""
    return f"{sequence}_length"


def unsupported(name: str, what: object, accepted: Sequence[str]) -> DataError:
    return DataError(f"column {name!r} is {what}; it must be one of: {', '.join(accepted)}")


# The manifest of a set of shards. It is written last, so a folder without one is not a set.

MANIFEST = "manifest.json"
FORMAT = "echelon-shards"
VERSION = 1
BLOCK = 1 << 20
"""Bytes per checksum: small enough to tell which records are damaged."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """Schema, shards and statistics of a set."""

    schema: Schema
    shards: tuple[ShardEntry, ...]
    statistics: Mapping[str, Mapping[str, Any]]
    block: int = BLOCK

    @property
    def rows(self) -> int:
        return sum(shard.rows for shard in self.shards)

    @property
    def bytes(self) -> int:
        return sum(shard.bytes for shard in self.shards)

    def numbered(self) -> Iterator[tuple[ShardEntry, int]]:
        """Yield each shard with the number of its first record within the set."""
        first = 0
        for shard in self.shards:
            yield shard, first
            first += shard.rows

    def to_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "version": VERSION,
            "rows": self.rows,
            "schema": [field.to_json() for field in self.schema],
            "statistics": {name: dict(figures) for name, figures in self.statistics.items()},
            "block": self.block,
            "shards": [shard.to_json() for shard in self.shards],
        }


@dataclass(frozen=True, slots=True)
class ShardEntry:
    """One file of a set: how many records, how many bytes, the crc32 of each block."""

    file: str
    rows: int
    bytes: int
    crc32: tuple[int, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "file": self.file,
            "rows": self.rows,
            "bytes": self.bytes,
            "crc32": list(self.crc32),
        }

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> ShardEntry:
        name = str(plain["file"])
        if Path(name).name != name or name in ("", ".", ".."):
            raise ValueError(f"file {name!r} is not a plain name")
        crc32 = tuple(int(value) for value in plain["crc32"])
        return cls(name, int(plain["rows"]), int(plain["bytes"]), crc32)


def read_manifest(folder: str | Path) -> Manifest:
    """Read the manifest of a folder of shards. Raises DataError if it is missing or damaged."""
    path = Path(folder) / MANIFEST
    return _parse(path, read_description(path, FORMAT, VERSION, "shards"))


def _parse(path: Path, plain: Mapping[str, Any]) -> Manifest:
    try:
        manifest = Manifest(
            tuple(Field.from_json(field) for field in plain["schema"]),
            tuple(ShardEntry.from_json(shard) for shard in plain["shards"]),
            dict(plain["statistics"]),
            int(plain["block"]),
        )
        stated = int(plain["rows"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(f"{path}: not a whole manifest: {error!r}") from None
    if stated != manifest.rows:
        raise DataError(f"{path}: says {stated} records, but its shards have {manifest.rows}")
    return manifest


def read_description(path: Path, form: str, version: int, what: str) -> dict[str, Any]:
    """Read a JSON description of this format and version, and check its digest if it has one."""
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise DataError(f"{path.parent}: not a folder of {what}: it has no {path.name}") from None
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read as JSON: {error}") from None
    if not isinstance(facts, dict) or facts.get("format") != form:
        raise DataError(f'{path}: does not describe {what} (no "format": "{form}")')
    if facts.get("version") != version:
        raise DataError(
            f"{path}: written by version {facts.get('version')} of the format; "
            f"this program reads version {version}"
        )
    check_seal(path, facts)
    return facts


# Folders that hold sets

USUAL_SPLITS = ("train", "valid", "test")


def shard_sets(folder: Path) -> dict[str, Path]:
    """Return the sets at a folder by name: the folder itself as "", or the folders in it."""
    if not folder.exists():
        raise DataError(f"{folder}: there is no such folder")
    if not folder.is_dir():
        raise DataError(f"{folder}: is a file, not a folder of shards")
    if (folder / MANIFEST).exists():
        return {"": folder}
    found = {path.parent.name: path.parent for path in folder.glob(f"[!.]*/{MANIFEST}")}
    if not found:
        raise DataError(
            f"{folder}: not a folder of shards: neither it nor a folder in it has a {MANIFEST}"
        )
    return {name: found[name] for name in sorted(found, key=_place)}


def _place(name: str) -> tuple[int, str]:
    return (USUAL_SPLITS.index(name) if name in USUAL_SPLITS else len(USUAL_SPLITS), name)


# The description of prepared data

PREPARED = "prepared.json"
"""The file that describes prepared data, whose splits are folders of shards."""


def read_facts(folder: Path, *, changed: bool = False) -> dict[str, Any] | None:
    """Read the description of prepared data; None if there is none.

    Raises DataError if the facts were changed since, unless `changed` is set.
    """
    path = folder / PREPARED
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read as JSON: {error}") from None
    if not isinstance(facts, dict) or not isinstance(facts.get("checksums"), dict):
        raise DataError(f"{path}: does not describe prepared data (it has no checksums)")
    if not changed:
        check_seal(path, facts)
    return facts


def changed(folder: Path, facts: Mapping[str, Any]) -> Iterator[tuple[Path, str]]:
    """Yield the files that are not as the preparation wrote them, each with what is wrong."""
    try:
        check_seal(folder / PREPARED, facts)
    except DataError as error:
        yield folder / PREPARED, str(error).removeprefix(f"{folder / PREPARED}: ")
    for name, expected in facts["checksums"].items():
        path = folder / name
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            yield folder / PREPARED, f"names a file outside of the folder: {name!r}"
            continue
        try:
            found = sha256_file(path)
        except OSError as error:
            yield path, f"cannot be read: {error.strerror}"
            continue
        if found != expected:
            yield path, "corrupt: its checksum is wrong"


def how_prepared(facts: Mapping[str, Any]) -> str:
    """Return e.g. `prepared from 1,000 records; taken out: 12 duplicate, 8 length; 980 kept`."""
    counts = facts.get("counts") or {}
    out = ", ".join(f"{count:,} {reason}" for reason, count in (counts.get("out") or {}).items())
    taken = f"taken out: {out}" if out else "none taken out"
    read, kept = counts.get("read", 0), counts.get("kept", 0)
    return f"prepared from {read:,} records; {taken}; {kept:,} kept"


SEAL = "sha256"
"""The key of a description's digest, which covers all its other keys."""


def sealed(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts with their digest."""
    return {**{key: value for key, value in facts.items() if key != SEAL}, SEAL: _digest(facts)}


def check_seal(path: Path, facts: Mapping[str, Any]) -> None:
    """Raise DataError if the facts do not match their digest. Older files have no digest."""
    if SEAL in facts and facts[SEAL] != _digest(facts):
        raise DataError(f"{path}: corrupt: it is not as it was written, its checksum is wrong")


def _digest(facts: Mapping[str, Any]) -> str:
    """Hash the contents, not the layout: a copy with other indentation is intact."""
    plain = json.loads(json.dumps({key: value for key, value in facts.items() if key != SEAL}))
    text = json.dumps(plain, ensure_ascii=True, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()

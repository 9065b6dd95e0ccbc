"""Open data that `echelon data prepare` has written, and raw records for a model trained on it.

    train/, valid/ (or test/) ─────────────────────────▶ shards, read as they are
    new records ─▶ cleaned ─▶ encoded, as fitted ──────▶ columns in memory

New records are read with the settings that the recipe had for its own inputs.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from echelon.core.config.sections import DataSection
from echelon.core.errors import ConfigError, DataError, unknown
from echelon.core.interfaces import BatchSource
from echelon.core.types import Batch
from echelon.core.types import Sparse as SparseColumn
from echelon.data.formats.records import OPTIONS
from echelon.data.opening.frame import Frame
from echelon.data.opening.load import PREPARED_KIND, Splits, Usual, is_prepared, open_origin
from echelon.data.prepare.column_layout import formed
from echelon.data.prepare.encoders import Encoders, Prepared, open_prepared, refuse_lacking
from echelon.data.prepare.steps import Ragged, Sparse, Values
from echelon.data.shards import Field, ShardSource
from echelon.data.shards.layout import length_name
from echelon.data.sources import ColumnSource


def open_shards_of(section: DataSection, fitted: Mapping[str, Any] | None = None) -> Splits:
    """Open prepared data, or new data for a model of prepared data.

    The columns are `x` as the recipe made it, `y` if records have a target, and `weight` if the
    recipe balances classes. With `fitted`, all records are held out; a target of None in `fitted`
    leaves out `y`.
    """
    if fitted is None:
        assert section.path is not None
        _refuse_idle(section)
        return _open(section, open_prepared(Path(section.path).expanduser()))
    if is_prepared(section):
        return _open_again(section, fitted)
    return _open_new(section, fitted)


def _refuse_idle(section: DataSection) -> None:
    for key in _IDLE:
        if getattr(section, key) != getattr(DataSection(), key):
            raise ConfigError(
                f"data.{key} has no effect on prepared data: it is for the recipe to say",
                ("data", key),
            )


_IDLE = ("format", "valid_path", "held_out", "text", "tokens", "vocabulary", "length", "options")
"""Settings that have no effect on prepared data."""


# Prepared shards


def _open(section: DataSection, prepared: Prepared) -> Splits:
    fields = {field.name: field for field in prepared.manifest("train").schema}
    fitted = _fitted(section, prepared, fields)
    train = Renamed(ShardSource(prepared.path("train"), _columns(fitted, fields)), fitted)
    held_out = next((name for name in _HELD_OUT if name in prepared.splits), None)
    valid = None
    if held_out is not None:
        source = ShardSource(prepared.path(held_out), _columns(fitted, fields))
        valid = Renamed(source, {**fitted, "weight": None})
    about = {"name": prepared.folder.name, "path": str(prepared.folder), "rows": len(train)}
    if valid is not None:
        about |= {"held_out": str(prepared.path(str(held_out))), "held_out_rows": len(valid)}
    labels = tuple(fitted.get("labels", ()))
    return Splits(train, valid, labels, tuple(fitted["shape"]), fitted, about)


_HELD_OUT = ("valid", "test")


def _fitted(
    section: DataSection, prepared: Prepared, fields: Mapping[str, Field]
) -> dict[str, Any]:
    target = section.target or "y"
    numbers = [name for name, field in fields.items() if field.kind != "string"]
    if target not in fields:
        raise DataError(f"{prepared.folder}: {unknown('target column', target, numbers)}")
    others = [name for name in numbers if name not in (target, "weight")]
    given = section.columns or (("x",) if "x" in others else tuple(others))
    if len(given) != 1:
        raise DataError(
            f"{prepared.folder}: the input is one column, but there are {', '.join(given)}: choose "
            f"with data.columns, or put them side by side with a feature of kind join"
        )
    [x] = given
    if x not in fields:
        raise DataError(f"{prepared.folder}: {unknown('data.columns: column', x, others)}")
    field = fields[x]
    fitted: dict[str, Any] = {
        "kind": PREPARED_KIND,
        "x": x,
        "target": target,
        "encoders": prepared.encoders.to_json(),
    }
    fitted["weight"] = "weight" if "weight" in fields else None
    fitted["shape"] = _shape(field)
    fitted["sparse"] = field.kind == "sparse"
    fitted["reading"] = _shared_settings(prepared.facts)
    fitted["texts"] = [name for name, kind in prepared.facts["columns"].items() if "string" in kind]
    learnt = prepared.learnt(target) if _is_made(prepared, target) else {}
    if "classes" in learnt:
        fitted["labels"] = [str(name) for name in learnt["classes"]]
    if field.dtype == "uint8" and _is_made(prepared, x):  # images: normalised by the model
        known = prepared.learnt(x)
        fitted |= {key: np.asarray(known[key]).tolist() for key in ("mean", "std") if key in known}
    if _is_made(prepared, x) and (tokens := prepared.encoders.different(x)) is not None:
        fitted["tokens"] = tokens
    return fitted


def _shape(field: Field) -> list[int]:
    """Return the shape of a sample; a single number counts as a vector of length one."""
    if field.kind == "sparse":
        return [field.width]
    single = field.kind == "dense" and field.is_floating and not field.shape
    return [1] if single else list(field.shape)


def _is_made(prepared: Prepared, column: str) -> bool:
    return any(feature.name == column for feature, _ in prepared.encoders.features)


def _columns(fitted: Mapping[str, Any], fields: Mapping[str, Field]) -> list[str]:
    wanted = (fitted["x"], fitted["target"], fitted["weight"])
    return [name for name in wanted if name is not None and name in fields]


class Renamed:
    """Batches whose columns have the names that tasks expect: `x`, `x_length`, `y`, `weight`."""

    def __init__(self, source: BatchSource, fitted: Mapping[str, Any]) -> None:
        self._source = source
        self.chunkable = bool(getattr(source, "chunkable", False))
        self._single = fitted["shape"] == [1] and not fitted["sparse"]
        self._names = {fitted["x"]: "x", fitted["target"]: "y"}
        self._names[length_name(fitted["x"])] = "x_length"
        if fitted["weight"]:
            self._names[fitted["weight"]] = "weight"

    def __len__(self) -> int:
        return len(self._source)

    def gather(self, rows: Tensor) -> Batch:
        found = self._source.gather(rows)
        batch = {new: _as_input(found[old]) for old, new in self._names.items() if old in found}
        if self._single and batch["x"].ndim == 1:
            batch["x"] = batch["x"].unsqueeze(1)
        return batch


def _as_input(column: Any) -> Any:
    """Widen int16 and int32 to int64, which torch needs for token numbers and classes."""
    narrow = isinstance(column, Tensor) and column.dtype in (torch.int32, torch.int16)
    return column.long() if narrow else column


def _open_again(section: DataSection, fitted: Mapping[str, Any]) -> Splits:
    """Open a prepared folder for a trained model: its test part, else valid, else train."""
    assert section.path is not None
    prepared = open_prepared(Path(section.path).expanduser())
    if prepared.encoders.to_json() != fitted["encoders"]:
        raise DataError(
            f"{prepared.folder}: was prepared by another recipe, or learnt from other data, than "
            f"what the model was trained on; give its raw records instead"
        )
    split = next((name for name in ("test", "valid", "train") if name in prepared.splits), "train")
    fields = {field.name: field for field in prepared.manifest(split).schema}
    source = Renamed(
        ShardSource(prepared.path(split), _columns(fitted, fields)), {**fitted, "weight": None}
    )
    about = {"name": prepared.folder.name, "path": str(prepared.path(split))}
    return _only(source, fitted, about)


def _only(source: BatchSource, fitted: Mapping[str, Any], about: dict[str, Any]) -> Splits:
    labels, shape = tuple(fitted.get("labels", ())), tuple(fitted["shape"])
    return Splits(
        source, source, labels, shape, dict(fitted), {**about, "held_out_rows": len(source)}
    )


# Raw records, encoded as the recipe did


def _open_new(section: DataSection, fitted: Mapping[str, Any]) -> Splits:
    """Open raw records, cleaned and encoded as the recipe of the training data did."""
    encoders = Encoders.from_json(fitted["encoders"])
    needed = encoders.roots(fitted["x"])
    origin = open_origin(section, new=True, usual=_reader_options(fitted, needed))
    refuse_lacking(needed, origin.train.names, f"{origin.train.where}: ")
    asked = fitted["target"] is not None  # if not, only the input is encoded
    spared = {name for name in encoders.raw() if not (asked and origin.train.has(name))}
    encoded = encoders.encode(_batch(origin.train), without=spared - needed)
    if encoded.refused:
        some = [f"record {row}: {why}" for row, why in sorted(encoded.refused.items())[:_SHOWN]]
        more = len(encoded.refused) - len(some)
        reasons = "; ".join(some) + (f"; and {more} more" if more > 0 else "")
        raise DataError(f"{origin.train.where}: not what the model knows: {reasons}")
    wanted = [name for name in (fitted["x"], fitted["target"]) if name in encoded.columns]
    source = Renamed(_in_memory({name: encoded.columns[name] for name in wanted}), fitted)
    return _only(source, fitted, dict(origin.about))


_SHOWN = 3
"""Refused records that an error shows."""


def _batch(frame: Frame) -> Any:
    return frame.table.combine_chunks().to_batches()[0]


def _in_memory(columns: Mapping[str, Values]) -> ColumnSource:
    return ColumnSource({name: _column(name, values) for name, values in columns.items()})


def _column(name: str, values: Values) -> Any:
    if isinstance(values, pa.Array):  # a column kept as it was read: as in shards
        _, values = formed(name, values)
    if isinstance(values, Sparse):
        indices = torch.from_numpy(values.indices.astype(np.int64))
        numbers, offsets = torch.from_numpy(values.values), torch.from_numpy(values.offsets)
        return SparseColumn(indices, numbers, offsets, values.width)
    if isinstance(values, Ragged):
        lengths = np.diff(values.offsets)
        filled = np.zeros((len(lengths), int(lengths.max(initial=1))), values.values.dtype)
        filled[np.arange(filled.shape[1]) < lengths[:, None]] = values.values
        return filled
    return values


def _reader_options(fitted: Mapping[str, Any], needed: Collection[str]) -> Usual:
    """Return default options of the strict readers for records with the columns `needed`."""
    kept: Mapping[str, Mapping[str, Any]] = fitted.get("reading", {})
    usual = {format: dict(settings) for format, settings in kept.items()}
    for format in ("csv", "tsv"):
        settings = usual.setdefault(format, {})
        if "names" in settings:  # files with a header of these names are fine, too
            settings.pop("header", None)
        settings["types"] = dict.fromkeys(fitted["texts"], "string")
    if _STORED in needed:
        usual["images"] = {"stored": True}
    return usual


_STORED = "image"
"""The column of images in their stored, undecoded form. Images decoded by the reader are `x`."""


def _shared_settings(facts: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return, by format, the settings that all inputs of a recipe share.

    Where inputs differ, it is unknown which of them new records are like.
    """
    first, *others = facts["recipe"]["read"]
    alike = {
        name: value
        for name, value in first.items()
        if all(name in other and other[name] == value for other in others)
    }
    formats = sorted({entry["format"] for entry in facts["inputs"]})
    # Without `columns`: the needed columns are found by their names.
    known = {format: OPTIONS[format] - {"columns"} for format in formats}
    found = {
        format: {name: value for name, value in alike.items() if name in known[format]}
        for format in formats
    }
    return {format: settings for format, settings in found.items() if settings}


def target_made_of(fitted: Mapping[str, Any]) -> list[str]:
    """Return the raw columns that the recipe makes the target of, other than the target itself."""
    if fitted.get("kind") != PREPARED_KIND:
        return []
    found = Encoders.from_json(fitted["encoders"]).roots(fitted["target"])
    return sorted(found - {fitted["target"]})

"""Read the parts into tables, split rows."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from echelon.core.config.sections import DataSection
from echelon.core.errors import DataError
from echelon.core.interfaces import BatchSource
from echelon.data.formats import read
from echelon.data.formats.files import format_of_name
from echelon.data.opening.frame import Frame
from echelon.data.opening.locate import Part, Recognise, about_parts, locate
from echelon.data.shards.layout import PREPARED
from echelon.data.shards.statistics import Moments
from echelon.data.synthetic import load_shipped

# --- origin ---
# What every kind of opening begins with: the section's data, read and told apart.

PREPARED_KIND = "prepared"


@dataclass(frozen=True, slots=True)
class Origin:
    """The records of a data set in memory."""

    train: Frame
    valid: Frame | None
    about: dict[str, Any]
    class_names: list[str] = field(default_factory=list)


def open_origin(
    section: DataSection,
    *,
    new: bool,
    own: Collection[str] = (),
    recognise: Recognise = format_of_name,
    usual: Usual | None = None,
) -> Origin:
    """Read the section's data set; `own` are options that are not for the reader.

    `usual` are options for the reader where the section does not say them.

    Of `new` data, which a trained model is tried on, one part is read: the held-out one if there
    are two. It is called the training part here all the same.
    """
    if section.name is not None:
        table, names = load_shipped(section.name, section.options)
        return Origin(Frame(table, section.name), None, {"name": section.name}, names)
    parts = locate(section, new=new, recognise=recognise)
    options = {key: value for key, value in section.options.items() if key not in own}
    train = load(parts.train, options, usual)
    valid = load(parts.valid, options, usual) if parts.valid is not None else None
    return Origin(train, valid, about_parts(parts), class_names(parts.train))


def check_fitted(fitted: Mapping[str, Any], kind: str) -> None:
    """Refuse what another kind of opening has fitted."""
    found = fitted.get("kind")
    if found != kind:
        raise DataError(f"the run was trained on {found} data; here {kind} data is opened")


def is_prepared(section: DataSection, fitted: Mapping[str, Any] | None = None) -> bool:
    """Whether this is prepared data, or new data for a model that was trained on such."""
    if fitted is not None:
        return fitted.get("kind") == PREPARED_KIND
    return section.path is not None and (Path(section.path).expanduser() / PREPARED).is_file()


# --- splits ---
# A data set, opened: its parts, and what was learnt from the training part.

HELD_OUT = 0.2
"""The part that is held out where the job does not say."""
_SPLIT_TAG = 0x5911
_MOMENT_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class Splits:
    """Two sources and the facts a task is built from."""

    train: BatchSource
    valid: BatchSource | None
    labels: tuple[str, ...]
    """Names of the classes; none for numbers and language models."""
    shape: tuple[int, ...]
    """Of one sample of the model's first input."""
    fitted: dict[str, Any]
    """Plain data: all that was learnt from the training part, enough to open new data alike."""
    about: dict[str, Any]
    """Facts for the report."""


def split_rows(
    rows: int, held_out: float | None, seed: int, classes: np.ndarray[Any, Any] | None = None
) -> tuple[Tensor, Tensor]:
    """Training and held-out rows, in file order; of every class the same part is held out."""
    count = min(max(round(rows * (held_out or HELD_OUT)), 1), rows - 1)
    if rows < 2:
        raise DataError(f"{rows} record is too few to hold some out")
    drawn = np.random.default_rng([_SPLIT_TAG, seed]).random(rows)
    if classes is None:
        order = np.argsort(drawn, kind="stable")
    else:
        order = np.argsort(_quantiles(classes, drawn), kind="stable")
    held = np.zeros(rows, bool)
    held[order[:count]] = True
    numbers = torch.arange(rows)
    mask = torch.from_numpy(held)
    return numbers[~mask], numbers[mask]


def _quantiles(classes: np.ndarray[Any, Any], drawn: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Where each record stands within its own class, from 0 to 1, in a random order."""
    order = np.lexsort((drawn, classes))
    sizes = np.bincount(classes)
    starts = np.cumsum(sizes) - sizes
    place = np.empty(len(classes))
    sorted_classes = classes[order]
    place[order] = (np.arange(len(classes)) - starts[sorted_classes] + 0.5) / sizes[sorted_classes]
    return place


def fit_moments(source: BatchSource, column: str, shape: tuple[int, ...]) -> Moments:
    """Mean and deviation of a column, read in pieces of a few megabytes."""
    moments = Moments(shape)
    step = 1
    start = 0
    while start < len(source):
        rows = torch.arange(start, min(start + step, len(source)))
        values = source.gather(rows)[column]
        assert isinstance(values, Tensor)
        moments.add(values.numpy())
        start += len(rows)
        step = max(1, _MOMENT_BYTES * len(rows) // max(1, values.nbytes))
    return moments


def mean_and_std(moments: Moments) -> dict[str, list[float]]:
    """Plain data; a feature that never changes gets deviation 1, so that it can be divided by."""
    std = np.where(moments.max > moments.min, moments.std, 1.0)
    return {"mean": moments.mean.tolist(), "std": std.tolist()}


Usual: TypeAlias = Mapping[str, Mapping[str, Any]]
"""Options of readers, by format."""


def load(part: Part, options: Mapping[str, Any] | None = None, usual: Usual | None = None) -> Frame:
    """Read a part into memory, by the options that are `usual` for its format where no others are
    given."""
    told = (usual or {}).get(part.format, {})
    given = {**told, **part.options, **(options or {})}
    if "types" in told and isinstance(given["types"], Mapping):
        given["types"] = {**told["types"], **given["types"]}
    tables = [pa.Table.from_batches(list(read(path, part.format, **given))) for path in part.paths]
    if len(tables) == 1:
        mapped = part.paths[0] if part.format == "shards" else None
        return Frame(tables[0], part.where, mapped)
    try:
        return Frame(pa.concat_tables(tables, promote_options="permissive"), part.where)
    except pa.ArrowException as error:
        raise DataError(f"{part.where}: its files differ: {error}") from None


def class_names(part: Part) -> list[str]:
    """The names of the classes, where `labels.txt` or `classes.txt` lies beside the data."""
    for name in ("labels.txt", "classes.txt"):
        path = part.paths[0].parent / name
        if path.is_file():
            return path.read_text(encoding="utf-8").splitlines()
    return []

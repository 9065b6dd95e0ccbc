"""Read the parts of a data set into frames, and split rows where there is no held-out part."""

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


@dataclass(frozen=True, slots=True)
class Origin:
    """A data set in memory: its training part, its held-out part if it has one, and facts."""

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
    """Read the section's data set.

    `own` names the options that are not for the reader. `usual` are default options of readers.

    Of `new` data, for a model that is already trained, only one part is read: the held-out one if
    there are two. It becomes `train` of the result.
    """
    if section.name is not None:
        table, names = load_shipped(section.name, section.options)
        return Origin(Frame(table, section.name), None, {"name": section.name}, names)
    parts = locate(section, new=new, recognise=recognise)
    options = {key: value for key, value in section.options.items() if key not in own}
    train = _load(parts.train, options, usual)
    valid = _load(parts.valid, options, usual) if parts.valid is not None else None
    return Origin(train, valid, about_parts(parts), _class_names(parts.train))


def _load(
    part: Part, options: Mapping[str, Any] | None = None, usual: Usual | None = None
) -> Frame:
    """Read a part into memory; `options` override those of the part, and these the `usual` ones.

    The option `types` is merged column by column.
    """
    defaults = (usual or {}).get(part.format, {})
    given = {**defaults, **part.options, **(options or {})}
    if "types" in defaults and isinstance(given["types"], Mapping):
        given["types"] = {**defaults["types"], **given["types"]}
    tables = [pa.Table.from_batches(list(read(path, part.format, **given))) for path in part.paths]
    if len(tables) == 1:
        mapped = part.paths[0] if part.format == "shards" else None
        return Frame(tables[0], part.where, mapped)
    try:
        return Frame(pa.concat_tables(tables, promote_options="permissive"), part.where)
    except pa.ArrowException as error:
        raise DataError(f"{part.where}: its files differ: {error}") from None


Usual: TypeAlias = Mapping[str, Mapping[str, Any]]
"""Default options of the strict readers, by format."""


def _class_names(part: Part) -> list[str]:
    """Return the class names from a `labels.txt` or `classes.txt` beside the data, if any."""
    for name in ("labels.txt", "classes.txt"):
        path = part.paths[0].parent / name
        if path.is_file():
            return path.read_text(encoding="utf-8").splitlines()
    return []


def check_fitted(fitted: Mapping[str, Any], kind: str) -> None:
    """Refuse a `fitted` from another kind of data."""
    found = fitted.get("kind")
    if found != kind:
        raise DataError(f"the run was trained on {found} data; here {kind} data is opened")


def is_prepared(section: DataSection, fitted: Mapping[str, Any] | None = None) -> bool:
    """Return whether a section is prepared data, or new data for a model of prepared data.

    It is here and not in `prepared`, so that jobs without a recipe do not import recipes.
    """
    if fitted is not None:
        return fitted.get("kind") == PREPARED_KIND
    return section.path is not None and (Path(section.path).expanduser() / PREPARED).is_file()


PREPARED_KIND = "prepared"
"""The `kind` in `fitted` of a run that was trained on prepared data."""


@dataclass(frozen=True, slots=True)
class Splits:
    """Two sources, and the facts that a task is built from."""

    train: BatchSource
    valid: BatchSource | None
    labels: tuple[str, ...]
    """The names of the classes; empty for numbers and language models."""
    shape: tuple[int, ...]
    """The shape of one sample of the model's first input."""
    fitted: dict[str, Any]
    """Plain data: what was fitted on the training part, enough to encode new data the same way."""
    about: dict[str, Any]
    """Facts for the report."""


def split_rows(
    rows: int, held_out: float | None, seed: int, classes: np.ndarray[Any, Any] | None = None
) -> tuple[Tensor, Tensor]:
    """Return the numbers of training rows and held-out rows, both in file order.

    `held_out` is a share. With `classes`, the same share of every class is held out.
    """
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


HELD_OUT = 0.2
"""The share of rows that is held out if the job does not set it."""
_SPLIT_TAG = 0x5911


def _quantiles(classes: np.ndarray[Any, Any], drawn: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return each record's place within its own class, from 0 to 1, in the order of `drawn`."""
    order = np.lexsort((drawn, classes))
    sizes = np.bincount(classes)
    starts = np.cumsum(sizes) - sizes
    place = np.empty(len(classes))
    sorted_classes = classes[order]
    place[order] = (np.arange(len(classes)) - starts[sorted_classes] + 0.5) / sizes[sorted_classes]
    return place


def fit_moments(source: BatchSource, column: str, shape: tuple[int, ...]) -> Moments:
    """Fit mean and deviation of a column, reading it in pieces of a few megabytes."""
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


_MOMENT_BYTES = 8 << 20


def mean_and_std(moments: Moments) -> dict[str, list[float]]:
    """Return mean and deviation as plain data.

    A constant feature gets deviation 1, so that it can be divided by.
    """
    std = np.where(moments.max > moments.min, moments.std, 1.0)
    return {"mean": moments.mean.tolist(), "std": std.tolist()}

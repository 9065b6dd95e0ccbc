"""Tables of categories and numbers, for models over embeddings."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from echelon.core.config.sections import DataSection
from echelon.core.errors import DataError
from echelon.core.interfaces import BatchSource
from echelon.data.clicks import ClickOptions, auc, make_clicks
from echelon.data.opening.frames import Frame
from echelon.data.opening.origin import Origin, check_fitted, open_origin
from echelon.data.opening.splits import Splits, split_rows
from echelon.data.opening.table_forms import (
    fields_source,
    is_ready,
    learn_fields,
    learn_ready,
    ready_source,
)
from echelon.data.opening.targets import Classes, find_target
from echelon.data.readers.criteo import is_criteo
from echelon.data.readers.detect import format_of_name
from echelon.data.readers.movielens import is_movielens
from echelon.data.sources import Subset

CHANCE = "chance"
"""The column of a made-up log that says how likely each record is: it is not for the model."""


def open_table(
    section: DataSection, seed: int, *, fitted: Mapping[str, Any] | None = None
) -> Splits:
    """Columns `dense` (float32 [D]), `ids` (int64 [F], 0 for what was not seen) and `y` (0 or 1).

    Text, booleans and what the option `categories` names are categories; the rest are numbers,
    kept raw, the training mean in place of missing ones. The files of Criteo and MovieLens are
    known by their form and their names. With `fitted` nothing is learnt again, all records are
    held out, and `y` is absent where the target is.
    """
    origin = _origin(section, new=fitted is not None)
    if fitted is None:
        return _open(section, seed, origin)
    check_fitted(fitted, "table")
    source = _known_source(origin.train, fitted)
    about = {**origin.about, "held_out_rows": len(source)}
    about |= _best(origin.train, np.arange(len(source)))
    shape = (len(fitted["mean"]),)
    return Splits(source, source, tuple(fitted["labels"]), shape, dict(fitted), about)


def _origin(section: DataSection, *, new: bool) -> Origin:
    if section.name == "clicks":
        table = make_clicks(ClickOptions.of(section.options))
        return Origin(Frame(table, "clicks"), None, {"name": "clicks"})
    return open_origin(section, new=new, own={"categories"}, recognise=_recognise)


def _recognise(path: Path) -> str | None:
    if is_movielens(path):
        return "movielens"
    known = format_of_name(path)
    return "criteo" if known in (None, "text", "tsv") and is_criteo(path) else known


def _open(section: DataSection, seed: int, origin: Origin) -> Splits:
    frame = origin.train
    target = find_target(frame, section.target)
    classes = Classes.fit(frame, target, origin.class_names)
    if len(classes.values) != 2:
        raise DataError(
            f"{frame.where}: target {target!r} has {len(classes.values)} classes: here it is yes "
            f"or no"
        )
    y = classes.encode(frame, target)
    kept = held = torch.arange(len(frame))
    if origin.valid is None:
        kept, held = split_rows(len(frame), section.held_out, seed, y)
    learnt = (
        learn_ready(frame, kept.numpy())
        if is_ready(frame)
        else learn_fields(frame, section, target, kept.numpy())
    )
    fitted = {"kind": "table", "target": target, **learnt}
    fitted |= {"classes": classes.values, "labels": classes.names}
    whole = _known_source(frame, fitted)
    train: BatchSource = whole
    valid: BatchSource
    if origin.valid is None:
        train, valid = Subset(whole, kept), Subset(whole, held)
    else:
        valid = _known_source(origin.valid, fitted)
    about = {**origin.about, "rows": len(train), "held_out_rows": len(valid)}
    about |= _best(frame, held.numpy())
    return Splits(train, valid, tuple(classes.names), (len(fitted["mean"]),), fitted, about)


def _known_source(frame: Frame, fitted: Mapping[str, Any]) -> BatchSource:
    others = {}
    if frame.has(fitted["target"]):
        classes = Classes(fitted["classes"], fitted["labels"])
        others["y"] = classes.encode(frame, fitted["target"]).astype(np.float32)
    make = ready_source if fitted["form"] == "ready" else fields_source
    return make(frame, fitted, others)


def _best(frame: Frame, rows: np.ndarray[Any, Any]) -> dict[str, float]:
    """The AUC that no model can beat, where the true chances are known."""
    if CHANCE not in frame.names or not is_ready(frame):
        return {}
    clicked = frame.array("y")[rows]
    return {"best_auc": auc(frame.array(CHANCE)[rows], clicked)}

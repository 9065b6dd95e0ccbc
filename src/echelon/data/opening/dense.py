"""Vectors and images, to be classified or to give a number."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor

from echelon.core.config.sections import DataSection
from echelon.core.errors import DataError
from echelon.core.interfaces import BatchSource
from echelon.data.batch import dense
from echelon.data.opening.features import find_features, input_maker, prepared, stored_figures
from echelon.data.opening.frames import Frame
from echelon.data.opening.origin import Origin, check_fitted, open_origin
from echelon.data.opening.splits import Splits, fit_moments, mean_and_std, split_rows
from echelon.data.opening.targets import Classes, encode_numbers, find_target
from echelon.data.sources import Subset

TargetKind: TypeAlias = Literal["class", "number"]


def open_dense(
    section: DataSection,
    seed: int,
    *,
    target: TargetKind,
    fitted: Mapping[str, Any] | None = None,
) -> Splits:
    """Columns `x` (float32, or uint8 images) and `y` (int64 classes, or float32).

    Images are [C, H, W]. `x` is raw: its mean and deviation are in `fitted`, for the model's
    first layer. With `fitted` nothing is learnt again, all records are held out, and `y` is
    absent where the target is.
    """
    origin = open_origin(section, new=fitted is not None)
    if fitted is not None:
        check_fitted(fitted, "dense")
        return _open_new(origin, fitted)
    return _open(section, seed, origin, _learn(section, origin, target))


def _learn(section: DataSection, origin: Origin, target: TargetKind) -> dict[str, Any]:
    """All but the moments, which need the split."""
    frame = origin.train
    name = find_target(frame, section.target)
    fitted: dict[str, Any] = {"kind": "dense", "target": name, "target_kind": target}
    fitted["features"] = list(find_features(frame, section.columns, {name}))
    if target == "class":
        classes = Classes.fit(frame, name, origin.class_names)
        fitted |= {"classes": classes.values, "labels": classes.names}
    return fitted


def _open(section: DataSection, seed: int, origin: Origin, fitted: dict[str, Any]) -> Splits:
    y = _targets(origin.train, fitted)
    kept = held = None
    if origin.valid is None:
        classes = y if fitted["target_kind"] == "class" else None
        kept, held = split_rows(len(y), section.held_out, seed, classes)
    raw = _chosen(_source(origin.train, fitted, {"y": y}), kept)
    shape = _shape(raw)
    known = stored_figures(origin.train, fitted["features"], shape) if kept is None else None
    fitted |= known or mean_and_std(fit_moments(raw, "x", shape))
    fitted["shape"] = list(shape)
    whole = _source(origin.train, fitted, {"y": y})
    train = _chosen(whole, kept)
    valid = _chosen(whole, held) if origin.valid is None else _known_source(origin.valid, fitted)
    about = {**origin.about, "rows": len(train), "held_out_rows": len(valid)}
    return Splits(train, valid, tuple(fitted.get("labels", ())), shape, fitted, about)


def _open_new(origin: Origin, fitted: Mapping[str, Any]) -> Splits:
    source = _known_source(origin.train, fitted)
    about = {**origin.about, "held_out_rows": len(source)}
    labels, shape = tuple(fitted.get("labels", ())), tuple(fitted["shape"])
    return Splits(source, source, labels, shape, dict(fitted), about)


def _known_source(frame: Frame, fitted: Mapping[str, Any]) -> BatchSource:
    """Samples of the fitted shape, with `y` if their target is there."""
    known = frame.has(fitted["target"])
    source = _source(frame, fitted, {"y": _targets(frame, fitted)} if known else {})
    if _shape(source) != tuple(fitted["shape"]):
        raise DataError(
            f"{frame.where}: a sample has shape {list(_shape(source))}; the model is trained on "
            f"{fitted['shape']}"
        )
    return source


def _source(frame: Frame, fitted: Mapping[str, Any], others: Mapping[str, Any]) -> BatchSource:
    features = fitted["features"]
    return prepared(frame, features, input_maker(frame, features, fitted.get("mean")), others)


def _targets(frame: Frame, fitted: Mapping[str, Any]) -> np.ndarray[Any, Any]:
    if fitted["target_kind"] == "number":
        return encode_numbers(frame, fitted["target"])
    return Classes(fitted["classes"], fitted["labels"]).encode(frame, fitted["target"])


def _chosen(source: BatchSource, rows: Tensor | None) -> BatchSource:
    return source if rows is None else Subset(source, rows)


def _shape(source: BatchSource) -> tuple[int, ...]:
    return tuple(dense(source.gather(torch.zeros(1, dtype=torch.int64)), "x").shape[1:])

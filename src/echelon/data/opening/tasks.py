"""Dense, text, language, table: fit / known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from echelon.core.config.sections import DataSection
from echelon.core.errors import DataError, unknown
from echelon.core.interfaces import BatchSource
from echelon.core.types import Batch
from echelon.data.batch import dense
from echelon.data.formats.files import format_of_name
from echelon.data.formats.public import is_criteo, is_movielens
from echelon.data.formats.streams import decode, read_bytes
from echelon.data.opening.frame import (
    Classes,
    Frame,
    category_numbers,
    encode_numbers,
    filled,
    find_features,
    find_target,
    input_maker,
    learn_categories,
    prepared,
    stored_figures,
    tell_apart,
)
from echelon.data.opening.load import (
    Origin,
    Splits,
    check_fitted,
    fit_moments,
    mean_and_std,
    open_origin,
    split_rows,
)
from echelon.data.opening.locate import Part, about_parts, locate
from echelon.data.shards.layout import read_manifest
from echelon.data.shards.statistics import Moments
from echelon.data.sources import ColumnSource, Subset, WindowSource
from echelon.data.synthetic import ClickOptions, auc, make_clicks
from echelon.data.text import TokenKind, Tokens, Vocabulary, padded, tokenise

# --- dense ---
# Vectors and images, to be classified or to give a number.

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
    return _open_dense(section, seed, origin, _learn(section, origin, target))


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


def _open_dense(section: DataSection, seed: int, origin: Origin, fitted: dict[str, Any]) -> Splits:
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
    valid = _chosen(whole, held) if origin.valid is None else _known_dense(origin.valid, fitted)
    about = {**origin.about, "rows": len(train), "held_out_rows": len(valid)}
    return Splits(train, valid, tuple(fitted.get("labels", ())), shape, fitted, about)


def _open_new(origin: Origin, fitted: Mapping[str, Any]) -> Splits:
    source = _known_dense(origin.train, fitted)
    about = {**origin.about, "held_out_rows": len(source)}
    labels, shape = tuple(fitted.get("labels", ())), tuple(fitted["shape"])
    return Splits(source, source, labels, shape, dict(fitted), about)


def _known_dense(frame: Frame, fitted: Mapping[str, Any]) -> BatchSource:
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


# --- text ---
# Texts to be classified.

MAX_LENGTH = 512
"""Tokens of a text that are kept where the job sets no length."""
_ENOUGH = 1000
"""From so many texts on, a word that occurs once counts as unknown: that trains `unknown`."""


def open_text(
    section: DataSection, seed: int, *, fitted: Mapping[str, Any] | None = None
) -> Splits:
    """Columns `x` (int64 token numbers [L], padded with 0) and `y` (int64 classes).

    With `fitted` nothing is learnt again, all records are held out, and `y` is absent where the
    target is.
    """
    text = section.text if fitted is None else fitted.get("text", section.text)
    # A text such as "007" is to be read as it stands.
    types = {"types": {text: "string"}}
    origin = open_origin(section, new=fitted is not None, usual={"csv": types, "tsv": types})
    if fitted is None:
        return _open_text(section, seed, origin)
    check_fitted(fitted, "text")
    source = _new_source(origin.train, fitted)
    about = {**origin.about, "held_out_rows": len(source)}
    labels, shape = tuple(fitted["labels"]), (fitted["length"],)
    return Splits(source, source, labels, shape, dict(fitted), about)


def _open_text(section: DataSection, seed: int, origin: Origin) -> Splits:
    frame = origin.train
    target = find_target(frame, section.target)
    classes = Classes.fit(frame, target, origin.class_names)
    y = classes.encode(frame, target)
    tokens = tokenise(_texts(frame, section.text), section.tokens or "words")
    learnt = tokens
    if origin.valid is None:
        kept, held = split_rows(len(frame), section.held_out, seed, y)
        learnt = tokens.take(np.isin(np.arange(len(frame)), kept.numpy()))
    vocabulary = _learn_words(section, learnt)
    length = _length(section, learnt.lengths)
    fitted = {
        **{"kind": "text", "target": target, "text": section.text, "length": length},
        **{"classes": classes.values, "labels": classes.names},
        **vocabulary.to_json(),
    }
    whole = ColumnSource({"x": padded(vocabulary.number(tokens), length), "y": y})
    train: BatchSource = whole
    valid: BatchSource
    if origin.valid is None:
        train, valid = Subset(whole, kept), Subset(whole, held)
    else:
        valid = _new_source(origin.valid, fitted)
    about = {**origin.about, "rows": len(train), "held_out_rows": len(valid)}
    about |= {"vocabulary": len(vocabulary), "length": length}
    about["texts_cut"] = int((tokens.lengths > length).sum())
    return Splits(train, valid, tuple(classes.names), (length,), fitted, about)


def _new_source(frame: Frame, fitted: Mapping[str, Any]) -> ColumnSource:
    texts = _texts(frame, fitted["text"])
    x = Vocabulary.from_json(fitted).encode_padded(texts, fitted["length"])
    if not frame.has(fitted["target"]):
        return ColumnSource({"x": x})
    classes = Classes(fitted["classes"], fitted["labels"])
    return ColumnSource({"x": x, "y": classes.encode(frame, fitted["target"])})


def _texts(frame: Frame, name: str) -> list[str]:
    column = frame.column(name, "text column")
    kind = column.type
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
        if not (pa.types.is_integer(kind) or pa.types.is_floating(kind)):
            raise DataError(f"{frame.where}: column {name!r} is of type {kind}: not text")
        column = column.cast(pa.string())
    texts: list[str] = column.fill_null("").to_pylist()
    return texts


def _learn_words(section: DataSection, tokens: Tokens) -> Vocabulary:
    often = tokens.kind == "words" and len(tokens.lengths) >= _ENOUGH
    return Vocabulary.of(tokens, section.vocabulary, at_least=2 if often else 1)


def _length(section: DataSection, lengths: np.ndarray[Any, Any]) -> int:
    longest = int(lengths.max(initial=1))
    return max(1, min(longest, section.length or MAX_LENGTH))


# --- language ---
# One long text for a language model.

LENGTH = 128
"""The context where the job sets no length."""
HELD_OUT = 0.1
"""The last part of the text that is kept for validation where the job does not say."""


def open_language(
    section: DataSection, seed: int, *, fitted: Mapping[str, Any] | None = None
) -> Splits:
    """Windows `x` and `y` (int64 [T]) over a text of characters or bytes.

    A window begins where the one before ends, or every `stride` tokens (an option). The last
    part of the text is held out; with `fitted`, all of it is, and nothing is learnt again.
    """
    del seed  # a text is not shuffled before it is cut
    parts = locate(section, new=fitted is not None, recognise=lambda _: "text", one_text=True)
    if fitted is not None:
        check_fitted(fitted, "language")
        vocabulary = Vocabulary.from_json(fitted)
        tokens = _number(vocabulary, _read(parts.train, vocabulary.kind))
        source = WindowSource(tokens, fitted["length"], fitted["length"])
        about = {**about_parts(parts), "held_out_tokens": len(tokens)}
        return Splits(source, source, (), (fitted["length"],), dict(fitted), about)
    kind = _kind(section)
    train = _read(parts.train, kind)
    if parts.valid is not None:
        valid = _read(parts.valid, kind)
    else:
        train, valid = _cut(section, train)
    vocabulary = Vocabulary.of(train, section.vocabulary)
    length, stride = section.length or LENGTH, _stride(section)
    train_tokens, valid_tokens = _number(vocabulary, train), _number(vocabulary, valid)
    about = {**about_parts(parts), "vocabulary": len(vocabulary), "length": length}
    about |= {"tokens": len(train_tokens), "held_out_tokens": len(valid_tokens)}
    return Splits(
        WindowSource(train_tokens, length, stride or length),
        WindowSource(valid_tokens, length, length),
        (),
        (length,),
        {"kind": "language", "length": length, **vocabulary.to_json()},
        about,
    )


def _kind(section: DataSection) -> TokenKind:
    if section.tokens == "words":
        raise DataError("data.tokens: a language model reads characters or bytes, not words")
    return section.tokens or "characters"


def _stride(section: DataSection) -> int | None:
    for name in section.options:
        if name != "stride":
            raise DataError(unknown("option of a language model's data", name, ["stride"]))
    stride = section.options.get("stride")
    if stride is not None and (not isinstance(stride, int) or stride < 1):
        raise DataError(f"data.options.stride is {stride!r}: it must be a whole number above 0")
    return stride


def _read(part: Part, kind: TokenKind) -> Tokens:
    """All files of a part as one text."""
    content = b"".join(read_bytes(path) for path in part.paths)
    if not content:
        raise DataError(f"{part.where}: empty")
    if kind == "bytes":
        # What is read as bytes need not be UTF-8.
        return Tokens(kind, np.frombuffer(content, np.uint8), np.array([len(content)]))
    return tokenise([decode(content, part.paths[0])], kind)


def _cut(section: DataSection, tokens: Tokens) -> tuple[Tokens, Tokens]:
    kept = int(len(tokens.flat) * (1 - (section.held_out or HELD_OUT)))
    halves = tokens.flat[:kept], tokens.flat[kept:]
    first, second = (Tokens(tokens.kind, half, np.array([len(half)])) for half in halves)
    return first, second


def _number(vocabulary: Vocabulary, tokens: Tokens) -> Tensor:
    return torch.from_numpy(vocabulary.number(tokens).flat)


# --- table ---
# Tables of categories and numbers, for models over embeddings.

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
        return _open_table(section, seed, origin)
    check_fitted(fitted, "table")
    source = _known_table(origin.train, fitted)
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


def _open_table(section: DataSection, seed: int, origin: Origin) -> Splits:
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
    whole = _known_table(frame, fitted)
    train: BatchSource = whole
    valid: BatchSource
    if origin.valid is None:
        train, valid = Subset(whole, kept), Subset(whole, held)
    else:
        valid = _known_table(origin.valid, fitted)
    about = {**origin.about, "rows": len(train), "held_out_rows": len(valid)}
    about |= _best(frame, held.numpy())
    return Splits(train, valid, tuple(classes.names), (len(fitted["mean"]),), fitted, about)


def _known_table(frame: Frame, fitted: Mapping[str, Any]) -> BatchSource:
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


# --- table_forms ---
# The two forms of a table: named fields, or vectors `dense` and `ids` that are ready to use.

Array: TypeAlias = np.ndarray[Any, Any]
Others: TypeAlias = Mapping[str, Array]


def is_ready(frame: Frame) -> bool:
    return {"dense", "ids"} <= set(frame.names)


def learn_ready(frame: Frame, rows: Array) -> dict[str, Any]:
    """Sizes of the fields, and moments of the numbers, of vectors that are ready."""
    if frame.stored is not None:
        highest = read_manifest(frame.stored).statistics["ids"]["max"]
    else:
        highest = _ids(frame).max(0).tolist()
    source = Subset(prepared(frame, ["dense"], _float_dense, {}), torch.from_numpy(rows))
    width = dense(source.gather(torch.zeros(1, dtype=torch.int64)), "dense").shape[1]
    moments = fit_moments(source, "dense", (width,))
    return {
        "form": "ready",
        "cardinalities": [int(value) + 1 for value in highest],
        **mean_and_std(moments),
    }


def ready_source(frame: Frame, fitted: Mapping[str, Any], others: Others) -> BatchSource:
    mean = torch.tensor(fitted["mean"], dtype=torch.float32)
    sizes = torch.tensor(fitted["cardinalities"])
    widths = [len(mean), len(sizes)]

    def prepare(batch: Batch) -> Batch:
        numbers, ids = dense(batch, "dense").to(torch.float32), dense(batch, "ids").to(torch.int64)
        if [numbers.shape[1], ids.shape[1]] != widths:
            raise DataError(
                f"{frame.where}: {numbers.shape[1]} numbers and {ids.shape[1]} ids per record; "
                f"the model is trained on {widths[0]} and {widths[1]}"
            )
        known = (ids >= 0) & (ids < sizes)
        return {"dense": filled(numbers, mean), "ids": ids.where(known, 0)}

    return prepared(frame, ["dense", "ids"], prepare, others)


def learn_fields(frame: Frame, section: DataSection, target: str, rows: Array) -> dict[str, Any]:
    """Categories and moments of named fields."""
    features = find_features(frame, section.columns, {target})
    numbers, names = tell_apart(frame, features, section.options.get("categories", ()))
    categories = {name: learn_categories(frame, name, rows, section.vocabulary) for name in names}
    moments = Moments((len(numbers),))
    moments.add(_matrix(frame, numbers)[rows])
    return {
        "form": "fields",
        "numbers": numbers,
        "categories": categories,
        "cardinalities": [len(values) + 1 for values in categories.values()],
        **mean_and_std(moments),
    }


def fields_source(frame: Frame, fitted: Mapping[str, Any], others: Others) -> BatchSource:
    numbers = torch.from_numpy(_matrix(frame, fitted["numbers"]))
    mean = torch.tensor(fitted["mean"], dtype=torch.float32)
    ids = category_numbers(frame, fitted["categories"])
    return ColumnSource({"dense": filled(numbers, mean), "ids": ids, **others})


def _matrix(frame: Frame, names: Sequence[str]) -> Array:
    out = np.empty((len(frame), len(names)), np.float32)
    for number, name in enumerate(names):
        column = frame.array(name)
        if column.ndim > 1:
            raise DataError(f"{frame.where}: column {name!r} has several numbers per record")
        out[:, number] = column
    return out


def _ids(frame: Frame) -> Array:
    ids = frame.array("ids")
    if ids.ndim != 2 or ids.dtype.kind not in "iu" or ids.min() < 0:
        raise DataError(f"{frame.where}: `ids` must hold a row of whole numbers from 0 on")
    return ids


def _float_dense(batch: Batch) -> Batch:
    return {"dense": dense(batch, "dense").to(torch.float32)}

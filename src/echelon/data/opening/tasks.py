"""Open raw data for a task: dense (vectors and images), text, language, table.

Every kind has one entry point, `open_<kind>`, which works in one of two ways:

    training   load ─▶ split the rows ─▶ fit on the training rows ─▶ sources of both parts
    new data   load ─────────────────── with `fitted` of the run ─▶ one source, all held out

`fitted` is plain data: everything learned from the training rows (classes, vocabulary, categories,
means), enough to encode new data in the same way.
"""

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

# Dense: vectors and images

TargetKind: TypeAlias = Literal["class", "number"]


def open_dense(
    section: DataSection,
    seed: int,
    *,
    target: TargetKind,
    fitted: Mapping[str, Any] | None = None,
) -> Splits:
    """Open vectors or images, to predict a class or a number.

    The columns are `x` (float32, or uint8 images) and `y` (int64 classes, or float32). Images are
    [C, H, W]. `x` is not normalized: its mean and deviation are in `fitted`, for the model's first
    layer. With `fitted`, nothing is fitted, all records are held out, and `y` is absent if the
    target is.
    """
    origin = open_origin(section, new=fitted is not None)
    if fitted is not None:
        check_fitted(fitted, "dense")
        source = _dense_source(origin.train, fitted)
        about = {**origin.about, "held_out_rows": len(source)}
        labels, shape = tuple(fitted.get("labels", ())), tuple(fitted["shape"])
        return Splits(source, source, labels, shape, dict(fitted), about)
    return _fit_dense(section, seed, origin, _fit_columns(section, origin, target))


def _fit_dense(section: DataSection, seed: int, origin: Origin, fitted: dict[str, Any]) -> Splits:
    y = _targets(origin.train, fitted)
    kept = held = None
    if origin.valid is None:
        classes = y if fitted["target_kind"] == "class" else None
        kept, held = split_rows(len(y), section.held_out, seed, classes)
    raw = _chosen(_samples(origin.train, fitted, {"y": y}), kept)
    shape = _shape(raw)
    known = stored_figures(origin.train, fitted["features"], shape) if kept is None else None
    fitted |= known or mean_and_std(fit_moments(raw, "x", shape))
    fitted["shape"] = list(shape)
    whole = _samples(origin.train, fitted, {"y": y})
    train = _chosen(whole, kept)
    valid = _chosen(whole, held) if origin.valid is None else _dense_source(origin.valid, fitted)
    about = {**origin.about, "rows": len(train), "held_out_rows": len(valid)}
    return Splits(train, valid, tuple(fitted.get("labels", ())), shape, fitted, about)


def _fit_columns(section: DataSection, origin: Origin, target: TargetKind) -> dict[str, Any]:
    """Return all of `fitted` but shape, mean and deviation, which need the split."""
    frame = origin.train
    name = find_target(frame, section.target)
    fitted: dict[str, Any] = {"kind": "dense", "target": name, "target_kind": target}
    fitted["features"] = list(find_features(frame, section.columns, {name}))
    if target == "class":
        classes = Classes.fit(frame, name, origin.class_names)
        fitted |= {"classes": classes.values, "labels": classes.names}
    return fitted


def _dense_source(frame: Frame, fitted: Mapping[str, Any]) -> BatchSource:
    """Return samples of the fitted shape, with `y` if the frame has their target."""
    known = frame.has(fitted["target"])
    source = _samples(frame, fitted, {"y": _targets(frame, fitted)} if known else {})
    if _shape(source) != tuple(fitted["shape"]):
        raise DataError(
            f"{frame.where}: a sample has shape {list(_shape(source))}; the model is trained on "
            f"{fitted['shape']}"
        )
    return source


def _samples(frame: Frame, fitted: Mapping[str, Any], others: Mapping[str, Any]) -> BatchSource:
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


# Text

MAX_LENGTH = 512
"""Tokens kept of a text if the job sets no length."""
_ENOUGH = 1000
"""With at least this many texts, words that occur once count as unknown, to train that token."""


def open_text(
    section: DataSection, seed: int, *, fitted: Mapping[str, Any] | None = None
) -> Splits:
    """Open texts, to predict a class.

    The columns are `x` (int64 token numbers [L], padded with 0) and `y` (int64 classes). With
    `fitted`, nothing is fitted, all records are held out, and `y` is absent if the target is.
    """
    text = section.text if fitted is None else fitted.get("text", section.text)
    # A text such as "007" must not be read as a number.
    types = {"types": {text: "string"}}
    origin = open_origin(section, new=fitted is not None, usual={"csv": types, "tsv": types})
    if fitted is None:
        return _fit_text(section, seed, origin)
    check_fitted(fitted, "text")
    source = _text_source(origin.train, fitted)
    about = {**origin.about, "held_out_rows": len(source)}
    labels, shape = tuple(fitted["labels"]), (fitted["length"],)
    return Splits(source, source, labels, shape, dict(fitted), about)


def _fit_text(section: DataSection, seed: int, origin: Origin) -> Splits:
    frame = origin.train
    target = find_target(frame, section.target)
    classes = Classes.fit(frame, target, origin.class_names)
    y = classes.encode(frame, target)
    tokens = tokenise(_texts(frame, section.text), section.tokens or "words")
    learnt = tokens
    if origin.valid is None:
        kept, held = split_rows(len(frame), section.held_out, seed, y)
        learnt = tokens.take(np.isin(np.arange(len(frame)), kept.numpy()))
    vocabulary = _fit_vocabulary(section, learnt)
    length = _text_length(section, learnt.lengths)
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
        valid = _text_source(origin.valid, fitted)
    about = {**origin.about, "rows": len(train), "held_out_rows": len(valid)}
    about |= {"vocabulary": len(vocabulary), "length": length}
    about["texts_cut"] = int((tokens.lengths > length).sum())
    return Splits(train, valid, tuple(classes.names), (length,), fitted, about)


def _text_source(frame: Frame, fitted: Mapping[str, Any]) -> ColumnSource:
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


def _fit_vocabulary(section: DataSection, tokens: Tokens) -> Vocabulary:
    twice = tokens.kind == "words" and len(tokens.lengths) >= _ENOUGH
    return Vocabulary.of(tokens, section.vocabulary, at_least=2 if twice else 1)


def _text_length(section: DataSection, lengths: np.ndarray[Any, Any]) -> int:
    longest = int(lengths.max(initial=1))
    return max(1, min(longest, section.length or MAX_LENGTH))


# Language: one long text

LENGTH = 128
"""Tokens of a window if the job sets no length."""
HELD_OUT = 0.1
"""The share of the text, at its end, that is held out if the job does not set it."""


def open_language(
    section: DataSection, seed: int, *, fitted: Mapping[str, Any] | None = None
) -> Splits:
    """Open a text for a language model that reads characters or bytes.

    The columns are windows `x` and `y` (int64 [T]). A window begins where the previous one ends, or
    every `stride` tokens (an option). The end of the text is held out; with `fitted`, nothing is
    fitted and all of the text is held out.
    """
    del seed  # the split is not random: the end of the text is held out
    parts = locate(section, new=fitted is not None, recognise=lambda _: "text", one_text=True)
    if fitted is not None:
        check_fitted(fitted, "language")
        vocabulary = Vocabulary.from_json(fitted)
        tokens = _number(vocabulary, _tokens_of(parts.train, vocabulary.kind))
        source = WindowSource(tokens, fitted["length"], fitted["length"])
        about = {**about_parts(parts), "held_out_tokens": len(tokens)}
        return Splits(source, source, (), (fitted["length"],), dict(fitted), about)
    kind = _token_kind(section)
    train = _tokens_of(parts.train, kind)
    if parts.valid is not None:
        valid = _tokens_of(parts.valid, kind)
    else:
        train, valid = _hold_out_end(section, train)
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


def _token_kind(section: DataSection) -> TokenKind:
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


def _tokens_of(part: Part, kind: TokenKind) -> Tokens:
    """Read all files of a part as one text."""
    content = b"".join(read_bytes(path) for path in part.paths)
    if not content:
        raise DataError(f"{part.where}: empty")
    if kind == "bytes":
        # Without decoding: bytes need not be UTF-8.
        return Tokens(kind, np.frombuffer(content, np.uint8), np.array([len(content)]))
    return tokenise([decode(content, part.paths[0])], kind)


def _hold_out_end(section: DataSection, tokens: Tokens) -> tuple[Tokens, Tokens]:
    kept = int(len(tokens.flat) * (1 - (section.held_out or HELD_OUT)))
    halves = tokens.flat[:kept], tokens.flat[kept:]
    first, second = (Tokens(tokens.kind, half, np.array([len(half)])) for half in halves)
    return first, second


def _number(vocabulary: Vocabulary, tokens: Tokens) -> Tensor:
    return torch.from_numpy(vocabulary.number(tokens).flat)


# Table: named fields, or vectors `dense` and `ids` that are ready to use

CHANCE = "chance"
"""The column of the synthetic click log with each record's true chance; models do not see it."""
Array: TypeAlias = np.ndarray[Any, Any]
Others: TypeAlias = Mapping[str, Array]


def open_table(
    section: DataSection, seed: int, *, fitted: Mapping[str, Any] | None = None
) -> Splits:
    """Open a table of categories and numbers, to predict yes or no.

    The columns are `dense` (float32 [D]), `ids` (int64 [F], 0 for unseen values) and `y` (0 or 1).
    Columns of text, booleans, and those that the option `categories` names are categories. The
    others are numbers; they are not normalized, and missing ones become the training mean. Criteo's
    files are recognized by their content, those of MovieLens by their names. With `fitted`, nothing
    is fitted, all records are held out, and `y` is absent if the target is.
    """
    origin = _origin(section, new=fitted is not None)
    if fitted is None:
        return _fit_table(section, seed, origin)
    check_fitted(fitted, "table")
    source = _table_source(origin.train, fitted)
    about = {**origin.about, "held_out_rows": len(source)}
    about |= _best_auc(origin.train, np.arange(len(source)))
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


def _fit_table(section: DataSection, seed: int, origin: Origin) -> Splits:
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
        _fit_ready(frame, kept.numpy())
        if _is_ready(frame)
        else _fit_fields(frame, section, target, kept.numpy())
    )
    fitted = {"kind": "table", "target": target, **learnt}
    fitted |= {"classes": classes.values, "labels": classes.names}
    whole = _table_source(frame, fitted)
    train: BatchSource = whole
    valid: BatchSource
    if origin.valid is None:
        train, valid = Subset(whole, kept), Subset(whole, held)
    else:
        valid = _table_source(origin.valid, fitted)
    about = {**origin.about, "rows": len(train), "held_out_rows": len(valid)}
    about |= _best_auc(frame, held.numpy())
    return Splits(train, valid, tuple(classes.names), (len(fitted["mean"]),), fitted, about)


def _table_source(frame: Frame, fitted: Mapping[str, Any]) -> BatchSource:
    others = {}
    if frame.has(fitted["target"]):
        classes = Classes(fitted["classes"], fitted["labels"])
        others["y"] = classes.encode(frame, fitted["target"]).astype(np.float32)
    make = _ready_source if fitted["form"] == "ready" else _fields_source
    return make(frame, fitted, others)


def _best_auc(frame: Frame, rows: np.ndarray[Any, Any]) -> dict[str, float]:
    """Return the AUC that no model can beat, if the true chances are known."""
    if CHANCE not in frame.names or not _is_ready(frame):
        return {}
    clicked = frame.array("y")[rows]
    return {"best_auc": auc(frame.array(CHANCE)[rows], clicked)}


def _is_ready(frame: Frame) -> bool:
    return {"dense", "ids"} <= set(frame.names)


def _fit_ready(frame: Frame, rows: Array) -> dict[str, Any]:
    """Fit the sizes of the fields and the moments of the numbers of ready vectors."""
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


def _ids(frame: Frame) -> Array:
    ids = frame.array("ids")
    if ids.ndim != 2 or ids.dtype.kind not in "iu" or ids.min() < 0:
        raise DataError(f"{frame.where}: `ids` must hold a row of whole numbers from 0 on")
    return ids


def _float_dense(batch: Batch) -> Batch:
    return {"dense": dense(batch, "dense").to(torch.float32)}


def _ready_source(frame: Frame, fitted: Mapping[str, Any], others: Others) -> BatchSource:
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


def _fit_fields(frame: Frame, section: DataSection, target: str, rows: Array) -> dict[str, Any]:
    """Fit the categories of fields and the moments of numbers of a table of named fields."""
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


def _fields_source(frame: Frame, fitted: Mapping[str, Any], others: Others) -> BatchSource:
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

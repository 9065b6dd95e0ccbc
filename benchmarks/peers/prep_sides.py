"""The jobs of `prepare.py` as scikit-learn and pandas do them, in one process.

    python -m peers.prep_sides tfidf raw.tsv FOLDER

Whole in memory, as most people write it, and each at its quickest: texts are read by pandas,
categories by its own type for them, and matrices are written without compression.
"""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import scipy.sparse as sp
from sklearn.feature_extraction.text import CountVectorizer, TfidfVectorizer
from sklearn.feature_selection import chi2
from sklearn.model_selection import train_test_split

from .prep_raw import CATEGORIES, NUMBERS

LEAST, SIZE, LENGTH, TEST, SEED = 2, 20_000, 256, 0.1, 0
"""Texts that a word must be in; words chosen by chi²; ids per text; share of the test split."""


def tfidf(raw: Path, out: Path) -> None:
    """Words of two letters or more, 1 + log(count), idf, rows of length 1."""
    frame = _texts(raw)
    vectorizer = TfidfVectorizer(min_df=LEAST, sublinear_tf=True, dtype=np.float32)
    matrix = vectorizer.fit_transform(frame["text"])
    sp.save_npz(out / "x.npz", matrix, compressed=False)
    _rest(frame, out)
    np.save(out / "idf.npy", vectorizer.idf_)
    _words(out, vectorizer.get_feature_names_out().tolist())


def vocabulary(raw: Path, out: Path) -> None:
    """The words that say most of a text's class by chi², and each text as numbers of those."""
    frame = _texts(raw)
    vectorizer = CountVectorizer(binary=True)
    scores, _ = chi2(vectorizer.fit_transform(frame["text"]), frame["label"])
    names = vectorizer.get_feature_names_out()
    best = np.argsort(-scores, kind="stable")[:SIZE]
    chosen = names[best].tolist()
    number = {word: at + 2 for at, word in enumerate(chosen)}.get
    cut = vectorizer.build_analyzer()
    ids = np.zeros((len(frame), LENGTH), np.int32)
    for row, text in enumerate(frame["text"]):
        words = cut(text)[:LENGTH]
        ids[row, : len(words)] = [number(word, 1) for word in words]
    np.save(out / "x.npy", ids)
    _rest(frame, out)
    np.save(out / "scores.npy", scores[best])
    _words(out, chosen)


def _texts(raw: Path) -> Any:
    return pd.read_csv(raw, sep="\t", quoting=csv.QUOTE_NONE, keep_default_na=False)


def _rest(frame: Any, out: Path) -> None:
    np.save(out / "id.npy", frame["id"].to_numpy())
    np.save(out / "y.npy", frame["label"].to_numpy())


def _words(out: Path, words: list[str]) -> None:
    (out / "words.json").write_text(json.dumps(words), encoding="utf-8")


def table(raw: Path, out: Path) -> None:
    """Numbers: missing ones become the mean, all are standardised. Categories: one column each,
    sparse. By figures of train, written by split."""
    frame = pd.read_csv(raw, dtype=dict.fromkeys(CATEGORIES, "category"))
    rows = train_test_split(np.arange(len(frame)), test_size=TEST, random_state=SEED)
    numbers = frame[list(NUMBERS)]
    train = numbers.iloc[rows[0]]
    mean, deviation = train.mean(), train.std(ddof=0)
    scaled = ((numbers.fillna(mean) - mean) / deviation).to_numpy(np.float32)
    categories = [frame[name].cat for name in CATEGORIES]
    # The last column of each is for what is missing, which pandas calls -1.
    sizes = [len(column.categories) + 1 for column in categories]
    starts = np.cumsum([0, *sizes])
    codes = np.stack([c.codes.to_numpy(np.int32) for c in categories], 1)
    codes += np.where(codes < 0, sizes, 0).astype(np.int32) + starts[:-1].astype(np.int32)
    for split, chosen in zip(("train", "test"), rows, strict=True):
        np.save(out / f"{split}-numbers.npy", scaled[chosen])
        sp.save_npz(
            out / f"{split}-categories.npz", _one_hot(codes[chosen], starts[-1]), compressed=False
        )
        for name in ("label", "id"):
            np.save(out / f"{split}-{name}.npy", frame[name].to_numpy()[chosen])
    np.save(out / "mean.npy", mean.to_numpy())
    np.save(out / "deviation.npy", deviation.to_numpy())
    names = [[*column.categories.tolist(), None] for column in categories]
    (out / "categories.json").write_text(json.dumps(names), encoding="utf-8")


def _one_hot(codes: Any, width: int) -> Any:
    count, columns = codes.shape
    ones = np.ones(codes.size, np.float32)
    ends = np.arange(0, codes.size + 1, columns)
    return sp.csr_matrix((ones, codes.reshape(-1), ends), (count, int(width)))


JOBS: dict[str, Callable[[Path, Path], None]] = {
    "tfidf": tfidf,
    "vocabulary": vocabulary,
    "csv": table,
}

if __name__ == "__main__":
    JOBS[sys.argv[1]](Path(sys.argv[2]), Path(sys.argv[3]))

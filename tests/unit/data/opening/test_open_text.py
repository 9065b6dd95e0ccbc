"""Texts opened for classification and for language models."""

from __future__ import annotations

import gzip
import json
import lzma
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from echelon.core.config import DataSection
from echelon.core.errors import DataError
from echelon.core.interfaces import BatchSource
from echelon.data import Splits, Vocabulary, open_language, open_text


def column(source: BatchSource | None, name: str) -> Tensor:
    assert source is not None
    values = source.gather(torch.arange(len(source)))[name]
    assert isinstance(values, Tensor)
    return values


def texts(path: object, **section: Any) -> Splits:
    return open_text(DataSection(path=str(path), **section), 0)


def language(path: object, **section: Any) -> Splits:
    return open_language(DataSection(path=str(path), **section), 0)


@pytest.fixture
def reviews(tmp_path: Path) -> Path:
    lines = [f'{row % 2}\ta {"good" if row % 2 else "bad"} film "no {row}' for row in range(40)]
    (tmp_path / "train.tsv").write_text("label\ttext\n" + "\n".join(lines))
    (tmp_path / "test.tsv").write_text("label\ttext\n1\tgood unheard film\n0\tbad\n")
    return tmp_path


def test_words_are_learnt_from_the_training_part(reviews: Path) -> None:
    splits = texts(reviews)
    vocabulary = Vocabulary.from_json(splits.fitted)
    assert splits.labels == ("0", "1")
    assert splits.shape == (6,)
    x = column(splits.valid, "x")
    assert x.dtype == torch.int64
    assert x.shape == (2, 6)
    assert vocabulary.decode(x[0].tolist()) == "good film"
    assert x[0].tolist()[1] == 1
    assert column(splits.valid, "y").tolist() == [1, 0]
    assert splits.about["vocabulary"] == len(vocabulary) == len(splits.fitted["vocabulary"])


def test_length_and_vocabulary_are_limits(reviews: Path) -> None:
    splits = texts(reviews, length=3, vocabulary=4)
    assert splits.shape == (3,)
    assert len(splits.fitted["vocabulary"]) == 6
    assert column(splits.train, "x").max() < 6
    assert splits.about["texts_cut"] == 40
    assert texts(reviews, length=500).shape == (6,)


def test_long_texts_are_cut_where_no_length_is_set(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text("label\ttext\n" + f"1\t{'word ' * 600}\n0\tx\n" * 5)
    assert texts(tmp_path / "a.tsv").shape == (512,)


def test_a_held_out_word_is_not_learnt(tmp_path: Path) -> None:
    lines = "".join(f"{row % 2}\tcommon word{row}\n" for row in range(50))
    (tmp_path / "a.tsv").write_text("label\ttext\n" + lines)
    letters = texts(tmp_path / "a.tsv", held_out=0.4, tokens="characters")
    assert len(letters.train) == 30
    splits = texts(tmp_path / "a.tsv", held_out=0.4)
    assert len(splits.train) == 30
    assert (column(splits.valid, "x")[:, 1] == 1).all()
    assert (column(splits.train, "x") != 1).all()


def test_among_many_texts_a_word_that_occurs_once_is_unknown(tmp_path: Path) -> None:
    lines = "".join(f"{row % 2}\tcommon word{row}\n" for row in range(1500))
    (tmp_path / "a.tsv").write_text("label\ttext\n" + lines)
    assert texts(tmp_path / "a.tsv").fitted["vocabulary"][2:] == ["common"]


def test_chinese_is_cut_into_characters(tmp_path: Path) -> None:
    for part in ("train", "dev"):
        content = "label\ttext\n0\t中国股市\n1\t体育新闻\n".encode()
        (tmp_path / f"{part}.tsv.gz").write_bytes(gzip.compress(content))
    (tmp_path / "labels.txt").write_text("stocks\nsports\n")
    splits = texts(tmp_path, tokens="characters")
    assert splits.labels == ("stocks", "sports")
    assert splits.shape == (4,)
    decoded = Vocabulary.from_json(splits.fitted).decode(column(splits.train, "x")[0].tolist())
    assert decoded == "中国股市"


def test_texts_that_look_like_numbers_stay_texts(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("label,text\n" + "1,007\n0,0.50\n" * 5)
    splits = texts(tmp_path / "a.csv")
    assert set(splits.fitted["vocabulary"][2:]) == {"007", "0.50"}


def test_class_folders_of_text_files(tmp_path: Path) -> None:
    for part in ("train", "test"):
        for label in ("neg", "pos"):
            (tmp_path / part / label).mkdir(parents=True)
            (tmp_path / part / label / "1.txt").write_text(f"{label} review")
    splits = texts(tmp_path)
    assert splits.labels == ("neg", "pos")
    assert column(splits.valid, "y").tolist() == [0, 1]


def test_other_columns_can_be_named(tmp_path: Path) -> None:
    lines = [json.dumps({"review": f"text {row}", "stars": row % 3}) for row in range(30)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    splits = texts(tmp_path / "a.jsonl", text="review", target="stars")
    assert splits.labels == ("0", "1", "2")
    assert texts(tmp_path / "a.jsonl", text="stars", target="stars").shape == (1,)
    with pytest.raises(DataError, match="text column 'text' is unknown"):
        texts(tmp_path / "a.jsonl", target="stars")
    (tmp_path / "b.jsonl").write_text('{"text":[1],"label":0}\n{"text":[2],"label":1}\n')
    with pytest.raises(DataError, match=r"column 'text' is of type .*: not text"):
        texts(tmp_path / "b.jsonl")


def test_new_texts_are_opened_as_the_old_were(reviews: Path) -> None:
    old = texts(reviews)
    (reviews / "new.tsv").write_text("text\nbad film\n\n")
    fitted = json.loads(json.dumps(old.fitted))
    new = open_text(DataSection(path=str(reviews / "new.tsv")), 0, fitted=fitted)
    assert new.valid is not None
    assert set(new.valid.gather(torch.arange(1))) == {"x"}
    assert column(new.valid, "x").shape[1] == 6
    assert (new.labels, new.shape, new.fitted) == (old.labels, old.shape, old.fitted)
    with pytest.raises(DataError, match="trained on text data; here language data is opened"):
        open_language(DataSection(path=str(reviews / "new.tsv")), 0, fitted=fitted)


def test_a_language_model_reads_windows_of_characters(tmp_path: Path) -> None:
    text = "".join(chr(97 + number % 26) for number in range(1000))
    (tmp_path / "input.txt.gz").write_bytes(gzip.compress(text.encode()))
    splits = language(tmp_path, length=16)
    vocabulary = Vocabulary.from_json(splits.fitted)
    assert (len(vocabulary), splits.shape, splits.labels) == (28, (16,), ())
    x, y = column(splits.train, "x"), column(splits.train, "y")
    assert torch.equal(x[:, 1:], y[:, :-1])
    assert vocabulary.decode(x[1].tolist()) == text[16:32]
    assert vocabulary.decode(column(splits.valid, "x")[0].tolist()) == text[900:916]
    assert (splits.about["tokens"], splits.about["held_out_tokens"]) == (900, 100)
    assert len(splits.train) == 899 // 16
    assert len(language(tmp_path, length=16, options={"stride": 1}).train) == 900 - 16
    assert language(tmp_path, length=16, held_out=0.5).about["held_out_tokens"] == 500


def test_bytes_need_not_be_text(tmp_path: Path) -> None:
    (tmp_path / "dump.xml.xz").write_bytes(lzma.compress(bytes(range(256)) * 10))
    splits = language(tmp_path, tokens="bytes")
    assert len(splits.fitted["vocabulary"]) == 258
    assert splits.shape == (128,)
    with pytest.raises(DataError, match=r"dump.xml.xz:2: not UTF-8"):
        language(tmp_path)


def test_language_parts_and_new_texts(tmp_path: Path) -> None:
    (tmp_path / "wiki.train.tokens").write_text("abcab" * 60)
    (tmp_path / "wiki.valid.tokens").write_text("abx" * 60)
    splits = language(tmp_path, length=8)
    assert splits.about["held_out_tokens"] == 180
    assert (column(splits.valid, "x") == 1).any()
    fitted = json.loads(json.dumps(splits.fitted))
    (tmp_path / "new.md").write_text("cab" * 30)
    new = open_language(DataSection(path=str(tmp_path / "new.md")), 0, fitted=fitted)
    assert len(new.train) == 89 // 8


def test_several_files_are_one_text(tmp_path: Path) -> None:
    for name in ("emma.txt", "persuasion.txt"):
        (tmp_path / name).write_text("some chapters " * 20)
    assert language(tmp_path, length=8).about["tokens"] == 504


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"tokens": "words"}, "reads characters or bytes, not words"),
        ({"options": {"strides": 3}}, "option of a language model's data 'strides' is unknown"),
        ({"options": {"stride": 0}}, "data.options.stride is 0: it must be a whole number"),
        ({"length": 5000}, "too few for one window of 5000"),
    ],
)
def test_settings_that_do_not_fit_are_refused(
    section: dict[str, Any], message: str, tmp_path: Path
) -> None:
    (tmp_path / "a.txt").write_text("text " * 100)
    with pytest.raises(DataError) as error:
        language(tmp_path / "a.txt", **section)
    assert message in str(error.value)


def test_an_empty_text_or_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").touch()
    with pytest.raises(DataError, match=r"a.txt: empty"):
        language(tmp_path / "a.txt")
    with pytest.raises(DataError, match=r"set data.path, not data.name=digits"):
        open_language(DataSection(name="digits"), 0)

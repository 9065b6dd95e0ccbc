"""Block parsers of packed files, parquet, folders of texts and images, idx and libsvm."""

from __future__ import annotations

import bz2
import gzip
import lzma
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.core.config.sections import DataSection
from echelon.core.errors import DataError
from echelon.data import open_dense, read, write_shards
from echelon.data.formats.records import Input
from echelon.data.opening import frame

from .reading import collect

ROWS = [f"{row},{'x' * (row % 7)}{row}\n".encode() for row in range(400)]
CSV = b"n,word\n" + b"".join(ROWS)


def zstd(content: bytes) -> bytes:
    return bytes(pa.compress(content, "zstd", asbytes=True))


PACKED = [(".gz", gzip.compress), (".bz2", bz2.compress), (".xz", lzma.compress), (".zst", zstd)]


@pytest.mark.parametrize(("suffix", "pack"), PACKED)
def test_packed_files_are_read(tmp_path: Path, suffix: str, pack: Callable[[bytes], bytes]) -> None:
    path = tmp_path / f"a.csv{suffix}"
    path.write_bytes(pack(CSV))
    result = collect(path, size=500)
    assert result.column("n") == list(range(400))
    path.write_bytes(pack(CSV[:100]) + pack(CSV[100:]))
    assert collect(path).rows == result.rows, "streams one after the other are one"


@pytest.mark.parametrize(("suffix", "pack"), PACKED)
@pytest.mark.parametrize("kept", [0.02, 0.5, 0.99])
def test_a_truncated_stream_gives_what_is_whole_and_then_says_so(
    tmp_path: Path, suffix: str, pack: Callable[[bytes], bytes], kept: float
) -> None:
    packed = pack(CSV)
    path = tmp_path / f"a.csv{suffix}"
    path.write_bytes(packed[: max(5, int(kept * len(packed)))])
    result = collect(path, size=500)
    assert result.column("n") == list(range(len(result.rows)))
    (bad,) = result.bad
    assert "truncated" in bad.reason
    assert bad.line == len(result.rows) + 2 if result.rows else bad.line in (1, 2)
    assert bad.records == bool(bad.text)


@settings(max_examples=25)
@given(at=st.integers(0, 10_000), flip=st.integers(1, 255))
def test_a_damaged_gz_never_passes_unseen(at: int, flip: int) -> None:
    import tempfile

    packed = bytearray(gzip.compress(CSV, mtime=0))
    at = 10 + at % (len(packed) - 10)  # behind the header, whose bytes may be anything
    packed[at] ^= flip
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.csv.gz"
        path.write_bytes(packed)
        result = collect(path, columns={"n": "int64", "word": "string"})
    assert any("damaged" in bad.reason or "truncated" in bad.reason for bad in result.bad)


def test_what_is_not_packed_at_all_is_said(tmp_path: Path) -> None:
    (tmp_path / "a.csv.gz").write_bytes(CSV)
    (bad,) = collect(tmp_path / "a.csv.gz").bad
    assert bad.reason.startswith("damaged: ")
    assert bad.reason.endswith("(after 0 bytes of content)")


def parquet(path: Path, table: pa.Table, rows: int = 2) -> Path:
    pq.write_table(table, path, row_group_size=rows)
    return path


def test_parquet_is_read_by_row_groups(tmp_path: Path) -> None:
    table = pa.table({"a": list(range(7)), "b": [*"uvwxyz", None]})
    path = parquet(tmp_path / "a.parquet", table)
    volume = pq.ParquetFile(path).metadata.row_group(0).total_byte_size
    result = collect(path, size=volume)
    assert len(result.blocks) == 4
    assert all(block.data is None for block in result.blocks), "workers read them"
    assert result.rows == table.to_pylist()
    assert result.lines == list(range(1, 8))
    chosen = collect(Input(path=str(path), columns=("b",)))
    assert chosen.schema.names == ["b"]
    with pytest.raises(DataError, match=r"a\.parquet: column 'z' is unknown"):
        collect(Input(path=str(path), columns=("z",)))


def test_a_large_row_group_of_parquet_is_read_in_pieces(tmp_path: Path) -> None:
    words = pa.array([f"w{row % 9}" * (row % 5) for row in range(1000)])
    table = pa.table({"a": list(range(1000)), "b": words, "c": words.dictionary_encode()})
    path = parquet(tmp_path / "a.parquet", table, 900)
    result = collect(path, size=1000)
    assert len(result.blocks) > 5
    assert max(block.size for block in result.blocks) < 200
    assert result.rows == collect(path).rows == table.to_pylist()
    assert result.lines == list(range(1, 1001))
    lacks = collect(Input(path=str(path), columns=("a",)), size=1000, columns={"z": "int64"})
    assert lacks.read == 1000
    assert not lacks.rows


def test_damage_within_a_large_row_group_costs_what_comes_after_it(tmp_path: Path) -> None:
    values = np.random.default_rng(0).integers(0, 1 << 60, 4000).tolist()
    path = tmp_path / "a.parquet"
    table = pa.table({"a": values})
    pq.write_table(table, path, use_dictionary=False, data_page_size=2048)
    raw = bytearray(path.read_bytes())
    raw[12_000:20_000] = b"\xff" * 8000
    path.write_bytes(raw)
    result = collect(path, size=4096)
    # The page that the damage begins in has no checksum: what it holds cannot be told.
    assert result.column("a")[:1000] == values[:1000]
    (bad,) = result.bad
    assert bad.line == len(result.rows) + 1
    assert bad.reason.startswith("row group 0: not a whole Parquet file")
    assert result.read == 4000


def test_two_columns_of_one_name_in_parquet_are_refused(tmp_path: Path) -> None:
    twice = pa.table([[1, 2], [3, 4]], names=["a", "a"])
    result = collect(parquet(tmp_path / "a.parquet", twice), columns={"a": "int64"})
    assert result.messages() == ["a.parquet:1: two columns are called 'a'"]
    assert result.read == 2


def test_values_of_parquet_that_do_not_fit_are_bad(tmp_path: Path) -> None:
    path = parquet(tmp_path / "a.parquet", pa.table({"a": ["1", "x", "3"], "f": [1.0, 2.0, 2.5]}))
    result = collect(path, columns={"a": "int64", "f": "int64"})
    assert result.rows == [{"a": 1, "f": 1}]
    assert result.messages() == [
        "a.parquet:2: column 'a' is 'x': not of type int64",
        "a.parquet:3: column 'f' is '2.5': not of type int64",
    ]


def test_a_damaged_row_group_costs_itself_alone(tmp_path: Path) -> None:
    path = parquet(tmp_path / "a.parquet", pa.table({"a": list(range(6))}))
    raw = bytearray(path.read_bytes())
    raw[10:30] = b"\xff" * 20
    path.write_bytes(raw)
    result = collect(path)
    assert result.column("a") == [2, 3, 4, 5]
    assert result.lines == [3, 4, 5, 6]
    assert result.messages()[0].startswith("a.parquet:1: row group 0: not a whole Parquet file")
    assert result.read == 6


def test_parquet_without_its_end_an_empty_one_and_one_that_lacks_a_column(tmp_path: Path) -> None:
    whole = parquet(tmp_path / "a.parquet", pa.table({"a": [1, 2, 3]}))
    (tmp_path / "b.parquet").write_bytes(whole.read_bytes()[:-9])
    parquet(tmp_path / "c.parquet", pa.table({"a": pa.array([], pa.int64())}))
    parquet(tmp_path / "d.parquet", pa.table({"z": [1, 2, 3]}))
    result = collect(tmp_path)
    assert result.column("a") == [1, 2, 3]
    cut, empty, lacks = result.messages()
    assert cut.startswith("b.parquet:1: not a whole Parquet file")
    assert empty == "c.parquet:1: empty: it has no records"
    assert lacks == "d.parquet:1: column 'a' missing: the file has z"
    assert result.read == 6


def test_text_in_parquet_that_is_not_utf8_is_bad(tmp_path: Path) -> None:
    buffers = [None, pa.py_buffer(np.array([0, 1, 2, 3], np.int32)), pa.py_buffer(b"a\xffc")]
    text = pa.Array.from_buffers(pa.string(), 3, buffers)
    path = parquet(tmp_path / "a.parquet", pa.table({"t": text}), 10)
    result = collect(path)
    assert result.column("t") == ["a", "c"]
    assert result.messages() == ["a.parquet:2: column 't' is not UTF-8"]


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    for label, content in [("good", b"fine\nindeed"), ("poor", b"no")]:
        (tmp_path / "set" / label).mkdir(parents=True)
        (tmp_path / "set" / label / "1.txt").write_bytes(content)
        (tmp_path / "set" / label / "2.txt.gz").write_bytes(gzip.compress(content.upper()))
    return tmp_path / "set"


def test_documents_have_the_class_of_their_folder(texts: Path) -> None:
    result = collect(texts)
    assert result.column("text") == ["fine\nindeed", "FINE\nINDEED", "no", "NO"]
    assert result.column("label") == ["good", "good", "poor", "poor"]
    assert result.places[3] == (str(texts / "poor" / "2.txt.gz"), 1)
    assert collect(texts, size=1).rows == result.rows


def test_bad_documents_are_named(texts: Path) -> None:
    (texts / "good" / "3.txt").write_bytes(b"one\ntwo \xff")
    (texts / "good" / "4.txt").write_bytes(b"")
    (texts / "good" / "5.txt.gz").write_bytes(gzip.compress(b"x" * 99)[:-4])
    result = collect(texts)
    assert result.messages() == [
        "3.txt:2: not UTF-8",
        "4.txt:1: empty",
        "5.txt.gz:1: truncated: its packed stream has no end",
    ]
    assert result.read == 7


def test_lines_of_many_texts_keep_their_class(texts: Path) -> None:
    result = collect(Input(path=str(texts), per="line"))
    assert result.column("text")[:3] == ["fine", "indeed", "FINE"]
    assert result.column("label") == ["good"] * 4 + ["poor"] * 2
    alone = collect(Input(path=str(texts / "good" / "1.txt"), per="file"))
    assert alone.rows == [{"text": "fine\nindeed"}]


def test_lines_are_read_whatever_ends_them_and_empty_ones_are_none(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"one\r\n\r\ntwo\n\nthr\xffee\rfour")
    result = collect(path)
    assert result.column("text") == ["one", "two", "four"]
    assert result.lines == [1, 3, 6]
    assert result.messages() == ["a.txt:5: not UTF-8"]


def test_images_are_checked_and_keep_their_bytes(tmp_path: Path) -> None:
    from PIL import Image

    for label in ("cat", "dog"):
        (tmp_path / "set" / label).mkdir(parents=True)
        for name, format in (("1.png", "png"), ("2.jpg", "jpeg")):
            Image.effect_noise((40, 40), 50).save(tmp_path / "set" / label / name, format)
    whole = (tmp_path / "set" / "cat" / "2.jpg").read_bytes()
    (tmp_path / "set" / "dog" / "3.jpg").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "set" / "dog" / "4.png").write_bytes(b"no image")
    (tmp_path / "set" / "dog" / "5.png").write_bytes(b"")
    result = collect(tmp_path / "set")
    assert result.column("label") == ["cat", "cat", "dog", "dog"]
    assert result.column("image")[1] == whole
    cut, other, empty = result.messages()
    assert cut.startswith("3.jpg:1: not a readable image: ")
    assert other == "4.png:1: not an image of a known format"
    assert empty == "5.png:1: empty"


def idx(path: Path, values: np.ndarray[Any, Any]) -> bytes:
    header = bytes([0, 0, 8, values.ndim]) + struct.pack(f">{values.ndim}I", *values.shape)
    content = header + values.astype(np.uint8).tobytes()
    path.write_bytes(content)
    return content


def test_idx_is_read_with_the_labels_beside_it(tmp_path: Path) -> None:
    pixels = np.arange(5 * 2 * 3).reshape(5, 2, 3)
    idx(tmp_path / "train-images-idx3-ubyte", pixels)
    idx(tmp_path / "train-labels-idx1-ubyte", np.arange(5))
    result = collect(tmp_path, size=14)
    assert len(result.blocks) == 3
    assert result.column("y") == [0, 1, 2, 3, 4]
    assert result.column("x") == pixels.reshape(5, 6).tolist()
    assert result.lines == [1, 2, 3, 4, 5]


def test_idx_that_ends_early_tells_how_many_records_are_lost(tmp_path: Path) -> None:
    content = idx(tmp_path / "a.idx", np.zeros((5, 2, 3)))
    (tmp_path / "a.idx").write_bytes(content[:-8])
    result = collect(tmp_path / "a.idx")
    assert result.messages() == ["a.idx:4: the file ends before record 4 of 5: truncated"]
    assert (len(result.rows), result.read) == (3, 5)
    idx(tmp_path / "train-images-idx3-ubyte", np.zeros((4, 2, 3)))
    idx(tmp_path / "train-labels-idx1-ubyte", np.zeros(3))
    result = collect(tmp_path / "train-images-idx3-ubyte")
    assert "the labels end before record 4 of 4" in result.messages()[0]
    assert (len(result.rows), result.read) == (3, 4)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "empty"),
        (b"PNG!", "not an idx file: its magic number is 50 4e 47 21"),
        (b"\0\0\x08\x03\0\0", "truncated within its header"),
        (b"\0\0\x08\x01\0\0\0\0", "empty: its sizes are [0]"),
    ],
)
def test_a_file_that_is_no_idx_is_said(tmp_path: Path, content: bytes, reason: str) -> None:
    (tmp_path / "a.idx").write_bytes(content)
    assert collect(tmp_path / "a.idx").messages() == [f"a.idx:1: {reason}"]


SVM = b"1 1:0.5 3:2\n-1 2:1e-3 # a comment\n# nothing else\n\n+1\n  2\t7:1  \n"


def test_libsvm_is_read_as_rows_of_a_sparse_matrix(tmp_path: Path) -> None:
    (tmp_path / "a.libsvm").write_bytes(SVM)
    result = collect(tmp_path / "a.libsvm", size=10)
    assert result.column("label") == [1, -1, 1, 2]
    assert result.lines == [1, 2, 5, 6]
    pairs = [[(pair["index"], pair["value"]) for pair in row] for row in result.column("features")]
    assert pairs == [[(0, 0.5), (2, 2)], [(1, pytest.approx(1e-3))], [], [(6, 1)]]


def test_comments_of_libsvm_do_not_move_lines(tmp_path: Path) -> None:
    (tmp_path / "a.svm").write_bytes(b"1 1:2\r# only returns\r#\n2 1:3 # last\n?\n")
    result = collect(tmp_path / "a.svm")
    assert result.lines == [1, 4]
    assert [bad.line for bad in result.bad] == [5]


def test_every_kind_of_bad_line_of_libsvm_is_told(tmp_path: Path) -> None:
    (tmp_path / "a.svm").write_bytes(
        b"1 1:0.5\n-1 2:x\n1 0:3\nfoo 1:2\n3 4\n5 1:2:3\n2 9:1\n2 5:1\n2 :1\n2 3:\n"
    )
    result = collect(Input(path=str(tmp_path / "a.svm"), width=5))
    assert result.lines == [1, 8]
    assert result.messages() == [
        "a.svm:2: '2:x' is not `index:value`",
        "a.svm:3: index of '0:3': indices go from 1 to 5",
        "a.svm:4: label 'foo' is not a number",
        "a.svm:5: '4' is not `index:value`",
        "a.svm:6: '1:2:3' is not `index:value`",
        "a.svm:7: index of '9:1': indices go from 1 to 5",
        "a.svm:9: ':1' is not `index:value`",
        "a.svm:10: '3:' is not `index:value`",
    ]


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_jobs_read_libsvm_too(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a.libsvm{suffix}"
    path.write_bytes({"": SVM, ".gz": gzip.compress(SVM), ".zst": zstd(SVM)}[suffix])
    (batch,) = read(path)
    assert batch.column("label").to_pylist() == [1, -1, 1, 2]
    manifest = write_shards(tmp_path / "set", read(path))
    assert {field.name: field.width for field in manifest.schema} == {"label": 0, "features": 7}
    wide = write_shards(tmp_path / "wide", read(path, width=100, zero_based=True))
    assert wide.schema[1].width == 100


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"a\.libsvm: empty"),
        (b"# nothing\n\n", r"a\.libsvm: empty"),
        (b"1 1:2\n\n1 x:2\n", r"a\.libsvm:3: 'x:2' is not `index:value`"),
    ],
)
def test_jobs_are_told_of_a_bad_line(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "a.libsvm").write_bytes(content)
    with pytest.raises(DataError, match=message):
        list(read(tmp_path / "a.libsvm"))


def test_a_job_without_preparation_takes_libsvm_as_vectors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.libsvm"
    path.write_bytes(b"".join(b"%d 1:%d 4:2\n" % (row % 2, row) for row in range(40)))
    section = DataSection(path=str(path), normalise=False)
    splits = open_dense(section, 0, target="class")
    assert splits.shape == (4,)
    assert len(splits.train) == 32
    monkeypatch.setattr(frame, "_MOST_NUMBERS", 100)
    with pytest.raises(DataError, match=r"40 rows of 4 numbers: make shards of it with"):
        open_dense(section, 0, target="class")

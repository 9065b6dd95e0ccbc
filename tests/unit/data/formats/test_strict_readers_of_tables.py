"""Strict readers of csv, tsv, jsonl and parquet, and their errors."""

from __future__ import annotations

import bz2
import csv
import gzip
import lzma
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet
import pytest

from echelon.core.errors import ConfigError, DataError
from echelon.data import read, write_shards
from echelon.data.formats.streams import read_bytes
from echelon.data.inspect import inspect


def table(path: Path, format: str = "auto", **options: Any) -> Any:
    return pa.Table.from_batches(list(read(path, format, **options)))


def zstd(content: bytes) -> bytes:
    return bytes(pa.compress(content, "zstd", asbytes=True))


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str, str | bytes], Path]:
    def write(name: str, content: str | bytes) -> Path:
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write


Write = Callable[[str, str | bytes], Path]


@pytest.mark.parametrize(
    ("suffix", "pack"),
    [
        ("", bytes),
        (".gz", gzip.compress),
        (".xz", lzma.compress),
        (".bz2", bz2.compress),
        (".zst", zstd),
    ],
)
@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.csv", b'n,word,f\n1,"x, y",0.5\n2,z,\n'),
        ("a.tsv", b"n\tword\tf\n1\tx, y\t0.5\n2\tz\t?\n"),
        ("a.jsonl", b'{"n":1,"word":"x, y","f":0.5}\n{"n":2,"word":"z"}\n'),
    ],
)
def test_tables_are_read_through_any_compression(
    name: str, content: bytes, suffix: str, pack: Callable[[bytes], bytes], write: Write
) -> None:
    path = write(name + suffix, pack(content))
    expected = {"n": [1, 2], "word": ["x, y", "z"], "f": [0.5, None]}
    assert table(path).to_pydict() == expected


def test_quotes_in_a_tsv_are_text_like_any_other(write: Write) -> None:
    path = write("a.tsv", 'label\ttext\n1\t"unclosed\n2\the said "no"\n')
    assert table(path).column("text").to_pylist() == ['"unclosed', 'he said "no"']
    quoted = write("b.tsv", 'label\ttext\n1\t"a\tb"\n')
    assert table(quoted, quote=True).column("text").to_pylist() == ["a\tb"]


@pytest.mark.parametrize(
    ("content", "names"),
    [
        ("a,b\n1,2\n", ["a", "b"]),
        ("1,2\n3,4\n", ["column0", "column1"]),
        ("39, State-gov\n50, Private\n", ["column0", "column1"]),
        ("word,sense\ncat,animal\n", ["word", "sense"]),
        ("0,1,label\n5,6,7\n", ["0", "1", "label"]),
        ('"a, b",c\n1,2\n', ["a, b", "c"]),
        ("\ufeffa,b\n1,2\n", ["a", "b"]),
        ("a,b\r1,2\r3,4\r", ["a", "b"]),
        ("1,2\r3,4\r", ["column0", "column1"]),
    ],
)
def test_a_header_is_told_from_data(content: str, names: list[str], write: Write) -> None:
    assert table(write("a.csv", content)).column_names == names


def test_a_header_can_be_stated(write: Write) -> None:
    path = write("a.csv", "1,2\n3,4\n")
    assert table(path, header=True).column_names == ["1", "2"]
    assert table(write("b.csv", "a,b\nc,d\n"), header=False).num_rows == 2


def test_lines_of_a_tsv_may_end_with_returns_alone(write: Write) -> None:
    assert table(write("a.tsv", "a\tb\r1\t2\r")).to_pydict() == {"a": [1], "b": [2]}


def test_a_cell_may_be_longer_than_python_allows(write: Write) -> None:
    csv.field_size_limit(1 << 17)  # what a fresh process has
    path = write("a.csv", f"a,b\n1,{'x' * 140_000}\n")
    assert pc.binary_length(table(path).column("b")).to_pylist() == [140_000]


@pytest.mark.parametrize("delimiter", [";;", "", "é", '"'])
def test_a_delimiter_that_cannot_be_is_refused(delimiter: str, write: Write) -> None:
    with pytest.raises(DataError, match=r"a\.csv: option delimiter is .*: it must be one ch"):
        table(write("a.csv", "a,b\n1,2\n"), delimiter=delimiter)


def test_missing_numbers_become_nulls_but_words_stay(write: Write) -> None:
    path = write("a.csv", "n,word\n1,?\n?,NA\nNA,x\n")
    assert table(path).to_pydict() == {"n": [1, None, None], "word": ["?", "NA", "x"]}


def test_large_files_come_in_several_batches(write: Write, tmp_path: Path) -> None:
    rows = 20_000
    path = write("a.csv", "n,m\n" + "".join(f"{row},1\n" for row in range(rows)))
    batches = list(read(path, block=20_000))
    assert len(batches) > 3
    manifest = write_shards(tmp_path / "set", read(path, block=20_000))
    assert manifest.rows == rows
    assert manifest.statistics["n"]["max"] == rows - 1


def test_a_type_can_be_set_where_the_first_block_misleads(write: Write) -> None:
    path = write("a.csv", "n,m\n" + "1,2\n" * 5000 + "1.5,3\n")
    with pytest.raises(DataError, match=r"a.csv:5002: column 0: .*'1.5'; set its type"):
        table(path, block=8192)
    assert table(path, block=8192, types={"n": "float64"}).column("n")[-1].as_py() == 1.5


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", b"a,b\n1,2\n3,4,5\n", "a.csv:3: Expected 2 columns, got 3"),
        ("a.csv", b"a,b\n1,x\n2,\xff\xfe\n", "a.csv:3: column 'b' is not UTF-8"),
        ("a.csv", b"a\xff,b\n1,x\n", "a.csv:1: a column's name is not UTF-8"),
        ("a.csv", b"", "a.csv: empty"),
        ("a.csv", b"a,b\n", "a.csv: empty: it has a header but no records"),
        ("a.csv", b"a,a\n1,2\n", "a.csv:1: two columns are called 'a'"),
        (
            "a.csv.gz",
            gzip.compress(b"a,b\n" + b"1,2\n" * 9999, mtime=0)[:60],
            "a.csv.gz: damaged or trun",
        ),
        ("a.csv.xz", lzma.compress(b"a,b\n" + b"1,2\n" * 9999)[:80], "a.csv.xz: damaged or trun"),
        ("a.csv.gz", b"a,b\n1,2\n", "a.csv.gz: damaged or truncated after 0 bytes"),
        ("a.jsonl", b'{"a":1}\n{"a":}\n', "a.jsonl:2: not a JSON object like those before it"),
        ("a.jsonl", b'{"a":1}\n\n  null\n', "a.jsonl:3: not a JSON object like those before it"),
        ("a.jsonl", b"[1]\n", "a.jsonl:1: not a JSON object like those before it"),
        ("a.jsonl", b'{"a":1}\n{"a":"x"}\n', "a.jsonl:2: not a JSON object like those before it"),
        ("a.jsonl", b'{"a":"x"}\n{"a":"\xff"}\n', "a.jsonl:2: 'a' is not UTF-8"),
        ("a.jsonl", b"", "a.jsonl: empty"),
        ("a.parquet", b"PAR1 but no more", "a.parquet: not a whole Parquet file"),
    ],
)
def test_a_bad_file_is_named_with_its_line(
    name: str, content: bytes, message: str, write: Write
) -> None:
    path = write(name, content)
    with pytest.raises(DataError) as error:
        table(path)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_broken_text_is_named_also_where_the_type_is_set(write: Write) -> None:
    path = write("a.tsv", b"label\ttext\n1\tx\n2\t\xff\n")
    with pytest.raises(DataError, match=r"a.tsv:3: not UTF-8"):
        table(path, types={"text": "string"})
    with pytest.raises(DataError, match="option types"):
        table(path, types={"text": "strng"})


def test_a_line_far_into_a_jsonl_is_named(write: Write) -> None:
    path = write("a.jsonl", '{"a":1}\n' * 3000 + "oops\n")
    with pytest.raises(DataError, match=r"a.jsonl:3001: "):
        table(path, block=4096)


def test_parquet_is_read_by_column_and_in_pieces(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pa.parquet.write_table(pa.table({"x": np.arange(100), "y": np.arange(100) % 3}), path)
    assert len(list(read(path, rows=30))) == 4
    assert table(path, columns=["y"]).column_names == ["y"]
    with pytest.raises(DataError, match=r"column 'z' is unknown"):
        table(path, columns=["z"])


def test_two_columns_of_one_name_in_a_parquet_are_refused(tmp_path: Path) -> None:
    pa.parquet.write_table(pa.table([[1], [2]], names=["a", "a"]), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a\.parquet: two columns are called 'a'"):
        table(tmp_path / "a.parquet")


def test_a_truncated_parquet_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pa.parquet.write_table(pa.table({"x": np.arange(1000)}), path)
    path.write_bytes(path.read_bytes()[:-50])
    with pytest.raises(DataError, match=r"a.parquet: not a whole Parquet file, after record 0"):
        table(path)


@pytest.mark.parametrize("name", ["a.csv", "a.jsonl", "a.parquet"])
def test_a_reader_that_is_left_early_holds_nothing_open(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    if name == "a.parquet":
        pa.parquet.write_table(pa.table({"x": np.arange(200_000)}), path)
    else:
        line = "1,2\n" if name == "a.csv" else '{"x":1}\n'
        path.write_text(("x,y\n" if name == "a.csv" else "") + line * 50_000)
    batches = read(path, rows=1000) if name == "a.parquet" else read(path, block=4096)
    next(batches)
    del batches  # the fixture looks for open files


@pytest.mark.parametrize(
    ("name", "option", "value"),
    [
        ("a.csv", "header", "maybe"),
        ("a.csv", "delimiter", 3),
        ("a.csv", "types", 3),
        ("a.tsv", "columns", "a"),
        ("a.libsvm", "width", "abc"),
        ("a.libsvm", "zero_based", "no"),
        ("a.parquet", "columns", 5),
    ],
)
def test_a_value_that_no_option_can_have_is_one_line(
    write: Write, name: str, option: str, value: Any
) -> None:
    path = write(name, "1 1:1\n")
    with pytest.raises(ConfigError, match=rf"^option {option} is {value!r}: .*should be [^\n]*$"):
        read(path, **{option: value})
    with pytest.raises(ConfigError, match=f"^option {option} is {value!r}: "):
        inspect(path, **{option: value})


def test_an_option_or_a_format_that_is_unknown_is_refused(write: Write) -> None:
    path = write("a.csv", "a\n1\n")
    with pytest.raises(DataError, match=r"option of format csv 'delimeter' is unknown; did you"):
        read(path, delimeter=";")
    with pytest.raises(DataError, match=r"format 'cvs' is unknown; did you mean 'csv'"):
        read(path, "cvs")
    with pytest.raises(DataError, match="there is no such file or folder"):
        read(path.with_name("b.csv"))


def test_a_process_that_has_read_tables_ends_cleanly(write: Write) -> None:
    """Arrow's threads must not ask for Python's lock while the interpreter goes away."""
    path = write("a.csv", "n,word\n" + "1,x\n" * 2000)
    packed = write("b.csv.gz", gzip.compress(path.read_bytes()))
    code = f"from echelon.data.formats import read\nfor p in {[str(path), str(packed)] * 4}:"
    ended = subprocess.run(
        [sys.executable, "-c", f"{code}\n    list(read(p))"], capture_output=True, timeout=60
    )
    assert (ended.returncode, ended.stderr) == (0, b"")


def test_damage_far_into_a_packed_file_is_found(write: Write) -> None:
    random = np.random.default_rng(0).integers(0, 10**9, (200_000, 2))
    content = "a,b\n" + "\n".join(f"{a},{b}" for a, b in random.tolist())
    packed = gzip.compress(content.encode(), 1)
    torn = write("torn.csv.gz", packed[: len(packed) * 3 // 4])
    with pytest.raises(DataError, match=r"torn.csv.gz: damaged or truncated: "):
        table(torn)
    hurt = bytearray(packed)
    hurt[-6] ^= 255  # its checksum
    with pytest.raises(DataError, match=r"hurt.csv.gz: damaged or truncated: "):
        table(write("hurt.csv.gz", bytes(hurt)))


def test_a_file_that_vanished_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"gone.txt: cannot be opened: No such file"):
        read_bytes(tmp_path / "gone.txt")

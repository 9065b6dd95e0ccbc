"""Block parsers of csv, tsv and jsonl: all good records are read, each bad one is reported."""

from __future__ import annotations

import csv
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.core.errors import ConfigError, DataError
from echelon.data.formats import blocks, delimited, parse
from echelon.data.formats.records import Input

from .reading import collect

NUMBERS = st.integers(-(10**9), 10**9)
# Blanks within a text are kept, and so is everything that has to be quoted.
WORDS = st.text(st.sampled_from('ab ,"\n\ré中'), max_size=8)
BAD_ROWS = st.sampled_from(
    [
        b"1",
        b"1,2,3",
        b"x,word",
        b"1.5,word",
        b"12345678901234567890,w",
        b"2,\xff",
        b'3,"a"b',
        b"\xfe",
    ]
)
GOOD_ROWS = st.tuples(NUMBERS | st.none(), WORDS)


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def quoted(text: str) -> str:
    return '"' + text.replace('"', '""') + '"'


@settings(max_examples=50)
@given(
    rows=st.lists(GOOD_ROWS | BAD_ROWS, max_size=25),
    size=st.integers(1, 200),
    end=st.sampled_from([b"\n", b"\r\n"]),
)
def test_a_csv_gives_every_good_row_and_tells_of_every_bad_one(
    folder: Path, rows: list[Any], size: int, end: bytes
) -> None:
    content, line = b"n,word" + end, 2
    good, places, bad = [], [], []
    for row in rows:
        if isinstance(row, bytes):
            record = row
            bad.append(line)
        else:
            number, word = row
            record = f"{'' if number is None else number},{quoted(word)}".encode()
            good.append({"n": number, "word": word})
            places.append(line)
        content += record + end
        # Line ends within quotes count too, however they are written.
        line += 1 + record.replace(b"\r\n", b"\n").replace(b"\r", b"\n").count(b"\n")
    path = folder / "a.csv"
    path.write_bytes(content)
    result = collect(path, size=size, columns={"n": "int64", "word": "string"})
    assert result.rows == good
    if good:
        assert result.lines == places
    messages = [one.line for one in result.bad if one.records]
    assert messages == bad
    assert result.read == len(rows)


@settings(max_examples=40)
@given(
    rows=st.lists(
        GOOD_ROWS
        | st.sampled_from(
            [
                b"null",
                b"[1]",
                b'{"n": "x"}',
                b'{"n": 1.5}',
                b'{"n": 1',
                b'{"word": "\xff"}',
                b"{}{}",
            ]
        ),
        max_size=20,
    ),
    size=st.integers(1, 200),
)
def test_a_jsonl_gives_every_good_object_and_tells_of_every_bad_line(
    folder: Path, rows: list[Any], size: int
) -> None:
    lines, good, bad = [], [], []
    for number, row in enumerate(rows, 1):
        if isinstance(row, bytes):
            lines.append(row)
            bad.append(number)
        else:
            record = {"n": row[0], "word": row[1]}
            lines.append(json.dumps(record, ensure_ascii=False).encode())
            good.append(record)
    path = folder / "a.jsonl"
    path.write_bytes(b"\n".join(lines))
    result = collect(path, size=size, columns={"n": "int64", "word": "string"})
    assert result.rows == good
    assert [one.line for one in result.bad if one.records] == bad
    assert result.read == len(rows)


@pytest.mark.parametrize(
    ("name", "content", "messages"),
    [
        ("a.csv", b"a,b\n1,x\n2\n", ["a.csv:3: 1 cell, but there are 2 columns"]),
        ("a.csv", b"a,b\n1,x\n2,y,z\n", ["a.csv:3: 3 cells, but there are 2 columns"]),
        ("a.csv", b"a,b\n1,x\nx,y\n", ["a.csv:3: column 'a' is 'x': not of type int64"]),
        ("a.csv", b"a,b\n1,x\n2,\xff\n", ["a.csv:3: column 'b' is not UTF-8"]),
        ("a.csv", b'a,b\n1,x\n2,"y\n3,"z"\n', ["a.csv:3: its quotes do not match"]),
        ("a.csv", b'a,b\n1,x\n2,"y"y\n', ["a.csv:3: its quotes do not match"]),
        ("a.csv", b"", ["a.csv:1: empty"]),
        ("a.csv", b"\n\r\n", ["a.csv:3: empty"]),
        ("a.csv", b"a,b\n", ["a.csv:2: empty: it has a header but no records"]),
        ("a.csv", b"a,a\n1,2\n3,4\n", ["a.csv:1: two columns are called 'a'"]),
        ("a.csv", b"a\xff,b\n1,2\n", ["a.csv:1: the columns' names are not UTF-8"]),
        ("a.csv", b'"a,b\n1,2\n', ["a.csv:1: the quotes of the columns' names do not match"]),
        ("a.csv", b"b,c\n1,2\n", ["a.csv:1: column 'a' missing: the file has b, c"]),
        ("a.csv", b"c,d\n1,2\n", ["a.csv:1: columns 'a', 'b' missing: the file has c, d"]),
        ("a.tsv", b"a\tb\n1\n", ["a.tsv:2: 1 cell, but there are 2 columns"]),
        ("a.jsonl", b'{"a": 1}\n{"a": "x"}\n', ["a.jsonl:2: column 'a' is 'x': not of type int64"]),
        ("a.jsonl", b'{"a": 1}\nnull\n', ["a.jsonl:2: not a JSON object but 'None'"]),
        ("a.jsonl", b'{"a": 1}\n{"a" 1}\n', ["a.jsonl:2: not JSON: expecting ':' delimiter"]),
        ("a.jsonl", b'{"a": 1}\n{"b": "\xff"}\n', ["a.jsonl:2: not UTF-8"]),
        (
            "a.jsonl",
            b'{"a": 1}\n{"b": "\\ud800"}\n',
            ["a.jsonl:2: column 'b' is '\\ud800': not of type large_string"],
        ),
        ("a.jsonl", b'{"a": 1, "a": 2}\n', ["a.jsonl:1: not JSON that can be read: a key stands"]),
        ("a.jsonl", b"[" * 100_000, ["a.jsonl:1: not JSON that can be read: "]),
        ("a.jsonl", b"\n \n", []),
    ],
)
def test_what_is_bad_is_said_with_file_and_line(
    tmp_path: Path, name: str, content: bytes, messages: list[str]
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    result = collect(path, columns={"a": "int64", "b": "string"})
    found = result.messages()
    assert len(found) == len(messages), found
    assert all(one.startswith(start) for one, start in zip(found, messages, strict=True)), found


def test_bad_records_are_shown(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b"a,b\n1,x\n2,\xff\n" + b"3," + b"y" * 2000 + b",z\n")
    broken, long = collect(tmp_path / "a.csv").bad
    assert broken.text == "2,\\xff"
    assert len(long.text) < 600
    assert str(broken).endswith("a.csv:3: column 'b' is not UTF-8")


def test_a_column_missing_in_one_of_many_files_costs_that_file_alone(tmp_path: Path) -> None:
    for number, header in enumerate(["a,b", "b,a", "a,c", "b,a,c"]):
        cells = ",".join({"a": "1", "b": "x", "c": "9"}[name] for name in header.split(","))
        (tmp_path / f"part{number}.csv").write_text(f"{header}\n{cells}\n{cells}\n")
    result = collect(tmp_path / "part*.csv")
    assert result.rows == [{"a": 1, "b": "x"}] * 6
    assert result.messages() == ["part2.csv:1: column 'b' missing: the file has a, c"]
    assert result.bad[0].records == 2
    assert result.read == 8


def test_broken_text_in_a_column_nobody_wants_is_no_matter(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(b"a,b\n1,x\n2,\xff\n3,\xfe,\nx,y\n")
    (block,) = blocks([Input(path=str(path))])
    parsed = parse(block, pa.schema([("a", pa.int64())]))
    assert parsed.batch.to_pydict() == {"a": [1, 2]}
    assert [bad.line for bad in parsed.bad] == [4, 5]
    whole = parse(block, pa.schema([("b", pa.large_utf8())]))
    assert whole.batch.to_pydict() == {"b": ["x", "y"]}
    assert [bad.line for bad in whole.bad] == [3, 4]


@pytest.mark.parametrize(
    ("content", "options", "names"),
    [
        (b"1,2\n3,4\n", {}, ["column0", "column1"]),
        (b"1,2\n3,4\n", {"header": True}, ["1", "2"]),
        (b"1,2\n3,4\n", {"names": ("x", "y")}, ["x", "y"]),
        (b"1,2\n3,4\n", {"header": True, "names": ("x", "y")}, ["x", "y"]),
        (b"9\n1,2\n3,4\n", {"header": False}, ["column0", "column1"]),
        (b"\xef\xbb\xbfa,b\n1,2\n", {}, ["a", "b"]),
        (b'"a\nb",c\n1,2\n', {}, ["a\nb", "c"]),
        (b"\n\na,b\n1,2\n", {}, ["a", "b"]),
        (b"a;b\n1;2\n", {"delimiter": ";"}, ["a", "b"]),
        (b"a,b\n1,2\n", {"columns": ("b",)}, ["b"]),
    ],
)
def test_columns_get_their_names(
    tmp_path: Path, content: bytes, options: dict[str, Any], names: list[str]
) -> None:
    (tmp_path / "a.csv").write_bytes(content)
    result = collect(Input(path=str(tmp_path / "a.csv"), **options))
    assert result.schema.names == names
    assert result.rows


def test_types_are_those_of_the_first_block_or_the_recipe(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("n,f,b,t,w,e\n1,0.5,true,2020-01-01,x,\n")
    schema = collect(path).schema
    assert [str(kind) for kind in schema.types] == [
        *("int64", "double", "bool", "date32[day]", "large_string", "large_string")
    ]
    wanted = collect(path, columns={"n": "float", "w": "text", "t": "time"}).schema
    assert str(wanted.field("n").type) == "double"
    assert str(wanted.field("t").type) == "timestamp[us]"
    with pytest.raises(ConfigError, match=r"columns.n = 'number': not a type; such as int64"):
        collect(path, columns={"n": "number"})


def test_mixed_kinds_of_values_are_bad_where_the_first_block_says_otherwise(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("n\n" + "1\n" * 50 + "x\n" + "2\n")
    result = collect(path, size=60, header=True)
    assert result.messages() == ["a.csv:52: column 'n' is 'x': not of type int64"]
    jsonl = tmp_path / "a.jsonl"
    jsonl.write_text('{"n": 1}\n{"n": "x"}\n{"n": 2.5}\n{"n": [1]}\n')
    mixed = collect(jsonl)
    assert str(mixed.schema.field("n").type) == "double"
    assert [bad.line for bad in mixed.bad] == [2, 4]


@pytest.mark.parametrize("at", [0, 3])
def test_half_a_surrogate_pair_makes_its_own_record_bad_alone(tmp_path: Path, at: int) -> None:
    lines = [f'{{"n": {row / 2}, "t": "x"}}' for row in range(5)]
    lines.insert(at, r'{"n": 1, "t": "\ud83d", "more": 1}')
    (tmp_path / "a.jsonl").write_text("\n".join(lines) + "\n")
    result = collect(tmp_path / "a.jsonl")
    assert result.column("n") == [row / 2 for row in range(5)]
    assert [bad.line for bad in result.bad] == [at + 1]
    assert json.dumps(result.messages()).encode(), "what is said of it can be written"


def test_records_of_half_pairs_alone_have_no_columns(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(r'{"t": "\ud83d"}')
    assert collect(tmp_path / "a.jsonl").schema.names == []


def test_values_that_differ_further_within_cost_their_own_key_alone(tmp_path: Path) -> None:
    lines = ['{"n": 1, "l": [1], "o": null}', '{"n": 2.5, "l": [2]}', '{"n": 3, "l": [{"b": 1}]}']
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    result = collect(tmp_path / "a.jsonl")
    assert str(result.schema.field("n").type) == "double"
    assert result.column("n") == [1, 2.5]
    assert [bad.line for bad in result.bad] == [3]


def test_missing_cells_are_nulls_and_words_stay(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("n,w\n1,NA\nNA,\n?,x\n")
    result = collect(tmp_path / "a.csv")
    assert result.column("n") == [1, None, None]
    assert result.column("w") == ["NA", "", "x"]
    own = collect(Input(path=str(tmp_path / "a.csv"), missing=("?", "NA")))
    assert own.column("n") == [1, None, None]


def test_lists_and_records_within_json_are_read(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"l": [1, 2], "s": {"t": "x"}}\n{"l": [], "s": null}\n')
    result = collect(path)
    assert result.rows == [{"l": [1, 2], "s": {"t": "x"}}, {"l": [], "s": None}]
    assert pa.types.is_large_list(result.schema.field("l").type)


def test_rows_longer_than_what_is_parsed_at_a_time_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delimited, "_CHUNK", 64)
    (tmp_path / "a.csv").write_text("a,b\n" + "1," + "x" * 500 + "\n" + "2,y\n3\n")
    result = collect(tmp_path / "a.csv")
    assert result.column("a") == [1, 2]
    assert result.messages() == ["a.csv:4: 1 cell, but there are 2 columns"]


def test_a_cell_of_the_first_records_may_be_longer_than_python_allows(tmp_path: Path) -> None:
    csv.field_size_limit(1 << 17)  # what a fresh process has
    (tmp_path / "a.csv").write_text(f"text,y\n{'x' * 140_000},1\nb,0\n")
    assert [len(text) for text in collect(tmp_path / "a.csv").column("text")] == [140_000, 1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"delimiter": "ab"}, "option delimiter is 'ab': it must be one character"),
        ({"delimiter": '"'}, "it must be one character, and no quote"),
        ({"columns": ("a", "z")}, "column 'z' is unknown"),
        ({"width": 3}, "option of format csv 'width' is unknown"),
    ],
)
def test_options_that_cannot_be_are_refused(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    (tmp_path / "a.csv").write_text("a,b\n1,2\n")
    with pytest.raises(DataError, match=message):
        collect(Input(path=str(tmp_path / "a.csv"), **options))


def test_an_unknown_key_of_json_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"a": 1}\n')
    with pytest.raises(DataError, match="column 'z' is unknown"):
        collect(Input(path=str(tmp_path / "a.jsonl"), columns=("z",)))
    assert collect(Input(path=str(tmp_path / "a.jsonl"), columns=("a",))).column("a") == [1]

"""Cutting files into blocks: where, and that the result does not depend on it."""

from __future__ import annotations

import gzip
import tempfile
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.core.errors import DataError
from echelon.data.formats import blocks, cutting
from echelon.data.formats.records import Input

from .reading import collect

SIZES = st.integers(1, 40)
# Bytes that matter to the scanner, far more often than at random.
PIECES = st.sampled_from(
    [
        b",",
        b"\n",
        b"\n",
        b"\r\n",
        b"\r",
        b'"',
        b'"',
        b'""',
        b"a",
        b"1",
        b"b,2",
        b"\xff",
        b" ",
        b"\t",
    ]
)
CONTENT = st.lists(PIECES, max_size=60).map(b"".join)


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


@pytest.mark.parametrize("name", ["a.csv", "a.tsv", "a.txt", "a.jsonl", "a.libsvm"])
@settings(max_examples=40)
@given(content=CONTENT, size=SIZES)
def test_any_bytes_are_read_alike_wherever_they_are_cut(
    folder: Path, name: str, content: bytes, size: int
) -> None:
    path = folder / name
    path.write_bytes(content)
    columns = {} if name in ("a.txt", "a.libsvm") else {"b": "int64"}
    whole = collect(path, columns=columns)
    cut = collect(path, size=size, columns=columns)
    # Types are those of the first block, so compare what does not depend on them.
    assert cut.read == whole.read
    of_file = {bad for bad in cut.bad if bad.records != 1 or not bad.text}
    places = [*cut.lines, *(bad.line for bad in cut.bad if bad not in of_file)]
    assert len(set(places)) == len(places), "no line is told of twice"
    if cut.schema == whole.schema:
        assert (cut.rows, cut.lines) == (whole.rows, whole.lines)
        assert set(cut.messages()) == set(whole.messages())


@settings(max_examples=40)
@given(content=CONTENT, size=SIZES)
def test_blocks_are_the_file_in_order(folder: Path, content: bytes, size: int) -> None:
    path = folder / "b.csv"
    path.write_bytes(content)
    found = [block for block in blocks([Input(path=str(path))], size) if block.size]
    for before, after in pairwise(found):
        assert before.start + before.size == after.start
    assert (
        b"".join(block.content() for block in found)
        == content[found[0].start if found else 0 :][: sum(block.size for block in found)]
    )
    assert not found or found[-1].start + found[-1].size == len(content)


def test_blocks_have_about_the_wanted_size_and_the_lines_they_begin_on(tmp_path: Path) -> None:
    rows = [f'{row},"line {row}\nand more"\n' for row in range(200)]
    (tmp_path / "a.csv").write_text("n,text\n" + "".join(rows))
    found = list(blocks([Input(path=str(tmp_path / "a.csv"))], 400))
    assert len(found) > 10
    assert all(block.size <= 400 for block in found)
    assert [block.number for block in found] == list(range(len(found)))
    assert found[0].record == 2
    for block in found:
        number = int(block.content().split(b",")[0])
        assert block.record == 2 + 2 * number


def test_quoted_rows_that_end_with_returns_alone_are_cut_into_blocks_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cutting, "LONGEST", 400)
    rows = [f'{row},"line {row}\rand, more"\r' for row in range(200)]
    (tmp_path / "a.csv").write_bytes(("n,text\r" + "".join(rows)).encode())
    result = collect(tmp_path / "a.csv", size=400)
    assert 10 < len(result.blocks) < 20
    assert not any(block.odd for block in result.blocks)
    assert result.column("n") == list(range(200))
    assert result.lines == [2 + 2 * row for row in range(200)]


def test_a_packed_stream_gives_its_bytes_to_workers(tmp_path: Path) -> None:
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress(b"a,b\n" + b"1,2\n" * 50))
    found = list(blocks([Input(path=str(tmp_path / "a.csv.gz"))], 64))
    assert all(block.data is not None for block in found)
    assert b"".join(block.content() for block in found) == b"1,2\n" * 50


def test_a_record_without_an_end_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cutting, "LONGEST", 1 << 20)
    path = tmp_path / "a.txt"
    path.write_bytes(b"one\n" + b"x" * (3 << 20) + b"\nthree\n")
    result = collect(path, size=1 << 10)
    assert result.column("text") == ["one", "three"]
    assert result.lines == [1, 3]
    assert result.messages() == ["a.txt:2: a record of more than 1 MiB"]


def test_a_quote_that_is_never_closed_costs_its_own_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cutting, "LONGEST", 1 << 12)
    path = tmp_path / "a.csv"
    path.write_text('a,b\n1,x\n2,"never closed\n' + "".join(f"{n},y\n" for n in range(3, 3000)))
    result = collect(path, size=1 << 9)
    assert result.column("a") == [1, *range(3, 3000)]
    assert result.messages() == ["a.csv:3: its quotes do not match"]


def test_a_file_that_shrinks_while_it_is_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("a,b\n1,2\n3,4\n")
    (block,) = blocks([Input(path=str(path))])
    path.write_text("a,b\n1,2\n")
    with pytest.raises(DataError, match=r"a\.csv: became shorter while it was read"):
        block.content()

"""Inputs of a recipe: the files of paths, patterns, folders and URLs, and refused inputs."""

from __future__ import annotations

import gzip
import io
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from echelon.core.errors import DataError, MissingExtra
from echelon.data.formats.files import sources
from echelon.data.formats.records import Input

from .reading import collect


def names(*paths: str | Path, **options: Any) -> list[str]:
    found = sources([Input(path=str(path), **options) for path in paths])
    return [Path(source.file).name for source in found]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("b.csv", "a.csv", "c.tsv", "deep/d.csv", ".hidden.csv", "notes.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("a,b\n1,2\n")
    return tmp_path


def test_files_come_in_the_order_they_are_named(folder: Path) -> None:
    assert names(folder / "b.csv", folder / "a.csv") == ["b.csv", "a.csv"]


def test_a_pattern_is_its_files_by_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert names(folder / "*.csv") == ["a.csv", "b.csv"]
    assert names(folder / "**/*.csv") == ["a.csv", "b.csv", "d.csv"]
    monkeypatch.chdir(folder)
    assert names("[ab].csv") == ["a.csv", "b.csv"]


def test_a_name_with_the_signs_of_a_pattern_is_a_name_first(tmp_path: Path) -> None:
    (tmp_path / "a[1].csv").write_text("a\n1\n")
    assert names(tmp_path / "a[1].csv") == ["a[1].csv"]


def test_a_folder_is_what_it_holds_of_known_formats(folder: Path) -> None:
    assert names(folder) == ["a.csv", "b.csv", "c.tsv", "d.csv"]


def test_what_is_hidden_or_prepared_is_no_input_unless_it_is_named(folder: Path) -> None:
    for name in (".git/x.csv", "deep/.out.work/y.csv", "deep/out/train/z.csv"):
        (folder / name).parent.mkdir(parents=True)
        (folder / name).write_text("a,b\n1,2\n")
    (folder / "deep/out/prepared.json").write_text("{}")
    assert names(folder) == ["a.csv", "b.csv", "c.tsv", "d.csv"]
    assert names(folder / "**/*.csv") == ["a.csv", "b.csv", "d.csv"]
    assert names(folder / ".git") == ["x.csv"]
    assert names(folder / ".hidden.csv") == [".hidden.csv"]
    assert names(folder / "deep/out/*/*.csv") == ["z.csv"]
    (folder / "none/.x").mkdir(parents=True)
    with pytest.raises(DataError, match="empty, hidden files and prepared data aside"):
        names(folder / "none")


def test_a_file_is_known_by_its_stamp(folder: Path) -> None:
    before = sources([Input(path=str(folder / "a.csv"))])
    assert before == sources([Input(path=str(folder / "a.csv"))])
    (folder / "a.csv").write_text("a,b\n1,2\n3,4\n")
    assert before != sources([Input(path=str(folder / "a.csv"))])


def test_images_of_idx_are_known_by_the_stamp_of_their_labels_too(tmp_path: Path) -> None:
    images = tmp_path / "t-images-idx3-ubyte"
    labels = tmp_path / "t-labels-idx1-ubyte"
    images.touch()
    stamps = []
    for content in (b"one", b"another"):
        stamps.append(sources([Input(path=str(images), format="idx")])[0].stamp)
        labels.write_bytes(content)
    stamps.append(sources([Input(path=str(images), format="idx")])[0].stamp)
    assert len(set(stamps)) == 3, "without labels, with some, with others"


def test_a_folder_of_records_is_known_by_the_stamps_of_all(tmp_path: Path) -> None:
    for label in "ab":
        (tmp_path / label).mkdir()
        (tmp_path / label / "1.txt").write_text("x")
    (before,) = sources([Input(path=str(tmp_path))])
    assert (before.format, before.size) == ("documents", 2)
    (tmp_path / "a" / "2.txt").write_text("y")
    (after,) = sources([Input(path=str(tmp_path))])
    assert before.stamp != after.stamp


@pytest.mark.parametrize(
    ("path", "options", "message"),
    [
        ("gone.csv", {}, r"gone\.csv: there is no such file or folder"),
        ("gone*.csv", {}, r"gone\*\.csv: no file matches"),
        ("notes.md", {}, r"notes\.md: its format cannot be told from its name; set format"),
        ("empty", {}, "empty: the folder is empty"),
        ("odd", {}, "odd: holds no file of a known format"),
        ("odd", {"format": "images"}, "odd: holds no images"),
        ("both", {}, "both: text lie in class folders and beside them"),
        ("a.csv", {"per": "line"}, "option of format csv 'per' is unknown"),
    ],
)
def test_what_cannot_be_read_is_refused_before_anything_is(
    folder: Path, path: str, options: dict[str, Any], message: str
) -> None:
    for name in ("empty", "odd", "both/class"):
        (folder / name).mkdir(parents=True)
    (folder / "odd" / "x.bin").write_bytes(b"x")
    (folder / "both" / "loose.txt").write_text("x")
    (folder / "both" / "class" / "1.txt").write_text("x")
    with pytest.raises(DataError, match=message):
        names(folder / path, **options)


def test_nothing_to_read_is_refused() -> None:
    with pytest.raises(DataError, match="there is nothing to read"):
        sources([])


def test_a_file_that_may_not_be_opened_is_refused(tmp_path: Path) -> None:
    from echelon.data.formats.remote import open_binary

    with pytest.raises(DataError, match="cannot be opened: Is a directory"):
        open_binary(str(tmp_path))


@pytest.fixture
def memory() -> Iterator[Any]:
    import fsspec

    system = fsspec.filesystem("memory")
    yield system
    system.rm("/", recursive=True)


def test_urls_are_read_and_their_patterns_too(memory: Any) -> None:
    import gzip

    memory.pipe("/set/train1.csv.gz", gzip.compress(b"a,b\n1,x\n2\n"))
    memory.pipe("/set/train2.csv.gz", gzip.compress(b"a,b\n3,z\n")[:-3])
    result = collect("memory://set/train*.csv.gz")
    assert result.column("a") == [1, 3]
    assert result.messages()[0] == "train1.csv.gz:3: 1 cell, but there are 2 columns"
    assert "train2.csv.gz:3: truncated" in result.messages()[1]
    assert result.bad[0].file == "memory:///set/train1.csv.gz"


def test_folders_and_parquet_behind_urls_are_read(memory: Any) -> None:
    for label in ("good", "poor"):
        memory.pipe(f"/texts/{label}/1.txt", b"it is " + label.encode())
    result = collect("memory://texts")
    assert result.rows == [
        {"text": "it is good", "label": "good"},
        {"text": "it is poor", "label": "poor"},
    ]
    with memory.open("/table/a.parquet", "wb") as file:
        pq.write_table(pa.table({"a": [1, 2]}), file)
    assert collect("memory://table/a.parquet").column("a") == [1, 2]
    assert collect("memory://table").column("a") == [1, 2]


def test_what_is_hidden_or_prepared_behind_a_url_is_no_input(memory: Any) -> None:
    for name in ("a.csv", ".b.csv", ".git/c.csv", "out/d.csv", "out/prepared.json"):
        memory.pipe(f"/set/{name}", b"a,b\n1,2\n")
    assert names("memory://set") == ["a.csv"]
    assert names("memory://set/*.csv") == ["a.csv"]
    assert names("memory://set/.b.csv") == [".b.csv"]


@pytest.mark.parametrize("inner", ["deep/*", "deep", "deep/a.csv.gz"])
def test_files_in_an_archive_are_read_in_place(tmp_path: Path, inner: str) -> None:
    with zipfile.ZipFile(tmp_path / "all.zip", "w") as archive:
        archive.writestr("deep/a.csv.gz", gzip.compress(b"a,b\n1,2\n"))
        if inner != "deep/a.csv.gz":
            archive.writestr("deep/b.csv", "a,b\n3,4\n")
    result = collect(f"zip://{inner}::{tmp_path}/all.zip")
    assert result.rows == [{"a": 1, "b": 2}, {"a": 3, "b": 4}][: 1 + (inner != "deep/a.csv.gz")]
    assert result.blocks[0].file == f"zip://deep/a.csv.gz::{tmp_path}/all.zip"


def test_images_in_an_archive_have_the_classes_of_their_folders(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "all.zip", "w") as archive:
        for label in ("cat", "dog"):
            drawn = io.BytesIO()
            Image.new("L", (4, 4)).save(drawn, "png")
            archive.writestr(f"pets/{label}/1.png", drawn.getvalue())
    assert collect(f"zip://pets::{tmp_path}/all.zip").column("label") == ["cat", "dog"]


def test_a_local_url_is_a_path(tmp_path: Path) -> None:
    (tmp_path / "a b.csv").write_text("a,b\n1,2\n")
    result = collect(f"file://{tmp_path}/a%20b.csv")
    assert result.rows == [{"a": 1, "b": 2}]
    assert result.blocks[0].data is None, "a worker reads it by itself"


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("memory://gone.csv", "gone.csv: there is no such file or folder"),
        ("memory://gone*.csv", "no file matches"),
        ("nowhere://a.csv", "nowhere://a.csv: cannot be reached: Protocol not known"),
    ],
)
def test_urls_that_lead_nowhere_are_refused(memory: Any, url: str, message: str) -> None:
    assert memory.protocol
    with pytest.raises(DataError, match=message):
        collect(url)


def test_without_fsspec_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(MissingExtra, match=r"memory://a\.csv needs an extra: .*echelon\[remote\]"):
        collect("memory://a.csv")

"""Files and folders are replaced as a whole, and their checksums detect a change."""

from __future__ import annotations

import hashlib
import zlib
from pathlib import Path

import pytest

from echelon.core.files import (
    crc32_blocks,
    crc32_file,
    replace_folder,
    replacing,
    sha256_file,
    write_atomic,
)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("durable", [False, True])
def test_a_file_is_written_and_replaced_and_nothing_else_is_left(
    tmp_path: Path, durable: bool
) -> None:
    path = tmp_path / "state.json"
    write_atomic(path, "älter", durable=durable)
    assert path.read_bytes() == "älter".encode()
    write_atomic(path, b"\x00new", durable=durable)
    assert path.read_bytes() == b"\x00new"
    assert names(tmp_path) == ["state.json"]


def test_the_old_file_is_there_until_the_new_one_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "state"
    path.write_text("old")
    with replacing(path) as part:
        part.write_text("half")
        assert path.read_text() == "old"
    assert path.read_text() == "half"


def test_a_failure_while_writing_leaves_the_old_file_alone(tmp_path: Path) -> None:
    path = tmp_path / "state"
    path.write_text("old")

    def fail() -> None:
        with replacing(path) as part:
            part.write_text("half")
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        fail()
    assert path.read_text() == "old"
    assert names(tmp_path) == ["state"]


def test_a_folder_takes_the_place_of_another_one(tmp_path: Path) -> None:
    old, new = tmp_path / "data", tmp_path / "unfinished"
    for folder, text in ((old, "old"), (new, "new")):
        folder.mkdir()
        (folder / "file").write_text(text)
    (old / "obsolete").touch()
    replace_folder(new, old)
    assert names(tmp_path) == ["data"]
    assert names(old) == ["file"]
    assert (old / "file").read_text() == "new"


def test_a_folder_that_cannot_be_replaced_is_put_back(tmp_path: Path) -> None:
    old = tmp_path / "data"
    old.mkdir()
    (old / "file").write_text("old")
    with pytest.raises(FileNotFoundError):
        replace_folder(tmp_path / "missing", old)
    assert names(tmp_path) == ["data"]
    assert (old / "file").read_text() == "old"


def test_checksums_are_those_of_zlib_and_hashlib(tmp_path: Path) -> None:
    data = bytes(range(256)) * 41
    path = tmp_path / "data"
    path.write_bytes(data)
    assert crc32_file(path) == (len(data), zlib.crc32(data))
    assert crc32_blocks(path, 1000) == [
        zlib.crc32(data[start : start + 1000]) for start in range(0, len(data), 1000)
    ]
    assert sha256_file(path) == hashlib.sha256(data).hexdigest()


def test_computing_a_checksum_can_be_given_up(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(b"x" * 10)

    def stop() -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        crc32_file(path, stop)

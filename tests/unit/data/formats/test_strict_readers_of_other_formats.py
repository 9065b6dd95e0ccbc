"""Strict readers of numpy, idx, images and texts, their errors, and format detection."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image

from echelon.core.errors import ConfigError, DataError
from echelon.data import detect, read, read_tiles


def table(path: Path, format: str = "auto", **options: Any) -> Any:
    return pa.Table.from_batches(list(read(path, format, **options)))


def column(path: Path, name: str, format: str = "auto", **options: Any) -> Any:
    return table(path, format, **options).column(name).chunk(0).to_numpy_ndarray()


def idx(values: np.ndarray[Any, Any], code: int = 8) -> bytes:
    sizes = struct.pack(f">{values.ndim}I", *values.shape)
    return bytes([0, 0, code, values.ndim]) + sizes + values.tobytes()


IMAGES = np.arange(5 * 3 * 4, dtype=np.uint8).reshape(5, 3, 4)
LABELS = np.array([3, 1, 4, 1, 5], np.uint8)


def test_idx_images_get_a_channel_and_their_labels(tmp_path: Path) -> None:
    (tmp_path / "t-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(IMAGES)))
    (tmp_path / "t-labels-idx1-ubyte").write_bytes(idx(LABELS))
    found = table(tmp_path / "t-images-idx3-ubyte.gz")
    assert found.column("x").chunk(0).to_numpy_ndarray().tolist() == IMAGES[:, None].tolist()
    assert found.column("y").to_pylist() == LABELS.tolist()


def test_idx_of_other_types_and_shapes(tmp_path: Path) -> None:
    values = np.arange(6, dtype=">f4").reshape(3, 2)
    (tmp_path / "a.idx").write_bytes(idx(values, 13))
    assert column(tmp_path / "a.idx", "x").tolist() == values.tolist()
    assert column(tmp_path / "a.idx", "x").dtype == np.float32


def test_idx_comes_in_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("echelon.data.formats.arrays._BATCH", 24)
    (tmp_path / "a.idx").write_bytes(idx(IMAGES))
    assert [batch.num_rows for batch in read(tmp_path / "a.idx")] == [2, 2, 1]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "empty"),
        (b"PK\3\4 a zip", "not an idx file: its magic number is 50 4b 03 04"),
        (b"\0\0\x08", "not an idx file"),
        (b"\0\0\x08\3\0\0", "truncated within its header"),
        (idx(IMAGES)[:-5], "truncated in record 4 of 5"),
        (idx(IMAGES) + b"x", "goes on after its last record (5)"),
        (idx(IMAGES[:0]), "empty: its sizes are [0, 3, 4]"),
    ],
)
def test_a_bad_idx_file_is_named_with_its_record(
    content: bytes, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "a-images-idx3-ubyte"
    path.write_bytes(content)
    with pytest.raises(DataError) as error:
        table(path)
    assert f"a-images-idx3-ubyte: {message}" in str(error.value)


def test_labels_must_be_as_many_as_images(tmp_path: Path) -> None:
    (tmp_path / "t-images-idx3-ubyte").write_bytes(idx(IMAGES))
    (tmp_path / "t-labels-idx1-ubyte").write_bytes(idx(LABELS[:3]))
    with pytest.raises(DataError, match=r"t-labels-idx1-ubyte: 3 labels for 5 images of t-images"):
        table(tmp_path / "t-images-idx3-ubyte")


def test_numpy_files_and_their_parts(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", IMAGES.astype(">i4"))
    assert column(tmp_path / "a.npy", "x").tolist() == IMAGES.tolist()
    np.savez(tmp_path / "b.npz", x=IMAGES, name=np.array(["a", "b", "c", "d", "e"]))
    found = table(tmp_path / "b.npz")
    assert found.column("name").to_pylist() == ["a", "b", "c", "d", "e"]
    np.savez(tmp_path / "c.npz", x_train=IMAGES, y_train=LABELS, x_test=IMAGES[:2])
    assert table(tmp_path / "c.npz", part="train").column_names == ["x", "y"]
    assert table(tmp_path / "c.npz", part="test").num_rows == 2


def test_numpy_files_come_in_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("echelon.data.formats.arrays._BATCH", 24)
    np.save(tmp_path / "a.npy", IMAGES)
    assert [batch.num_rows for batch in read(tmp_path / "a.npy")] == [2, 2, 1]


def test_bad_numpy_files_are_named(tmp_path: Path) -> None:
    np.savez(tmp_path / "odd.npz", x=IMAGES, y=LABELS[:2])
    with pytest.raises(DataError, match=r"odd.npz: its arrays differ in length: x 5, y 2"):
        table(tmp_path / "odd.npz")
    np.savez(tmp_path / "void.npz", x=IMAGES[:0])
    with pytest.raises(DataError, match=r"void.npz: empty"):
        table(tmp_path / "void.npz")
    np.save(tmp_path / "objects.npy", np.array([{}, []], object), allow_pickle=True)
    with pytest.raises(DataError, match=r"objects.npy: not a whole numpy file"):
        table(tmp_path / "objects.npy")
    np.savez(tmp_path / "whole.npz", x=np.arange(5000))
    torn = bytearray((tmp_path / "whole.npz").read_bytes())
    torn[3000] ^= 255
    (tmp_path / "torn.npz").write_bytes(torn)
    with pytest.raises(DataError, match=r"torn.npz: not a whole numpy file, array 'x': Bad CRC"):
        table(tmp_path / "torn.npz")
    (tmp_path / "text.npy").write_text("hello")
    with pytest.raises(DataError, match=r"text.npy: not a whole numpy file"):
        table(tmp_path / "text.npy")


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Two classes of colour images, 4 × 3 pixels."""
    for number, name in enumerate(["cat", "cat", "dog"]):
        (tmp_path / "photos" / name).mkdir(parents=True, exist_ok=True)
        pixels = np.full((3, 4, 3), 10 * number, np.uint8)
        pixels[..., 1] += 1
        Image.fromarray(pixels).save(tmp_path / "photos" / name / f"{number}.png")
    return tmp_path / "photos"


def test_image_folders_give_channels_first_and_the_class(photos: Path) -> None:
    found = table(photos)
    assert found.column("label").to_pylist() == ["cat", "cat", "dog"]
    x = found.column("x").chunk(0).to_numpy_ndarray()
    assert x.shape == (3, 3, 3, 4)
    assert x.dtype == np.uint8
    assert x[2, :, 0, 0].tolist() == [20, 21, 20]


def test_images_without_class_folders_have_no_label(photos: Path) -> None:
    assert table(photos / "cat").column_names == ["x"]


def test_grey_images_have_one_channel_unless_some_have_colour(photos: Path) -> None:
    grey = photos.parent / "grey"
    grey.mkdir()
    Image.fromarray(np.full((3, 4), 7, np.uint8)).save(grey / "a.png")
    assert column(grey, "x").shape == (1, 1, 3, 4)
    Image.fromarray(np.full((3, 4, 3), 9, np.uint8)).save(grey / "b.png")
    assert column(grey, "x").shape == (2, 3, 3, 4)


def test_images_of_other_sizes_are_refused_or_scaled(photos: Path) -> None:
    Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(photos / "dog" / "large.png")
    with pytest.raises(DataError, match=r"large.png: 8×8 pixels, but 0.png has 4×3: set the opt"):
        table(photos)
    assert column(photos, "x", size=5).shape == (4, 3, 5, 5)
    assert column(photos, "x", size=[2, 6]).shape == (4, 3, 2, 6)
    with pytest.raises(DataError, match=r"option size is \[1, 2, 3\]"):
        table(photos, size=[1, 2, 3])


def test_an_unreadable_image_is_named(photos: Path) -> None:
    (photos / "dog" / "broken.png").write_bytes(b"not a png")
    with pytest.raises(DataError, match=r"broken.png: not a readable image"):
        table(photos)
    whole = (photos / "dog" / "2.png").read_bytes()
    (photos / "dog" / "broken.png").write_bytes(whole[:-30])
    with pytest.raises(DataError, match=r"broken.png: not a readable image"):
        table(photos)


def test_a_folder_without_images_or_with_both_is_refused(photos: Path) -> None:
    (photos.parent / "void").mkdir()
    with pytest.raises(DataError, match="holds no images"):
        table(photos.parent / "void", "images")
    (photos / "stray.png").write_bytes((photos / "dog" / "2.png").read_bytes())
    with pytest.raises(DataError, match=r"in class folders and beside them \(stray.png\)"):
        table(photos)


def test_a_sheet_is_cut_into_tiles_row_by_row(tmp_path: Path) -> None:
    tiles = np.arange(6, dtype=np.uint8).repeat(4).reshape(2, 3, 2, 2)
    sheet = tiles.transpose(0, 2, 1, 3).reshape(4, 6)
    Image.fromarray(sheet).save(tmp_path / "train.png")
    np.savez(tmp_path / "labels.npz", y_train=np.arange(6) % 2)
    x = read_tiles(tmp_path / "train.png", 2)
    assert x.shape == (6, 1, 2, 2)
    assert x[:, 0, 0, 0].tolist() == [0, 1, 2, 3, 4, 5]
    found = table(tmp_path / "train.png", "images", tile=2)
    assert found.column("y").to_pylist() == [0, 1, 0, 1, 0, 1]
    with pytest.raises(DataError, match=r"6×4 pixels cannot be cut into tiles of 4"):
        read_tiles(tmp_path / "train.png", 4)
    with pytest.raises(DataError, match="set the option `tile`"):
        table(tmp_path / "train.png", "images")
    np.savez(tmp_path / "labels.npz", y_train=np.arange(5))
    with pytest.raises(DataError, match=r"'y_train' has 5 labels for 6 tiles"):
        table(tmp_path / "train.png", "images", tile=2)


def test_texts_are_read_per_line_or_per_file(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\r\ntwo\n\nlast", newline="")
    assert table(tmp_path / "a.txt").column("text").to_pylist() == ["one", "two", "", "last"]
    whole = table(tmp_path / "a.txt", per="file").column("text").to_pylist()
    assert whole == ["one\r\ntwo\n\nlast"]
    with pytest.raises(ConfigError, match="option per is 'word': input should be "):
        table(tmp_path / "a.txt", per="word")


def test_texts_in_class_folders_have_a_label(tmp_path: Path) -> None:
    for label, text in [("neg", "bad\nfilm"), ("pos", "good")]:
        (tmp_path / "set" / label).mkdir(parents=True)
        (tmp_path / "set" / label / "1.txt").write_text(text)
    found = table(tmp_path / "set")
    assert found.to_pydict() == {"text": ["bad\nfilm", "good"], "label": ["neg", "pos"]}
    assert table(tmp_path / "set", per="line").column("label").to_pylist() == ["neg", "neg", "pos"]


def test_bad_texts_are_named_with_their_line(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"fine\nfine\n\xff\n")
    for per in ("line", "file"):
        with pytest.raises(DataError, match=r"a.txt:3: not UTF-8"):
            table(tmp_path / "a.txt", per=per)
    (tmp_path / "b.txt").write_bytes(b"")
    with pytest.raises(DataError, match=r"b.txt: empty"):
        table(tmp_path / "b.txt")
    (tmp_path / "void").mkdir()
    (tmp_path / "loose").mkdir()
    (tmp_path / "loose" / "1.txt").write_text("no class")
    assert table(tmp_path / "loose").to_pydict() == {"text": ["no class"]}
    with pytest.raises(DataError, match="holds no texts"):
        table(tmp_path / "void", "text")
    with pytest.raises(DataError, match=r"void: is a folder, not a file"):
        table(tmp_path / "void", "idx")


@pytest.mark.parametrize(
    ("name", "format"),
    [
        ("a.csv.gz", "csv"),
        ("A.TSV", "tsv"),
        ("a.tab.zst", "tsv"),
        ("a.ndjson", "jsonl"),
        ("a.parquet", "parquet"),
        ("a.npz", "numpy"),
        ("train-images-idx3-ubyte.gz", "idx"),
        ("a.txt.xz", "text"),
    ],
)
def test_a_format_is_told_from_the_name(name: str, format: str, tmp_path: Path) -> None:
    (tmp_path / name).touch()
    assert detect(tmp_path / name) == format


def test_what_cannot_be_told_is_refused_with_the_choices(tmp_path: Path) -> None:
    (tmp_path / "a.docx").touch()
    with pytest.raises(DataError, match=r"a.docx: its format cannot be told from its name; set"):
        read(tmp_path / "a.docx")
    with pytest.raises(DataError, match=r"cannot be told from its content; .*\.parquet, "):
        read(tmp_path)

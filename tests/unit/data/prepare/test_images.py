"""The feature `image`: decoding, resizing and normalizing."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from PIL import Image, ImageOps
from sklearn.datasets import load_digits, load_sample_images

from echelon.core.errors import ConfigError, DataError
from echelon.data.prepare import prepare
from echelon.data.prepare.steps import Columns
from echelon.data.shards import ShardSource

from .fitting import encode, feature, fit, learn

RNG = np.random.default_rng(0)
PHOTOS = [Image.fromarray(image[:80, 100:220]) for image in load_sample_images().images]
DIGITS = (load_digits().images[:300] * 15).astype(np.uint8)


def stored(image: Image.Image, form: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def column(*images: Any) -> Columns:
    contents = [stored(image) if isinstance(image, Image.Image) else image for image in images]
    return {"image": pa.array(contents, pa.large_binary())}


def test_images_of_one_size_are_as_they_are() -> None:
    made = feature("image", "image")
    columns = column(*PHOTOS)
    learnt = learn(made, columns, 1)
    found = encode(made, columns, learnt)
    assert found.dtype == np.uint8
    wanted = np.stack([np.asarray(photo).transpose(2, 0, 1) for photo in PHOTOS])
    assert (found == wanted).all()
    assert learnt["shape"] == [3, 80, 120]
    np.testing.assert_allclose(learnt["mean"], wanted.mean((0, 2, 3)), rtol=1e-12)
    np.testing.assert_allclose(learnt["std"], wanted.std((0, 2, 3)), rtol=1e-9)


@pytest.mark.parametrize("fit_by", ["stretch", "crop", "pad"])
def test_another_size_is_pillows(fit_by: str) -> None:
    found = fit(feature("image", "image", size=[20, 32], fit=fit_by), column(*PHOTOS))
    change: Any = {
        "stretch": lambda photo: photo.resize((32, 20)),
        "crop": lambda photo: ImageOps.fit(photo, (32, 20)),
        "pad": lambda photo: ImageOps.pad(photo, (32, 20)),
    }[fit_by]
    wanted = np.stack([np.asarray(change(photo)).transpose(2, 0, 1) for photo in PHOTOS])
    assert (found == wanted).all()


def test_a_jpeg_is_close_to_what_it_was() -> None:
    columns: Columns = {"image": pa.array([stored(photo, "JPEG", quality=95) for photo in PHOTOS])}
    found = fit(feature("image", "image", size=24), columns)
    wanted = np.stack([np.asarray(photo.resize((24, 24))).transpose(2, 0, 1) for photo in PHOTOS])
    assert abs(found.astype(int) - wanted).mean() < 3


def test_a_camera_that_was_held_upright() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by a quarter
    turned = stored(PHOTOS[0].transpose(Image.Transpose.ROTATE_90), exif=exif)
    found = fit(feature("image", "image"), {"image": pa.array([turned, stored(PHOTOS[0])])})
    assert (found[0] == found[1]).all()


def test_grey_if_all_are() -> None:
    greys = [photo.convert("L") for photo in PHOTOS]
    made = feature("image", "image")
    learnt = learn(made, column(*greys))
    assert learnt["shape"] == [1, 80, 120]
    mixed = learn(made, column(greys[0], PHOTOS[1], greys[1]), 1)
    assert mixed["shape"] == [3, 80, 120]
    pixels = [np.asarray(image.convert("RGB")) for image in (greys[0], PHOTOS[1], greys[1])]
    np.testing.assert_allclose(mixed["mean"], np.mean(pixels, (0, 1, 2)), rtol=1e-12)
    np.testing.assert_allclose(mixed["std"], np.std(pixels, (0, 1, 2)), rtol=1e-9)
    told = feature("image", "image", channels=1)
    assert (fit(told, column(*PHOTOS))[:, 0] == np.stack([np.asarray(g) for g in greys])).all()


def test_pixels_that_are_decoded_already() -> None:
    tensors = pa.FixedShapeTensorArray.from_numpy_ndarray(DIGITS)
    for digits in (tensors, DIGITS, DIGITS[:, None]):
        made = feature("image", "image", size=4)
        found = fit(made, {"image": digits})
        wanted = np.asarray(Image.fromarray(DIGITS[7]).resize((4, 4)))
        assert found.shape == (300, 1, 4, 4)
        assert (found[7, 0] == wanted).all()
    colours = RNG.integers(0, 256, (5, 3, 6, 7), np.uint8)
    assert (fit(feature("image", "image"), {"image": colours}) == colours).all()


def test_normalised_on_the_spot() -> None:
    found = fit(feature("image", "image", normalise=True), {"image": DIGITS})
    assert found.dtype == np.float32
    np.testing.assert_allclose([found.mean(), found.std()], [0, 1], atol=1e-4)


def test_images_that_cannot_be_used_are_refused() -> None:
    made = feature("image", "image")
    whole = stored(PHOTOS[0])
    learnt = learn(made, column(*PHOTOS, None, b"no image", whole[: len(whole) // 2]))
    deep = Image.fromarray(np.zeros((80, 120), np.uint16))
    columns = column(None, whole, b"no image", whole[:-3000], PHOTOS[0].resize((30, 20)), deep)
    found = dict(made.refused(columns, learnt))
    assert list(found) == [0, 2, 3, 4, 5]
    assert found[0] == "the image is missing"
    assert found[2].startswith("not a readable image: cannot identify image file")
    assert found[3].startswith("not a readable image: ")
    assert found[4].startswith("the image has 20×30 pixels; those of train have 80×120")
    assert found[5].startswith("pixels of mode I;16: those of 8 bits are taken")
    with pytest.raises(
        DataError, match="feature image: record 0 of its block: the image is missing"
    ):
        made.encode(columns, learnt)
    assert not made.refused(column(whole), learnt)


def test_a_block_is_decoded_once_for_both_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    made, columns = feature("image", "image", size=8), column(*PHOTOS)
    learnt = learn(made, columns)
    assert not made.refused(columns, learnt)
    monkeypatch.setattr(Image, "open", None)
    first: Any = made.encode(columns, learnt)["out"]
    assert first.shape == (2, 3, 8, 8)
    monkeypatch.undo()
    other = column(PHOTOS[1], PHOTOS[0])
    assert not made.refused(columns, learnt)
    second: Any = made.encode(other, learnt)["out"]
    assert (second == first[::-1]).all()


def test_a_bomb_is_not_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    made, columns = feature("image", "image", size=8), column(*PHOTOS)
    learnt = learn(made, columns)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 9_000)
    assert "decompression bomb" in made.refused(column(*PHOTOS), learnt)[0]
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 4_000)
    assert "decompression bomb" in made.refused(column(*PHOTOS), learnt)[1]


def test_train_data_without_anything_to_learn_is_refused() -> None:
    made = feature("image", "image")
    with pytest.raises(DataError, match="images are of 20×30, 80×120, …: say their `size`"):
        learn(made, column(PHOTOS[0], PHOTOS[0].resize((30, 20))), 1)
    with pytest.raises(DataError, match="train has no readable image"):
        learn(made, column(None, b""))
    with pytest.raises(DataError, match="column 'image' is of type int64: no images"):
        learn(made, {"image": pa.array([1])})
    with pytest.raises(DataError, match="column 'image' is of type string: no images"):
        made.look(0, {"image": pa.array(["a"])}, {})
    with pytest.raises(DataError, match=r"holds float64 \[8, 8\]: images are uint8"):
        learn(made, {"image": DIGITS / 2})
    with pytest.raises(DataError, match=r"holds uint8 \[2, 8, 8\]"):
        learn(made, {"image": DIGITS[:10].reshape(5, 2, 8, 8)})
    with pytest.raises(DataError, match="made of 2 columns: name one"):
        feature("image", ["a", "b"]).check({"a": pa.binary(), "b": pa.binary()})
    with pytest.raises(ConfigError, match="size"):
        feature("image", "image", size=0)


def test_from_a_folder_to_shards(tmp_path: Path) -> None:
    for at, photo in enumerate(PHOTOS * 6):
        folder = tmp_path / "raw" / ("tower", "flower")[at % 2]
        folder.mkdir(parents=True, exist_ok=True)
        photo.resize((40 + at, 30)).save(folder / f"{at:02}.png")
    (tmp_path / "raw" / "tower" / "99.png").write_bytes(b"no image")
    done = prepare(
        {
            "read": {"path": str(tmp_path / "raw"), "format": "images"},
            "split": {"by": "stratified", "column": "label", "train": 0.5, "valid": 0.5},
            "features": [
                {"kind": "classes", "from": "label", "to": "y"},
                {"kind": "image", "from": "image", "size": 16, "to": "x"},
            ],
            "write": {"folder": "prepared", "shards": 2},
        },
        workers=1,
    )
    source = ShardSource(done.path("train"))
    batch: Any = source.gather(torch.arange(len(source)))
    assert batch["x"].shape == (6, 3, 16, 16)
    assert batch["x"].dtype == torch.uint8
    assert batch["y"].bincount().tolist() == [3, 3]
    pixels = batch["x"].double()
    np.testing.assert_allclose(done.encoders.learnt("x")["mean"], pixels.mean((0, 2, 3)))
    (out,) = (done.folder / "quarantine.jsonl").read_text(encoding="utf-8").splitlines()
    assert json.loads(out)["file"].endswith("99.png")

"""Augmentations are pure functions of (batch, draws), each sample independent of its batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from echelon.core.config.sections import AugmentSection
from echelon.core.errors import TaskError
from echelon.core.interfaces import Augment
from echelon.core.types import Batch, Sparse
from echelon.data.augment import Compose, Crop, Cutout, Flip, Mixup, Normalise, from_section
from echelon.data.loader import PositionDraws

SHAPES = [(40, 12, 10), (40, 1, 12, 10), (40, 3, 12, 10)]
ONE_BY_ONE = [Crop(3), Flip(), Cutout(5), Compose([Crop(2), Flip(), Compose([Cutout(3), Flip()])])]


def images(shape: tuple[int, ...], dtype: torch.dtype = torch.uint8) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(1, 256, shape, generator=generator).to(dtype)


def draws(start: int, stop: int) -> PositionDraws:
    return PositionDraws(5, 1, np.arange(start, stop))


def augmented(augment: Augment, x: Tensor, start: int = 0) -> Tensor:
    batch: Batch = {"x": x, "y": torch.arange(len(x))}
    result = augment(batch, draws(start, start + len(x)))
    assert torch.equal(batch["x"], x)  # type: ignore[arg-type]  # the batch itself is left alone
    assert torch.equal(result["y"], torch.arange(len(x)))  # type: ignore[arg-type]
    assert isinstance(result["x"], Tensor)
    return result["x"]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32], ids=str)
@pytest.mark.parametrize("augment", ONE_BY_ONE, ids=repr)
def test_a_sample_does_not_see_the_batch_it_is_in(
    augment: Augment, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    x = images(shape, dtype)
    before = x.clone()
    whole = augmented(augment, x)
    parts = [augmented(augment, x[a:b], a) for a, b in [(0, 1), (1, 17), (17, 40)]]
    assert torch.equal(torch.cat(parts), whole)
    assert torch.equal(x, before)
    assert whole.dtype == dtype
    assert whole.shape == x.shape
    assert not torch.equal(whole, x)


def test_every_crop_is_a_window_of_the_padded_image() -> None:
    x = images((300, 3, 12, 10))
    padded = torch.nn.functional.pad(x, (2, 2, 2, 2))
    seen = set()
    for image, source in zip(augmented(Crop(2), x), padded, strict=True):
        places = [
            (top, left)
            for top in range(5)
            for left in range(5)
            if torch.equal(source[:, top : top + 12, left : left + 10], image)
        ]
        assert len(places) == 1
        seen.add(places[0])
    assert len(seen) == 25, "every place is chosen by some image"


def test_about_half_the_images_are_mirrored() -> None:
    x = images((1000, 4, 6))
    flipped = augmented(Flip(), x)
    is_same = (flipped == x).flatten(1).all(1)
    is_mirrored = (flipped == x.flip(-1)).flatten(1).all(1)
    assert bool((is_same ^ is_mirrored).all())
    assert 420 < int(is_mirrored.sum()) < 580


def test_a_cutout_is_one_square_with_its_middle_in_the_image() -> None:
    blanked = augmented(Cutout(4), images((500, 2, 12, 10))) == 0
    assert torch.equal(blanked[:, 0], blanked[:, 1])
    rows, columns = blanked[:, 0].any(2), blanked[:, 0].any(1)
    assert torch.equal(blanked[:, 0], rows[:, :, None] & columns[:, None, :])
    for lines, side in ((rows, 12), (columns, 10)):
        assert set(lines.sum(1).tolist()) == {2, 3, 4}, "whole, or cut off by the edge"
        assert bool(lines.any(0).all()), f"any of the {side} lines may be hidden"


def test_a_cutout_is_filled_with_the_value_given() -> None:
    changed = augmented(Cutout(3, value=7.5), torch.zeros(5, 8, 8))
    assert set(changed.flatten().tolist()) == {0, 7.5}


def test_parts_of_a_composition_draw_numbers_of_their_own() -> None:
    x = images((200, 6, 6))
    once, twice = augmented(Flip(), x), augmented(Compose([Flip(), Flip()]), x)
    assert not torch.equal(twice, x), "the same draw twice would undo itself"
    assert not torch.equal(twice, once)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32], ids=str)
def test_normalise_works_channel_by_channel(dtype: torch.dtype) -> None:
    x = images((4, 2, 5, 5), dtype)
    changed = augmented(Normalise([10.0, 20.0], [2.0, 4.0]), x)
    assert changed.dtype == torch.float32
    assert torch.allclose(changed[:, 0], (x[:, 0].float() - 10) / 2)
    assert torch.allclose(changed[:, 1], (x[:, 1].float() - 20) / 4)


def test_normalise_works_feature_by_feature_and_by_one_number() -> None:
    x = images((4, 3))
    figures = torch.tensor([1.0, 2.0, 3.0])
    assert torch.allclose(augmented(Normalise(figures, figures), x), (x - figures) / figures)
    grey = images((4, 6, 6))
    changed = augmented(Normalise(torch.tensor(127.5), torch.tensor(127.5)), grey)
    assert torch.allclose(changed, grey / 127.5 - 1, atol=1e-6)


def test_a_job_says_what_is_done() -> None:
    assert from_section(AugmentSection()) is None
    full = AugmentSection(crop=2, flip=True, cutout=4, mixup=0.2)
    assert from_section(full) == Compose((Crop(2), Flip(), Cutout(4), Mixup(0.2)))
    assert from_section(AugmentSection(flip=True)) == Compose((Flip(),))


@pytest.mark.parametrize(
    ("augment", "name"), [(Crop(1), "crop"), (Flip(), "flip"), (Cutout(1), "cutout")]
)
def test_what_is_no_image_is_refused(augment: Augment, name: str) -> None:
    with pytest.raises(TaskError, match=rf"augment.{name} is for images .* x is \[3, 784\]"):
        augmented(augment, torch.zeros(3, 784))


def test_sparse_samples_are_refused() -> None:
    x = Sparse(torch.tensor([1]), torch.ones(1), torch.tensor([0, 1]), 5)
    with pytest.raises(TaskError, match="column 'x' is sparse"):
        Flip()({"x": x}, draws(0, 1))

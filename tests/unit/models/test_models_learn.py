"""Every family can memorize a tiny batch: gradients reach all of its parts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from echelon import models
from echelon.core.config import OptimizerSection
from echelon.models import InputFacts
from echelon.optim import Stepper, build_optimizer

B = 8
IMAGES = torch.randn(B, 3, 8, 8, generator=torch.Generator().manual_seed(1))
CLASSES = torch.tensor([0, 1, 2, 0, 1, 2, 0, 1])
WORDS = torch.randint(1, 30, (B, 6), generator=torch.Generator().manual_seed(2))
IDS = torch.stack([torch.arange(B) % 3, torch.arange(B) % 5, torch.arange(B)], dim=1)
NUMBERS = torch.randn(B, 2, generator=torch.Generator().manual_seed(3))
IMAGE_FACTS = InputFacts((3, 8, 8), 3)
WORD_FACTS = InputFacts((6,), 3, vocabulary=30)
FIELD_FACTS = InputFacts(outputs=3, fields=(3, 5, B), dense=2)

CASES: list[tuple[str, dict[str, Any], InputFacts, tuple[Tensor, ...], Tensor]] = [
    ("softmax", {}, IMAGE_FACTS, (IMAGES,), CLASSES),
    ("mlp", {"norm": "layer"}, IMAGE_FACTS, (IMAGES,), CLASSES),
    ("cnn", {"channels": [8, 8], "hidden": [16]}, IMAGE_FACTS, (IMAGES,), CLASSES),
    ("alexnet", {"hidden": 32, "dropout": 0.0}, IMAGE_FACTS, (IMAGES,), CLASSES),
    ("resnet", {}, IMAGE_FACTS, (IMAGES,), CLASSES),
    ("textcnn", {"width": 16, "filters": 8}, WORD_FACTS, (WORDS,), CLASSES),
    ("gpt", {"layers": 2, "heads": 2, "width": 32}, WORD_FACTS, (WORDS[:, :-1],), WORDS[:, 1:]),
    ("dlrm", {}, FIELD_FACTS, (NUMBERS, IDS), CLASSES),
    ("dlrm", {"interaction": "dot"}, FIELD_FACTS, (NUMBERS, IDS), CLASSES),
]


@pytest.mark.parametrize(("name", "values", "facts", "inputs", "target"), CASES)
def test_a_tiny_batch_is_learnt_by_heart(
    name: str,
    values: dict[str, Any],
    facts: InputFacts,
    inputs: tuple[Tensor, ...],
    target: Tensor,
) -> None:
    model = models.build(name, models.options(name, values), facts)
    section = OptimizerSection(name="adam", lr=3e-3)
    stepper = Stepper(build_optimizer(section, model), model.named_parameters())
    losses: list[float] = []
    for _ in range(200):
        scores = model(*inputs)
        loss = F.cross_entropy(scores.flatten(0, -2), target.flatten())
        losses.append(loss.item())
        if losses[-1] < 0.1:
            break
        model.zero_grad()
        torch.autograd.backward(loss)
        assert all(p.grad is not None for p in model.parameters())
        stepper.step(1.0)
    assert losses[-1] < 0.1 < losses[0]


@contextmanager
def without_onednn() -> Iterator[None]:
    """Some virtual machines promise the bf16 instructions it takes, and then lack them."""
    before = torch.backends.mkldnn.enabled
    torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.backends.mkldnn.enabled = before


@pytest.mark.parametrize(("name", "values", "facts", "inputs"), [case[:4] for case in CASES])
def test_it_computes_in_bf16_under_autocast(
    name: str, values: dict[str, Any], facts: InputFacts, inputs: tuple[Tensor, ...]
) -> None:
    model = models.build(name, models.options(name, values), facts).eval()
    exact = model(*inputs)
    with without_onednn(), torch.autocast("cpu", torch.bfloat16):
        rough = model(*inputs)
    torch.testing.assert_close(rough.float(), exact, atol=0.15, rtol=0.15)

"""The transformer: sizes, causality, initialization and generation."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from echelon.core.errors import ConfigError, TaskError
from echelon.models.gpt import GPT, Block, GPTOptions


def gpt(vocabulary: int = 65, context: int = 16, **values: Any) -> GPT:
    chosen = {"layers": 2, "heads": 2, "width": 16, **values}
    return GPT(vocabulary, context, GPTOptions.model_validate(chosen))


def tokens(*shape: int, vocabulary: int = 65, seed: int = 1) -> Tensor:
    return torch.randint(0, vocabulary, shape, generator=torch.Generator().manual_seed(seed))


def expected_size(V: int, L: int, layers: int, D: int) -> int:  # noqa: N803
    attention = D * 3 * D + 3 * D + D * D + D
    feed_forward = D * 4 * D + 4 * D + 4 * D * D + D
    norms = 2 * 2 * D
    return V * D + L * D + layers * (attention + feed_forward + norms) + 2 * D


def test_it_has_the_size_of_gpt2() -> None:
    with torch.device("meta"):
        model = gpt(50_257, 1024, layers=12, heads=12, width=768)
    assert expected_size(50_257, 1024, 12, 768) == 124_439_808
    assert sum(p.numel() for p in model.parameters()) == 124_439_808


@pytest.mark.parametrize(("layers", "width"), [(1, 8), (3, 24)])
def test_its_size_follows_the_formula(layers: int, width: int) -> None:
    model = gpt(65, 32, layers=layers, width=width)
    assert sum(p.numel() for p in model.parameters()) == expected_size(65, 32, layers, width)


def test_without_bias_and_untied_it_has_other_sizes() -> None:
    tied, untied = gpt(), gpt(tied=False)
    count = {model: sum(p.numel() for p in model.parameters()) for model in (tied, untied)}
    assert count[untied] - count[tied] == 65 * 16
    assert not any(name.endswith("bias") for name, _ in gpt(bias=False).named_parameters())


def test_every_token_gets_scores() -> None:
    assert gpt()(tokens(3, 16)).shape == (3, 16, 65)
    assert gpt()(tokens(3, 5)).shape == (3, 5, 65)


def test_later_tokens_cannot_change_earlier_scores() -> None:
    model, x = gpt().eval(), tokens(2, 12)
    before = model(x)
    for place in range(12):
        changed = x.clone()
        changed[:, place] = (changed[:, place] + 1) % 65
        after = model(changed)
        assert torch.equal(after[:, :place], before[:, :place])
        assert not torch.allclose(after[:, place:], before[:, place:])


def test_the_order_of_tokens_matters() -> None:
    model, x = gpt().eval(), tokens(1, 8)
    assert not torch.allclose(model(x)[:, -1], model(x[:, [1, 0, 2, 3, 4, 5, 6, 7]])[:, -1])


@pytest.mark.parametrize("tied", [True, False])
def test_the_first_loss_is_that_of_a_guess(tied: bool) -> None:
    model = gpt(1000, 32, width=64, tied=tied)
    scores = model(tokens(8, 32, vocabulary=1000))
    loss = F.cross_entropy(scores.flatten(0, 1), tokens(8 * 32, vocabulary=1000, seed=2))
    assert loss.item() == pytest.approx(math.log(1000), abs=0.1)


def test_weights_are_drawn_as_gpt2_draws_them() -> None:
    model = gpt(2000, 64, layers=8, heads=4, width=128)
    small = 0.02 / math.sqrt(2 * 8)
    for name, p in model.named_parameters():
        if name.endswith("bias"):
            assert bool((p == 0).all()), name
        elif "norm" in name:
            assert bool((p == 1).all()), name
        else:
            std = small if name.endswith("out.weight") else 0.02
            assert p.std().item() == pytest.approx(std, rel=0.03), name


def test_tokens_are_read_and_written_with_the_same_table() -> None:
    model = gpt()
    embed, *_, head = model
    assert embed.tokens.weight is head.scores.weight  # type: ignore[union-attr]
    assert "3.scores.weight" not in dict(model.named_parameters())
    torch.autograd.backward(model(tokens(2, 4)).logsumexp(-1).sum())
    table = model.get_parameter("0.tokens.weight")
    assert table.grad is not None
    assert bool((table.grad != 0).any(1).all()), "every token is scored, so every row is trained"


def test_it_is_a_list_of_blocks() -> None:
    model = gpt().eval()
    embed, *blocks, head = model
    assert all(isinstance(block, Block) for block in blocks)
    assert len(blocks) == 2
    x = tokens(2, 7)
    first, second = nn.Sequential(embed, blocks[0]), nn.Sequential(blocks[1], head)
    assert torch.equal(second(first(x)), model(x))


def test_dropout_is_off_in_evaluation() -> None:
    model, x = gpt(dropout=0.3), tokens(2, 8)
    model.eval()
    assert torch.equal(model(x), model(x))
    model.train()
    assert not torch.equal(model(x), model(x))


def test_generation_goes_on_beyond_the_context_and_repeats_with_its_seed() -> None:
    model, start = gpt(context=6).eval(), tokens(2, 3)

    def draw(seed: int) -> Tensor:
        return model.generate(start, 9, generator=torch.Generator().manual_seed(seed))

    assert draw(1).shape == (2, 12)
    assert torch.equal(draw(1)[:, :3], start)
    assert torch.equal(draw(1), draw(1))
    assert not torch.equal(draw(1), draw(2))


def test_generation_without_temperature_takes_the_best() -> None:
    model, start = gpt(context=6).eval(), tokens(2, 3)
    found = model.generate(start, 2, temperature=0.0)
    assert torch.equal(found[:, 3], model(start)[:, -1].argmax(-1))
    assert torch.equal(found[:, 4], model(found[:, :4])[:, -1].argmax(-1))


def test_a_text_longer_than_the_context_is_refused() -> None:
    with pytest.raises(TaskError, match="gpt sees 16 tokens at once: a text of 17 is too long"):
        gpt()(tokens(1, 17))


def test_a_width_that_heads_do_not_share_evenly_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"model.width = 16: must be a multiple of .* \(3\)") as e:
        gpt(heads=3)
    assert e.value.path == ("model", "width")

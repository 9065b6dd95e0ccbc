"""Cut layers: where their rows and columns go, and what they compute."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from echelon.comm.collectives import Solo
from echelon.core.errors import CheckpointError, ConfigError
from echelon.models.gpt import GPT, GPTOptions
from echelon.strategy.tensor.layers import (
    Cut,
    Team,
    agree_on_chance,
    by_heads,
    cut_model,
    even,
    restore,
)
from echelon.strategy.tensor.plan import planned

CPU = torch.device("cpu")


@pytest.mark.parametrize("count", [1, 2, 4])
def test_heads_stay_together_in_all_three_matrices(count: int) -> None:
    width, heads = 16, 4
    rows = torch.arange(3 * width)
    places = by_heads(width, heads, 3, count)
    assert torch.equal(torch.cat(places).sort().values, rows)
    for at, mine in enumerate(places):
        q, k, v = mine.view(3, -1)
        assert torch.equal(k - q, torch.full_like(q, width))
        assert torch.equal(v - k, torch.full_like(q, width))
        assert int(q[0]) == at * width // count


def test_parts_are_even_and_a_whole_that_does_not_fit_is_refused() -> None:
    assert [len(part) for part in even(7, 3)] == [2, 2, 3]
    cut = Cut("w", torch.Size([2, 7]), 1, even(7, 3))
    whole = torch.arange(14.0).view(2, 7)
    assert torch.equal(cut.cut(whole, 2, what="w"), whole[:, 4:])
    with pytest.raises(CheckpointError, match=r"w is \(7, 2\), but the parameter is \(2, 7\)"):
        cut.cut(whole.t(), 0, what="w")


def test_a_team_of_one_computes_what_the_model_did_and_gives_it_back() -> None:
    model = GPT(9, 8, GPTOptions(layers=1, heads=2, width=8, dropout=0.2))
    tokens = torch.randint(9, (3, 8))
    model.eval()
    expected = model(tokens)
    chance = agree_on_chance(Solo(), CPU)
    cuts = cut_model(model, planned(model, {}), Team(Solo(), chance))
    assert [cut.name for cut in cuts] == [
        "1.attention.qkv.weight",
        "1.attention.qkv.bias",
        "1.attention.out.weight",
        "1.mlp.up.weight",
        "1.mlp.up.bias",
        "1.mlp.out.weight",
    ]
    torch.testing.assert_close(model(tokens), expected)
    restore(model)
    assert not any("forward" in module.__dict__ for module in model.modules())
    torch.testing.assert_close(model(tokens), expected)


def test_chance_goes_its_own_way_and_comes_back() -> None:
    torch.manual_seed(3)
    first, second = agree_on_chance(Solo(), CPU), agree_on_chance(Solo(), CPU)
    second.index = 1
    state = torch.get_rng_state()
    drawn = []
    for chance in (first, second, first):
        torch.set_rng_state(state)
        chance.part()
        own = torch.rand(4)
        chance.join()
        drawn.append((own, torch.rand(4)))
    (own0, common0), (own1, common1), (again, _) = drawn
    assert torch.equal(own0, again)
    assert not torch.equal(own0, own1)
    assert torch.equal(common0, common1)


def test_a_layer_too_small_for_its_members_is_refused() -> None:
    class Three(Solo):
        count = 3

    model = nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 3))
    with pytest.raises(ConfigError, match="'0' cannot be cut by columns into 3 parts: it has 2"):
        cut_model(model, {"0": "columns", "1": "rows"}, Team(Three(), agree_on_chance(Solo(), CPU)))

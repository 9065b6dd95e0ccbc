"""Which linear layers are cut, and how."""

from __future__ import annotations

import pytest

from echelon.core.errors import ConfigError
from echelon.models.gpt import GPT, GPTOptions
from echelon.models.mlp import MLP, MLPOptions
from echelon.strategy.tensor.plan import planned


def mlp(**options: object) -> MLP:
    return MLP((4,), 2, MLPOptions.model_validate({"hidden": (8, 8, 8), **options}))


def test_neighbouring_layers_of_an_mlp_are_pairs() -> None:
    assert planned(mlp(dropout=0.1), {}) == {
        "0.0": "columns",
        "1.0": "rows",
        "2.0": "columns",
        "3": "rows",
    }
    assert planned(mlp(hidden=(8, 8)), {}) == {"0.0": "columns", "1.0": "rows"}


def test_a_norm_between_two_layers_keeps_them_whole() -> None:
    with pytest.raises(ConfigError, match="does not know how to cut this model"):
        planned(mlp(norm="batch"), {})


def test_a_gpt_is_cut_within_its_blocks() -> None:
    plan = planned(GPT(9, 8, GPTOptions(layers=2, heads=2, width=8)), {})
    block = {"attention.qkv": "columns", "attention.out": "rows"}
    block |= {"mlp.up": "columns", "mlp.out": "rows"}
    assert plan == {f"{at}.{name}": how for at in (1, 2) for name, how in block.items()}


def test_the_first_pattern_that_fits_decides() -> None:
    chosen = planned(mlp(), {"[02].0": "columns", "*": "rows"})
    assert list(chosen.values()) == ["columns", "rows", "columns", "rows"]

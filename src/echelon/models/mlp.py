"""The multi-layer perceptron: linear layers, each but the last followed by a nonlinearity."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Annotated

from pydantic import Field, PositiveInt
from torch import nn

from echelon.core.config.sections import Section
from echelon.models.layers import (
    ActivationName,
    InitName,
    NormName,
    Rate,
    chain,
    dense_block,
    initialise_,
)
from echelon.models.registry import InputFacts


class MLPOptions(Section):
    """Hidden layers and what is between them."""

    hidden: Annotated[tuple[PositiveInt, ...], Field(min_length=1)] = (64,)
    """Width of each hidden layer."""
    activation: ActivationName = "relu"
    norm: NormName = "none"
    dropout: Rate = 0.0
    """Part of each hidden layer's values that training leaves out."""
    init: InitName = "he"


class MLP(nn.Sequential):
    """Vectors or images → hidden layers, each one block → a score per output."""

    def __init__(
        self, shape: tuple[int, ...], outputs: int, options: MLPOptions, *, sparse: bool = False
    ) -> None:
        o = options
        widths = [math.prod(shape), *o.hidden]
        blocks = [
            dense_block(before, after, o.activation, o.norm, o.dropout, sparse=sparse and at == 0)
            for at, (before, after) in enumerate(pairwise(widths))
        ]
        flatten = nn.Flatten() if len(shape) > 1 else None
        super().__init__(*chain(flatten, *blocks, nn.Linear(widths[-1], outputs)))
        initialise_(self, o.init, o.activation)


Options = MLPOptions


def from_facts(options: MLPOptions, facts: InputFacts) -> MLP:
    return MLP(facts.shape, facts.outputs, options, sparse=facts.sparse)

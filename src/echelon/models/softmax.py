"""Softmax regression: one linear layer with a score per class. The baseline for every network."""

from __future__ import annotations

import math

from torch import nn

from echelon.core.config.sections import Section
from echelon.models.layers import InitName, SparseLinear, chain, initialise_
from echelon.models.registry import InputFacts


class SoftmaxOptions(Section):
    """A linear model."""

    bias: bool = True
    init: InitName = "default"


class Softmax(nn.Sequential):
    """x → W x + b. The softmax itself is part of the loss."""

    def __init__(
        self,
        shape: tuple[int, ...],
        outputs: int,
        options: SoftmaxOptions,
        *,
        sparse: bool = False,
    ) -> None:
        linear = SparseLinear if sparse else nn.Linear
        flatten = nn.Flatten() if len(shape) > 1 else None
        super().__init__(*chain(flatten, linear(math.prod(shape), outputs, bias=options.bias)))
        initialise_(self, options.init)


Options = SoftmaxOptions


def from_facts(options: SoftmaxOptions, facts: InputFacts) -> Softmax:
    return Softmax(facts.shape, facts.outputs, options, sparse=facts.sparse)

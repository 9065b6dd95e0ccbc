"""Random numbers that belong to a layer and a micro-batch, not to the member that computes them.

Dropout draws other numbers in every layer, step and replica, but the same ones however the layers
are spread over the members. So a run that is resumed goes on as it would have, cut as it may be.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Draws:
    """Lends the generator that layers draw from."""

    def __init__(self, device: torch.device) -> None:
        # torch.manual_seed would do for all devices, but notes a stack trace at every call
        cuda = device.type == "cuda"
        generators = torch.cuda.default_generators
        self._generator = generators[device.index or 0] if cuda else torch.default_generator
        self._start = 0

    @contextmanager
    def during(self, *numbers: int) -> Iterator[None]:
        """For what these numbers stand for, such as version and replica; nothing is used up."""
        before = self._generator.get_state()
        self._start = _mixed(self._generator.initial_seed(), *numbers)
        try:
            yield
        finally:
            self._generator.set_state(before)

    def begin(self, layer: int, micro: int) -> None:
        """What is drawn from now on belongs to this layer."""
        self._generator.manual_seed(_mixed(self._start, layer, micro))


def _mixed(*numbers: int) -> int:
    """One seed from several numbers."""
    seed = 0
    for number in numbers:
        seed = ((seed ^ number) * 0x9E3779B97F4A7C15 + 0x632BE59BD9B4E019) % 2**63
    return seed

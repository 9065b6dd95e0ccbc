"""The random numbers of a team: alike where all have the same activations, else one's own."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from echelon.comm.interface import Collective


@dataclass(slots=True)
class Chance:
    """`generator` draws alike in all members, but for what is between `part` and `join`."""

    generator: torch.Generator
    index: int
    _common: Tensor | None = None

    def part(self) -> None:
        """Go on with numbers of one's own. They follow from the common ones, so a forward pass
        that is made again (recompute) draws the same."""
        drawn = torch.randint(1 << 40, (), generator=self.generator, device=self.generator.device)
        self._common = self.generator.get_state()
        self.generator.manual_seed(int(drawn) + 1 + self.index)

    def join(self) -> None:
        """Go on with the common ones."""
        if self._common is not None:
            self.generator.set_state(self._common)
            self._common = None


def agree_on_chance(team: Collective, device: torch.device) -> Chance:
    """Let the team's members draw alike from now on."""
    if device.type == "cuda":
        generator = torch.cuda.default_generators[device.index or 0]
    else:
        generator = torch.default_generator
    state = generator.get_state().to(device)
    team.broadcast_([state])
    generator.set_state(state.cpu())
    return Chance(generator, team.index)

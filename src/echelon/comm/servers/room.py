"""Memory for one value per parameter: whole flats, and each parameter's view of them."""

from __future__ import annotations

import torch
from torch import Tensor

from echelon.comm.servers.layout import Layout

_PAGE = 4096


class Room:
    """`memory` is bytes, one flat behind the other, each a whole number of cache lines."""

    def __init__(self, layout: Layout, memory: Tensor | None = None) -> None:
        if memory is None:
            memory = torch.empty(layout.bytes, dtype=torch.uint8)
        assert memory.numel() >= layout.bytes, f"{memory.numel()} bytes of {layout.bytes}"
        self.memory = memory
        self.flats: list[Tensor] = []
        start = 0
        for flat in layout.flats:
            self.flats.append(memory[start : start + flat.bytes].view(flat.dtype))
            start += flat.bytes
        self.views = layout.views(self.flats)

    def clear(self) -> None:
        """Zeros, and every page touched now: a first touch costs more than a copy."""
        self.memory.zero_()

    def touch(self) -> None:
        """Have every page mapped, whatever it holds."""
        self.memory[::_PAGE].sum()

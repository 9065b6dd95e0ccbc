"""The collective of one: everything is there already."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from echelon.comm.interface import GradientSum
from echelon.comm.private import PrivateSum


class Solo:
    """One member."""

    index = 0
    count = 1

    def sum(self, values: Sequence[float]) -> list[float]:
        return [float(value) for value in values]

    def sum_(self, tensor: Tensor) -> None:
        """The sum of one."""

    def broadcast_(self, tensors: Sequence[Tensor], source: int = 0) -> None:
        """Everybody has them."""

    def barrier(self) -> None:
        """Nobody else comes."""

    def gradients(self, parameters: Sequence[Tensor]) -> GradientSum:
        return PrivateSum(self, parameters)

    def close(self) -> None:
        """Nothing is open."""

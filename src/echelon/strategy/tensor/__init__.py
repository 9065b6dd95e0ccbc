"""Every layer is computed by several members together, each with a part of its weights."""

from echelon.strategy.tensor.strategy import Tensor

__all__ = ["Tensor"]

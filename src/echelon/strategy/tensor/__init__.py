"""Tensor parallelism: the members of a team compute parts of the same layers together."""

from echelon.strategy.tensor.strategy import TensorParallel

__all__ = ["TensorParallel"]

"""Pipeline parallelism: every member has a few layers, and micro-batches go through them."""

from echelon.strategy.pipeline.strategy import Pipeline

__all__ = ["Pipeline"]

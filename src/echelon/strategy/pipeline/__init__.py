"""Every member has a few layers of the model, and the batch goes through them in pieces."""

from echelon.strategy.pipeline.strategy import Pipeline

__all__ = ["Pipeline"]

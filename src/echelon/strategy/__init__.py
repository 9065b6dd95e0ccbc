"""One file per way to synchronise."""

from echelon.strategy.registry import build, check, names

__all__ = ["build", "check", "names"]

"""One file per way to synchronise."""

from echelon.strategy.registry import arrangement, build, check, names

__all__ = ["arrangement", "build", "check", "names"]

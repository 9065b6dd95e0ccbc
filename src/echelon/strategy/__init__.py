"""One file per way to synchronise."""

from echelon.strategy.registry import arrangement, build, can_do_without, check, names

__all__ = ["arrangement", "build", "can_do_without", "check", "names"]

"""Synchronization strategies: one file or folder for each.

Start with `base.py` (what all strategies have in common) and `single.py` (the shortest one). The
registry finds a strategy by its name and checks that a job fits it.
"""

from echelon.strategy.registry import (
    arrangement,
    build,
    can_do_without,
    check,
    check_task,
    has_servers,
    names,
    remarks,
    sections,
)

__all__ = [
    "arrangement",
    "build",
    "can_do_without",
    "check",
    "check_task",
    "has_servers",
    "names",
    "remarks",
    "sections",
]

"""One file per way to synchronise."""

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

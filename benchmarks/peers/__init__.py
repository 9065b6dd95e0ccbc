"""One small file per side of the comparison; each trains the same work in its own manner.

A side is a module with one function, `train(work, clock) -> float`: it trains for as many steps
as the clock wants, tells the clock of every step, and returns the loss it ended on.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Protocol, cast

from .clock import Clock
from .work import Work

NEEDS = {
    "echelon": ("echelon",),
    "tight": (),
    "dataloader": (),
    "lightning": ("lightning",),
    "accelerate": ("accelerate",),
    "keras": ("keras", "tensorflow"),
}
"""Every side and the packages it needs."""


class Side(Protocol):
    """What a module of this package offers."""

    def train(self, work: Work, clock: Clock) -> float: ...


def installed(name: str) -> bool:
    return all(importlib.util.find_spec(package) is not None for package in NEEDS[name])


def load(name: str) -> Side:
    return cast(Side, importlib.import_module(f"{__name__}.{name}"))

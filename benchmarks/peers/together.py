"""The sides of the comparison in which several processes train one model.

Each gets a batch of the same size in all: sides that are told the size of one process's part are
told as much of it.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import replace

from .clock import Clock
from .work import Work

MEMBERS = 2


def echelon(work: Work, clock: Clock) -> float:
    from . import echelon_members as side

    return side.train(work, clock, MEMBERS)


def ddp(work: Work, clock: Clock) -> float:
    from . import ddp as side

    return side.train(work, clock)


def ddp_view(work: Work, clock: Clock) -> float:
    from . import ddp as side

    return side.train(work, clock, bucket_view=True)


def ddp_last(work: Work, clock: Clock) -> float:
    from . import ddp as side

    return side.train(work, clock, bucket_view=True, channels_last=True)


def lightning(work: Work, clock: Clock) -> float:
    from . import lightning as side

    return side.train(_part(work), clock, MEMBERS)


def accelerate(work: Work, clock: Clock) -> float:
    from . import accelerate as side

    return side.train(_part(work), clock)


def fabric(work: Work, clock: Clock) -> float:
    from . import fabric as side

    return side.train(_part(work), clock, MEMBERS)


SIDES: dict[str, Callable[[Work, Clock], float]] = {
    side.__name__: side
    for side in (echelon, ddp, ddp_view, ddp_last, lightning, accelerate, fabric)
}
STARTS_ITSELF = frozenset({"echelon"})
"""Sides that start their processes themselves; the others are started as torchrun does."""
_NEEDS = {"echelon": "echelon", "lightning": "lightning", "accelerate": "accelerate"} | {
    "fabric": "lightning"
}


def installed(side: str) -> bool:
    return side not in _NEEDS or importlib.util.find_spec(_NEEDS[side]) is not None


def _part(work: Work) -> Work:
    assert work.batch_size % MEMBERS == 0, work
    return replace(work, batch_size=work.batch_size // MEMBERS)

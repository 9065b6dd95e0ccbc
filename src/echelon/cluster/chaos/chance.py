"""Plans made by chance: the same seed makes the same plan."""

from __future__ import annotations

import random

from echelon.cluster.chaos.plan import Fault
from echelon.core.errors import UserError

_WEIGHTS = {
    "kill trainer": 30,
    "kill leader": 10,
    "kill coordinator": 12,
    "freeze trainer": 9,
    "freeze leader": 4,
    "freeze coordinator": 3,
    "partition trainer": 9,
    "slow trainer": 7,
    "join": 10,
    "fill disk": 4,
    "tear checkpoint": 4,
}
_SERVER = 20
"""How often a server is killed, beside the others, where there are any."""
_FEWEST = 2
"""Trainers that a plan leaves, so that one of them can be lost."""
_FIRST, _LAST = 0.02, 0.9
"""The part of a run in which faults happen: what is broken shall have the time to mend."""
_BEFORE = 0.15
"""How often the first fault comes before the first step."""
_TOGETHER = 0.2
"""How often a fault follows closely upon the one before it, so that it finds it unmended."""
_CLOSE = 0.6
_SECONDS = {"freeze": (0.5, 5.0), "partition": (1.0, 5.0), "slow": (2.0, 5.0), "fill": (1.0, 2.0)}


def random_plan(
    count: int, seed: int, *, workers: int, steps: int, servers: int = 0
) -> list[Fault]:
    """`count` faults over a run of so many steps; whom they hit is chosen when they happen, but
    which of `servers` that may be lost is now."""
    if count > steps:
        raise UserError(f"{count} faults are too many for a run of {steps} steps")
    chance = random.Random(f"chaos/{seed}")
    faults: list[Fault] = []
    trainers = workers
    for place in range(count):
        close = bool(faults) and chance.random() < _TOGETHER
        step, delay = _moment(chance, place, count, steps)
        if close:
            step, delay = faults[-1].step, faults[-1].delay + round(chance.uniform(0, _CLOSE), 2)
        kind = _kind(chance, trainers, workers, servers)
        trainers += (kind == "join") - (kind in ("kill trainer", "kill leader"))
        faults.append(_fault(chance, kind, step, round(delay, 2), servers))
    return sorted(faults, key=lambda fault: (fault.step, fault.delay))


def _moment(chance: random.Random, place: int, count: int, steps: int) -> tuple[int, float]:
    part, before = (place + chance.random()) / count, chance.random() < _BEFORE
    if place == 0 and before:
        return 0, 0.0
    return 1 + int(steps * (_FIRST + (_LAST - _FIRST) * part)), 0.0


def _kind(chance: random.Random, trainers: int, workers: int, servers: int) -> str:
    """Members are not to become too few, nor more than they were at first."""
    weights = dict(_WEIGHTS) | ({"kill server": _SERVER} if servers else {})
    if trainers <= _FEWEST:
        del weights["kill trainer"], weights["kill leader"]
    if trainers >= workers:
        del weights["join"]
    else:
        weights["join"] *= 1 + workers - trainers
    return chance.choices(list(weights), list(weights.values()))[0]


def _fault(chance: random.Random, kind: str, step: int, delay: float, servers: int) -> Fault:
    verb, _, target = kind.partition(" ")
    if target == "server":
        return Fault(verb, target, chance.randrange(servers), step, delay)
    if verb == "join":
        return Fault("join", step=step, delay=delay, count=1)
    low, high = _SECONDS.get(verb, (0.0, 0.0))
    seconds = round(chance.uniform(low, high), 1)
    factor = round(chance.uniform(2.0, 6.0), 1) if verb == "slow" else 1.0
    return Fault(verb, target, None, step, delay, seconds, factor)

"""Fault plans: which faults to inject and when, written as a line of text or made from a seed.

plan    fault; fault; …
fault   kill WHO@WHEN                      WHO   trainer:2 (the member with this id), trainer (any),
        freeze WHO@WHEN for 5s                   leader, coordinator, server:0 (to kill only)
        slow TRAINER@WHEN by 4x for 5s     WHEN  step=50, or step=50+0.2s: 0.2 s after that step
        partition TRAINER@WHEN for 5s
        join 2@WHEN                        TRAINER  trainer:2, trainer or leader
        fill disk@WHEN for 2s
        tear checkpoint@WHEN
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass

from echelon.core.errors import UserError, unknown

LONGEST = 600.0
"""Seconds that a fault may last."""
MOST = 64
"""Members that may join at once; also the largest factor to slow a member down by."""
_FULL_SECONDS = 2.0
"""How long the disk is full if the plan does not say."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault to inject."""

    verb: str
    target: str = ""
    member: int | None = None
    """Which trainer or server; None for any."""
    step: int = 0
    delay: float = 0.0
    """Seconds after that step."""
    seconds: float = 0.0
    factor: float = 1.0
    count: int = 0

    def __str__(self) -> str:
        return f"{self.what}@{self.when}{self._options}"

    @property
    def what(self) -> str:
        """The fault without its time and duration."""
        if self.verb == "join":
            return f"join {self.count}"
        number = "" if self.member is None else f":{self.member}"
        return f"{self.verb} {self.target}{number}"

    @property
    def when(self) -> str:
        return f"step={self.step}" + (f"+{self.delay:g}s" if self.delay else "")

    @property
    def _options(self) -> str:
        by = f" by {self.factor:g}x" if self.verb == "slow" else ""
        return by + (f" for {self.seconds:g}s" if self.seconds else "")


class PlanError(UserError):
    """A plan cannot be parsed. The message names the position."""

    def __init__(self, position: int, message: str) -> None:
        super().__init__(f"plan, character {position + 1}: {message}")


@dataclass(frozen=True, slots=True)
class Rule:
    """What may follow a verb."""

    targets: tuple[str, ...]
    options: tuple[str, ...] = ()
    """The required ones of `for` and `by`."""


PEOPLE = ("trainer", "leader")
RULES: dict[str, Rule] = {
    "kill": Rule((*PEOPLE, "coordinator", "server")),
    "freeze": Rule((*PEOPLE, "coordinator"), ("for",)),
    "slow": Rule(PEOPLE, ("by", "for")),
    "partition": Rule(PEOPLE, ("for",)),
    "join": Rule(()),
    "fill": Rule(("disk",)),
    "tear": Rule(("checkpoint",)),
}
_LASTING = ("freeze", "slow", "partition", "fill")


def read_plan(text: str) -> list[Fault]:
    """Parse a plan; return its faults in the order of their steps."""
    found = [_fault(start, part) for start, part in _parts(text)]
    if not found:
        raise PlanError(0, "it is empty; a fault is, for example, kill trainer:1@step=50")
    return sorted(found, key=lambda fault: (fault.step, fault.delay))


def _parts(text: str) -> Iterator[tuple[int, str]]:
    for match in re.finditer(r"[^;]+", text):
        if stripped := match[0].strip():
            yield match.start() + len(match[0]) - len(match[0].lstrip()), stripped


def _fault(start: int, text: str) -> Fault:
    deed, at, rest = text.partition("@")
    if not at:
        raise PlanError(start, f"{text!r} says not when: add, for example, @step=50")
    verb, _, who = deed.strip().partition(" ")
    if verb not in RULES:
        raise PlanError(start, unknown("fault", verb, RULES))
    when, _, options = rest.strip().partition(" ")
    behind = start + len(deed) + 1
    step, delay = _moment(behind, when)
    found = _options(behind + rest.index(when) + len(when), options, verb)
    if verb == "join":
        return Fault("join", step=step, delay=delay, count=_count(start, who.strip()))
    target, member = _target(start + deed.index(who) if who else start, who.strip(), verb)
    seconds, factor = found.get("seconds", 0.0), found.get("factor", 1.0)
    return Fault(verb, target, member, step, delay, seconds, factor)


def _moment(position: int, text: str) -> tuple[int, float]:
    match = re.fullmatch(r"step=(\d{1,15})(?:\+(\d+(?:\.\d+)?)s?)?", text)
    if match is None:
        raise PlanError(position, f"{text!r} is no moment: write step=50, or step=50+0.2s")
    delay = float(match[2] or 0)
    if delay > LONGEST:
        raise PlanError(position, f"{delay:g} s after a step: at most {LONGEST:g} s")
    return int(match[1]), delay


def _count(position: int, text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= MOST:
        raise PlanError(position, f"join {text!r}: how many is a number from 1 to {MOST}")
    return int(text)


def _target(position: int, text: str, verb: str) -> tuple[str, int | None]:
    targets = RULES[verb].targets
    name, colon, number = text.partition(":")
    if name not in targets:
        raise PlanError(position, unknown(f"{verb}: target", name, targets))
    if not colon:
        return name, None
    if name not in ("trainer", "server") or not number.isdecimal():
        raise PlanError(position, f"{text!r} is nobody: write trainer:2, or {_listed(targets)}")
    return name, int(number)


def _options(position: int, text: str, verb: str) -> dict[str, float]:
    """Parse `for 5s` and `by 4x` into `seconds` and `factor`."""
    words = text.split()
    pairs = dict(zip(words[::2], words[1::2], strict=False))
    known = ("for", "by") if verb == "slow" else ("for",) if verb in _LASTING else ()
    for word in words[::2]:
        if word not in known:
            allowed = f"after {verb} there is {_listed(known)}" if known else "nothing follows it"
            raise PlanError(position, f"{word!r} is not understood: {allowed}")
    for word in RULES[verb].options:
        if word not in pairs:
            sample = {"for": "for 5s", "by": "by 4x"}[word]
            raise PlanError(position, f"{verb} needs {word!r}: add, for example, {sample!r}")
    if len(words) % 2 or len(words) > 2 * len(pairs):
        raise PlanError(position, f"{text!r} is not understood: each option once, with its value")
    found: dict[str, float] = {}
    if verb in _LASTING:
        found["seconds"] = _number(position, pairs.get("for", f"{_FULL_SECONDS}s"), "s", LONGEST)
    if "by" in pairs:
        found["factor"] = _number(position, pairs["by"], "x", MOST, above=1.0)
    return found


def _number(position: int, text: str, unit: str, most: float, above: float = 0.0) -> float:
    match = re.fullmatch(rf"(\d+(?:\.\d+)?){unit}?", text)
    if match is None or not above < float(match[1]) <= most:
        rule = f"a number above {above:g}, at most {most:g}, such as 4{unit}"
        raise PlanError(position, f"{text!r} must be {rule}")
    return float(match[1])


def _listed(names: tuple[str, ...]) -> str:
    return " or ".join(names)


# Random plans.


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
"""The relative frequencies of kinds of faults."""
_SERVER = 20
"""The frequency of "kill server", if the run has servers that it can lose."""
_FEWEST = 2
"""Trainers that a plan leaves, so that one of them can be lost by accident."""
_FIRST, _LAST = 0.02, 0.9
"""The part of a run in which faults are injected; the rest is time to recover."""
_BEFORE = 0.15
"""The probability that the first fault comes before the first step."""
_TOGETHER = 0.2
"""The probability that a fault follows the previous one before the run has recovered from it."""
_CLOSE = 0.6
"""The most seconds between two such faults."""
_SECONDS = {"freeze": (0.5, 5.0), "partition": (1.0, 5.0), "slow": (2.0, 5.0), "fill": (1.0, 2.0)}
"""The shortest and the longest duration."""


def random_plan(
    count: int, seed: int, *, workers: int, steps: int, servers: int = 0
) -> list[Fault]:
    """Return `count` random faults for a run of `steps` steps. The same seed gives the same plan.

    Which trainer is hit is chosen when the fault is injected; which of `servers` (those that the
    run can lose) is chosen here.
    """
    if count > steps:
        raise UserError(f"{count} faults are too many for a run of {steps} steps")
    chance = random.Random(f"chaos/{seed}")
    faults: list[Fault] = []
    trainers = workers
    for place in range(count):
        close = bool(faults) and chance.random() < _TOGETHER
        step, delay = _random_moment(chance, place, count, steps)
        if close:
            step, delay = faults[-1].step, faults[-1].delay + round(chance.uniform(0, _CLOSE), 2)
        kind = _kind(chance, trainers, workers, servers)
        trainers += (kind == "join") - (kind in ("kill trainer", "kill leader"))
        faults.append(_random_fault(chance, kind, step, round(delay, 2), servers))
    return sorted(faults, key=lambda fault: (fault.step, fault.delay))


def _random_moment(chance: random.Random, place: int, count: int, steps: int) -> tuple[int, float]:
    part, before = (place + chance.random()) / count, chance.random() < _BEFORE
    if place == 0 and before:
        return 0, 0.0
    return 1 + int(steps * (_FIRST + (_LAST - _FIRST) * part)), 0.0


def _kind(chance: random.Random, trainers: int, workers: int, servers: int) -> str:
    """Return a random kind that keeps the number of trainers between `_FEWEST` and `workers`."""
    weights = dict(_WEIGHTS) | ({"kill server": _SERVER} if servers else {})
    if trainers <= _FEWEST:
        del weights["kill trainer"], weights["kill leader"]
    if trainers >= workers:
        del weights["join"]
    else:
        weights["join"] *= 1 + workers - trainers
    return chance.choices(list(weights), list(weights.values()))[0]


def _random_fault(chance: random.Random, kind: str, step: int, delay: float, servers: int) -> Fault:
    verb, _, target = kind.partition(" ")
    if target == "server":
        return Fault(verb, target, chance.randrange(servers), step, delay)
    if verb == "join":
        return Fault("join", step=step, delay=delay, count=1)
    low, high = _SECONDS.get(verb, (0.0, 0.0))
    seconds = round(chance.uniform(low, high), 1)
    factor = round(chance.uniform(2.0, 6.0), 1) if verb == "slow" else 1.0
    return Fault(verb, target, None, step, delay, seconds, factor)

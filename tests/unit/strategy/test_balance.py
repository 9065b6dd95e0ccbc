"""Which member asks for a new division of batches, when, and which shares the members get."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echelon.comm.collectives import Solo
from echelon.strategy.balance import LEAST, OLD, SLOWER, Pace, shares


class Clock:
    """Time that passes only when told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        told = SimpleNamespace(perf_counter=lambda: self.now)
        monkeypatch.setattr("echelon.strategy.balance.time", told)


class Members:
    """Members of given speeds (samples per second) that share batches of 64."""

    def __init__(self, clock: Clock, *speeds: float) -> None:
        self.speeds, self._clock = list(speeds), clock
        self.paces = [Pace() for _ in speeds]
        self.parts = [1 / len(speeds)] * len(speeds)

    def update(self) -> bool:
        """One update; returns whether anybody asks for another division."""
        mean = sum(member.last for member in self.paces) / len(self.paces)
        for member, part, speed in zip(self.paces, self.parts, self.speeds, strict=True):
            member.begin()
            self._clock.now += 64 * part / speed
            member.end(64 * part)
        asked = [member.compare(mean) for member in self.paces]
        return any(asked)

    def divide(self) -> None:
        speeds = [member.speed for member in self.paces]
        self.parts = shares(Known(0, speeds), speeds[0])
        for member in self.paces:
            member.divided()

    def until_asked(self, most: int) -> int:
        return next(number for number in range(1, most) if self.update())


class Known(Solo):
    """A collective of members whose values are known."""

    def __init__(self, index: int, values: Sequence[float]) -> None:
        self.index, self.count, self._values, self._at = index, len(values), values, 0

    def sum(self, values: Sequence[float]) -> list[float]:
        known = list(self._values[self._at : self._at + len(values)])
        mine = self.index - self._at
        if 0 <= mine < len(values):
            assert values[mine] == known[mine]
        assert sum(value != 0 for value in values) <= 1, "only its own"
        self._at += len(values)
        return known


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_a_slow_member_is_found_in_a_few_updates_and_costs_its_part(clock: Clock) -> None:
    members = Members(clock, 400, 400, 400, 100)
    assert members.until_asked(50) <= 6
    members.divide()
    assert members.parts == pytest.approx([4 / 13] * 3 + [1 / 13])
    assert not any(members.update() for _ in range(200)), "all take equally long now"


def test_members_of_about_one_speed_are_left_alone(clock: Clock) -> None:
    members = Members(clock, 100, 104, 96, 110)
    assert not any(members.update() for _ in range(200))


def test_quick_updates_are_left_alone_whatever_their_parts(clock: Clock) -> None:
    members = Members(clock, 1e6, 1e5)
    assert not any(members.update() for _ in range(5000))


def test_one_that_recovers_gets_its_part_back(clock: Clock) -> None:
    members = Members(clock, 400, 400, 400, 100)
    members.until_asked(50)
    members.divide()
    for _ in range(20):
        members.update()
    members.speeds[3] = 400
    updates = members.until_asked(500)
    assert updates < 100 + OLD * 20
    members.divide()
    assert members.parts == pytest.approx([0.25] * 4, rel=SLOWER)


def test_a_division_that_does_not_help_is_repeated_less_and_less_often(clock: Clock) -> None:
    members = Members(clock, 400, 100)
    waits = []
    for _ in range(6):
        waits.append(members.until_asked(5000))
        for member in members.paces:  # the parts stay as they are, as if they did not matter
            member.divided()
    assert waits == sorted(waits)
    assert waits[-1] >= 3 * waits[0]


def test_other_members_are_another_beginning(clock: Clock) -> None:
    members = Members(clock, 400, 100)
    first = members.until_asked(50)
    for _ in range(4):
        members.divide()
        members.parts = [0.5, 0.5]
        members.until_asked(5000)
    for member in members.paces:
        member.begin_anew()
    assert members.until_asked(50) <= first


def test_nobody_gets_so_little_that_it_cannot_be_seen_to_recover() -> None:
    speeds = [1000.0, 1000.0, 1.0, 1000.0]
    found = shares(Known(2, speeds), 1.0)
    assert found[2] == pytest.approx(LEAST / 4, rel=0.03)
    assert sum(found) == pytest.approx(1)


def test_members_without_a_measurement_share_equally() -> None:
    assert shares(Known(1, [0.0] * 3), 0.0) == [1 / 3] * 3


@given(st.lists(st.floats(0.001, 1e9), min_size=1, max_size=150))
def test_all_members_find_the_same_parts(speeds: list[float]) -> None:
    found = [shares(Known(at, speeds), speed) for at, speed in enumerate(speeds)]
    assert all(parts == found[0] for parts in found)
    assert sum(found[0]) == pytest.approx(1)
    assert min(found[0]) > 0
    order = sorted(range(len(speeds)), key=speeds.__getitem__)
    assert [found[0][at] for at in order] == sorted(found[0]), "the faster the more"

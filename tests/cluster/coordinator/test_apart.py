"""Trainers that work apart: leases from the coordinator, records of what servers applied."""

from __future__ import annotations

import pytest

from echelon.cluster.coordinator.protocol import BadFrame, check
from echelon.core.types import Lease
from echelon.data.ledger import Ledger

from .scene import Scene

SAMPLES = 1000


def ledger(*ranges: tuple[int, int]) -> dict[str, object]:
    found = Ledger(SAMPLES)
    for version, pair in enumerate(ranges, 1):
        found.take_in(Lease(0, *pair), version)
    return found.state_dict()


def test_a_ledger_says_what_is_consumed_and_nobody_holds_anything_then() -> None:
    scene = Scene()
    zero, one = scene.together(2)
    scene.say(one, "lease", epoch=0, wanted=200)
    scene.say(zero, "ledger", version=2, ledger=ledger((0, 100), (150, 1000)))
    for _ in range(2):
        assert scene.desk.leases.left(0) == 50
        assert not list(scene.desk.leases.owners())
        scene.restart()
    scene.say(zero, "ledger", version=3, ledger=ledger((0, SAMPLES)))
    assert scene.desk.leases.left(0) == 0


def test_leases_are_multiples_of_a_unit_and_what_is_used_makes_room_for_more() -> None:
    scene = Scene()
    zero, _ = scene.together(2)
    scene.say(zero, "lease", epoch=0, wanted=100, unit=30, seq=1)
    assert scene.told(zero, "leased")[-1]["ranges"] == [[0, 120]]
    scene.say(zero, "lease", epoch=0, wanted=100, unit=30, used=[[0, 60]], seq=2)
    assert scene.told(zero, "leased")[-1]["ranges"] == [[60, 180]]
    assert scene.desk.leases.left(0) == SAMPLES - 60


def test_an_update_of_several_members_is_on_record_with_all_its_ranges_and_once() -> None:
    scene = Scene()
    zero, one = scene.together(2)
    scene.say(one, "lease", epoch=0, wanted=100)
    records = [[0, 0, 10, 1, 1, 0], [0, 50, 60, 1, 1, 1], [0, 10, 20, 2, 2, 0]]
    scene.say(zero, "commits", generation=1, records=records[:1])
    scene.say(zero, "commits", generation=1, records=records)
    scene.say(zero, "commits", generation=1, records=records)
    written = scene.written("committed")
    expected = [(0, 1, 0), (50, 1, 1), (10, 2, 0)]
    assert [(w["start"], w["first"], w["member"]) for w in written] == expected
    assert scene.desk.versions.recorded == 2
    assert scene.desk.leases.left(0) == SAMPLES - 30, "whoever held it"
    scene.restart()
    assert scene.desk.versions.recorded == 2
    assert scene.desk.leases.left(0) == SAMPLES - 30
    one = scene.hello(11, member=1, generation=1)
    scene.say(one, "commits", generation=1, records=records)
    assert len(scene.written("committed")) == 3


def test_what_one_member_made_alone_is_one_update_a_record() -> None:
    scene = Scene()
    zero, _ = scene.together(2)
    with pytest.raises(BadFrame, match="one member alone made updates 1 to 2 in one record"):
        scene.say(zero, "commits", generation=1, records=[[0, 0, 20, 1, 2, 0]])
    with pytest.raises(BadFrame, match="a ledger of 7 samples"):
        scene.say(zero, "ledger", version=0, ledger={"samples": 7, "whole": [], "parts": []})


@pytest.mark.parametrize(
    "state",
    [
        None,
        {"samples": 0, "whole": [], "parts": []},
        {"samples": 9, "whole": [[0, 1, "2"]], "parts": []},
        {"samples": 9, "whole": [], "parts": [{"epoch": 0, "done": [[5, 5]]}]},
        {"samples": 9, "whole": [], "parts": [{"epoch": -1, "done": [[0, 5]]}]},
    ],
)
def test_a_ledger_that_is_none_is_refused(state: object) -> None:
    with pytest.raises(BadFrame, match="a ledger's state"):
        check({"kind": "ledger", "version": 1, "ledger": state})

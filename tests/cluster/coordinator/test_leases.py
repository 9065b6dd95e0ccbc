"""Leases: each range is held by one trainer, returns if that trainer is lost, and is done once."""

from __future__ import annotations

import pytest

from echelon.cluster.coordinator.membership import Member
from echelon.cluster.coordinator.protocol import BadFrame, Message, check
from echelon.core.types import Lease
from echelon.data.ledger import Ledger
from tests.cluster.coordinator.scene import Scene

SAMPLES = 1000


def lease(scene: Scene, member: Member, wanted: int, epoch: int = 0) -> Message:
    scene.say(member, "lease", epoch=epoch, wanted=wanted)
    return scene.told(member, "leased")[-1]


def commit(scene: Scene, member: Member, start: int, stop: int) -> None:
    """All ranges are parts of one update, each made by one member alone."""
    records = [[0, start, stop, 1, 1, member.id]]
    scene.say(member, "commits", generation=member.generation, records=records)


def ledger(*ranges: tuple[int, int]) -> dict[str, object]:
    found = Ledger(SAMPLES)
    for version, pair in enumerate(ranges, 1):
        found.take_in(Lease(0, *pair), version)
    return found.state_dict()


def test_asking_again_hands_out_nothing_twice() -> None:
    scene = Scene()
    zero, one = scene.together(2)
    assert lease(scene, zero, 100)["ranges"] == [[0, 100]]
    assert lease(scene, zero, 100)["ranges"] == [[0, 100]]
    assert lease(scene, one, 50)["ranges"] == [[100, 150]]
    commit(scene, zero, 0, 60)
    answer = lease(scene, zero, 100)
    assert answer["ranges"] == [[60, 100], [150, 210]]
    assert answer["left"] == 940


def test_the_faster_get_more_and_the_end_of_an_epoch_is_divided_finely() -> None:
    scene = Scene(samples=100_000)
    fast, slow = scene.hello(10, 0), scene.hello(11, 1)
    scene.beat(fast, pace=0.001)
    scene.beat(slow, pace=0.004)
    scene.tick(0.6, beating=())
    sizes = [lease(scene, member, 1000)["ranges"][0] for member in (fast, slow)]
    assert [stop - start for start, stop in sizes] == [1600, 400]
    scene = Scene(expected=4, samples=100)
    members = scene.together(4)
    scene.tick(0.6)
    assert lease(scene, members[0], 64)["ranges"] == [[0, 25]], "a quarter, not 64"
    for member in members[1:]:
        lease(scene, member, 64)
    left = 100 - sum(held.size for _, held in scene.desk.leases.owners())
    assert left > 25
    for _ in range(20):
        for member in members:
            for start, stop in lease(scene, member, 64)["ranges"]:
                commit(scene, member, start, stop)
    assert lease(scene, members[0], 64) | {"kind": ""} == {
        "kind": "",
        "epoch": 0,
        "ranges": [],
        "left": 0,
        "seq": None,
    }
    assert min(e["stop"] - e["start"] for e in scene.written("leased")[:-1]) >= 4


def test_what_a_lost_trainer_held_is_handed_out_first() -> None:
    scene = Scene()
    zero, one = scene.together(2)
    lease(scene, zero, 100)
    commit(scene, zero, 0, 30)
    scene.desk.died(scene.now, zero)
    assert lease(scene, one, 100)["ranges"] == [[30, 130]]


def test_a_whole_epoch_is_remembered_as_such() -> None:
    scene = Scene(expected=1, samples=64)
    (zero,) = scene.together(1)
    lease(scene, zero, 64)
    commit(scene, zero, 0, 64)
    commit(scene, zero, 0, 64)
    assert lease(scene, zero, 64)["left"] == 0
    assert lease(scene, zero, 64, epoch=1)["ranges"] == [[0, 64]]
    assert len(scene.written("committed")) == 1


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

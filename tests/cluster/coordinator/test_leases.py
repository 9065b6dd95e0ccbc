"""Leases: each range is held by one trainer, returns if that trainer is lost, and is done once."""

from __future__ import annotations

from echelon.cluster.coordinator.membership import Member
from echelon.cluster.coordinator.protocol import Message
from tests.cluster.coordinator.scene import Scene


def lease(scene: Scene, member: Member, wanted: int, epoch: int = 0) -> Message:
    scene.say(member, "lease", epoch=epoch, wanted=wanted)
    return scene.told(member, "leased")[-1]


def commit(scene: Scene, member: Member, start: int, stop: int) -> None:
    """All ranges are parts of one update, each made by one member alone."""
    records = [[0, start, stop, 1, 1, member.id]]
    scene.say(member, "commits", generation=member.generation, records=records)


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

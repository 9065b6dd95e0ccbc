"""A stall is reported with the member that holds up the others."""

from __future__ import annotations

from echelon.cluster.coordinator.membership import Member
from tests.cluster.coordinator.scene import Scene


def train(scene: Scene, members: list[Member], updates: int) -> None:
    """One update every half a second."""
    for _ in range(updates):
        scene.tick(0.5, beating=tuple(members))
        version = scene.desk.versions.recorded + 1
        scene.commit(members[0], (0, version, version + 1, version, version))


def notices(scene: Scene, member: Member) -> list[str]:
    return [message["text"] for message in scene.told(member, "notice")]


def test_the_one_behind_is_named_with_its_last_sign_of_life_at_doubling_intervals() -> None:
    scene = Scene(expected=3)
    members = scene.together(3)
    train(scene, members, 10)
    for member, step, doing in zip(members, (12, 12, 11), ("updating",) * 3, strict=True):
        scene.beat(member, step, doing)
    scene.tick(1.9, beating=tuple(members))
    assert notices(scene, members[0]) == []
    scene.tick(0.3, beating=tuple(members))
    assert notices(scene, members[0]) == [
        "waiting for member 2 (pid 12 on here): at step 11 (updating), last sign of life 0.0 s "
        "ago, awaited for 2.0 s"
    ]
    scene.tick(2.2, beating=tuple(members))
    assert len(notices(scene, members[0])) == 2
    scene.tick(3, beating=tuple(members))
    assert len(notices(scene, members[0])) == 2
    train(scene, members, 1)
    assert notices(scene, members[0])[-1].startswith("member 2 came after ")
    assert [entry["member"] for entry in scene.written("stalled")] == [2, 2, 2]
    assert not notices(scene, members[1])


def test_one_that_is_lost_is_not_said_to_have_come() -> None:
    scene = Scene(expected=3)
    members = scene.together(3)
    train(scene, members, 10)
    for member, step in zip(members, (12, 12, 11), strict=True):
        scene.beat(member, step, "updating")
    scene.tick(2.2, beating=tuple(members))
    scene.desk.died(scene.now, members[2])
    for member in members[:2]:
        scene.arrive(member, 1)
    train(scene, members[:2], 1)
    assert len(notices(scene, members[0])) == 1


def test_at_the_same_step_it_is_the_one_that_has_not_moved_on() -> None:
    scene = Scene(expected=3)
    members = scene.together(3)
    for member in members:
        scene.beat(member, 1, "computing", pace=0.001)
    train(scene, members, 10)
    scene.beat(members[0], 1, "updating", pace=0.001)
    scene.beat(members[2], 1, "updating", pace=0.001)
    for _ in range(25):
        scene.now += 0.1
        for member in members:
            scene.beat(member, member.step, member.doing, pace=0.004 if member.id == 1 else 0.001)
        scene.tick()
    (text,) = notices(scene, members[0])
    assert text.startswith("waiting for member 1 ")
    assert text.endswith("; it is 4.0 times slower than the others")


def test_an_evaluation_of_all_is_no_stall_but_one_that_never_ends_is_told() -> None:
    scene = Scene()
    members = scene.together(2)
    train(scene, members, 10)
    for member in members:
        scene.beat(member, 11, "evaluating")
    scene.tick(9, beating=tuple(members))
    assert notices(scene, members[0]) == []
    scene.tick(2, beating=tuple(members))
    assert notices(scene, members[0]) == [
        "no update for 10.0 s: all 2 members are at step 11 (evaluating)"
    ]


def test_before_the_first_update_nobody_knows_how_long_one_takes() -> None:
    scene = Scene()
    members = scene.together(2)
    scene.beat(members[0], 1, "updating")
    scene.tick(9, beating=tuple(members))
    assert notices(scene, members[0]) == []
    scene.tick(2, beating=tuple(members))
    (text,) = notices(scene, members[0])
    assert text.startswith("waiting for member 1 (pid 11 on here): before its first step, ")

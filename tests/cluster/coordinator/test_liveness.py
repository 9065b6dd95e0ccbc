"""Which members are given up, after how long, and which are not."""

from __future__ import annotations

from echelon.cluster.coordinator.membership import Sight
from tests.cluster.coordinator.scene import THERE, Scene


def lost(scene: Scene) -> list[tuple[int, str]]:
    return [(entry["member"], entry["how"]) for entry in scene.written("lost")]


def test_one_that_is_stopped_is_given_up_after_a_second_and_a_half() -> None:
    scene = Scene()
    zero, _ = scene.together(2)
    scene.sights[11] = Sight("T", 5)
    scene.tick(1.4, beating=(zero,))
    assert lost(scene) == []
    scene.tick(0.3, beating=(zero,))
    assert lost(scene) == [(1, "frozen")]
    assert 1.5 <= scene.written("lost")[0]["quiet"] <= 1.8


def test_one_that_waits_without_a_beat_is_given_up_and_one_that_computes_is_not() -> None:
    scene = Scene(expected=4)  # of which one is still to come, so that nobody has to leave
    zero, one, two = (scene.hello(10 + number, number) for number in range(3))
    scene.tick(3, beating=(zero, one, two))
    for tenth in range(290):
        scene.sights[12] = Sight("R" if tenth % 2 else "S", tenth)
        scene.now += 0.1
        scene.beat(zero)
        scene.tick()
        if tenth == 25:
            assert lost(scene) == [(one.id, "silent")]
    assert lost(scene) == [(one.id, "silent")]
    scene.sights[12] = Sight("R", 1000)
    scene.tick(3, beating=(zero,))
    assert lost(scene) == [(one.id, "silent"), (two.id, "silent")], "30 s is enough"


def test_one_of_another_host_is_given_up_when_its_beats_stay_out() -> None:
    scene = Scene(expected=1)
    (zero,) = scene.together(1)
    far = scene.hello(50, host=THERE)
    scene.tick(5.5, beating=(zero,))
    assert lost(scene) == [], "one that has just begun may have its hands full"
    scene.tick(3, beating=(zero, far))
    scene.tick(1.4, beating=(zero,))
    assert lost(scene) == []
    scene.tick(0.3, beating=(zero,))
    assert lost(scene) == [(far.id, "silent")]


def test_one_of_this_host_that_has_just_begun_has_time_unless_it_is_stopped() -> None:
    scene = Scene(expected=4)
    zero, one, two = (scene.hello(10 + number, number) for number in range(3))
    scene.sights[12] = Sight("T", 5)
    scene.tick(5.5, beating=(zero,))
    assert lost(scene) == [(two.id, "frozen")]
    scene.tick(1, beating=(zero,))
    assert lost(scene) == [(two.id, "frozen"), (one.id, "silent")]


def test_who_beats_seldom_gets_more_time() -> None:
    scene = Scene(expected=1)
    (zero,) = scene.together(1)
    far = scene.hello(50, host=THERE)
    for _ in range(30):
        scene.tick(1.0, beating=(zero,))
        scene.beat(far)
    scene.tick(5, beating=(zero,))
    assert lost(scene) == []
    scene.tick(2, beating=(zero,))
    assert lost(scene) == [(far.id, "silent")]


def test_a_broken_connection_has_two_seconds_unless_the_process_is_gone() -> None:
    scene = Scene(expected=4)  # of which one is still to come, so that nobody has to leave
    zero, one, two = (scene.hello(10 + number, number) for number in range(3))
    scene.sights[11] = None
    scene.desk.disconnected(scene.now, one)
    scene.collect()
    assert lost(scene) == [(1, "killed")]
    scene.desk.disconnected(scene.now, two)
    scene.tick(1.9, beating=(zero,))
    assert len(lost(scene)) == 1
    scene.hello(12, member=2)
    scene.tick(1.0, beating=(zero, two))
    assert len(lost(scene)) == 1, "it is back"
    scene.desk.disconnected(scene.now, two)
    scene.tick(2.2, beating=(zero,))
    assert lost(scene) == [(1, "killed"), (2, "silent")]
    assert "was not back in 2 s" in scene.written("lost")[1]["why"]


def test_the_death_of_one_whose_connection_is_broken_is_noticed_without_waiting() -> None:
    scene = Scene()
    zero, one = scene.together(2)
    scene.desk.disconnected(scene.now, one)
    scene.sights[11] = None
    scene.tick(0.9, beating=(zero,))
    assert lost(scene) == [(1, "killed")]


def test_a_supervisor_tells_how_a_process_ended() -> None:
    scene = Scene(expected=4)
    zero, *_ = scene.together(4)
    for pid, status in ((11, -9), (12, 3), (13, -200)):
        scene.desk.gone(scene.now, pid, status)
    scene.collect()
    assert [entry["why"] for entry in scene.written("lost")] == [
        "its process was killed by signal 9 (SIGKILL)",
        "its process ended with exit code 3",
        "its process was killed by signal 200",
    ]
    assert [entry["how"] for entry in scene.written("lost")] == ["killed", "error", "killed"]
    assert scene.desk.roster.get(zero.id) is zero


def test_a_suspect_is_looked_at_at_once_and_blame_alone_is_not_enough() -> None:
    scene = Scene(expected=3)
    zero, one, two = scene.together(3)
    scene.arrive(zero, 1, suspect=two.id)
    assert lost(scene) == []
    scene.sights[12] = Sight("T", 5)
    scene.arrive(one, 1, suspect=two.id)
    assert lost(scene) == [(2, "frozen")]
    assert scene.desk.generations.current.order == [0, 1]


def test_nobody_is_blamed_for_the_time_the_coordinator_itself_did_not_run() -> None:
    scene = Scene(expected=1)
    (zero,) = scene.together(1)
    far = scene.hello(50, host=THERE)
    scene.tick(3, beating=(zero, far))
    scene.tick(0.5)
    scene.now += 60
    scene.tick()
    assert lost(scene) == []
    scene.tick(2)
    assert len(lost(scene)) == 2


def test_one_that_is_given_up_and_lives_may_return_for_a_while() -> None:
    scene = Scene()
    zero, one = scene.together(2)
    scene.sights[zero.pid] = scene.sights[one.pid] = Sight("T", 0)
    scene.tick(3.0)
    assert [entry["how"] for entry in scene.written("lost")] == ["frozen", "frozen"]
    assert scene.desk.may_return(scene.now)
    assert not scene.desk.may_return(scene.now + 60)
    scene.restart()
    assert scene.desk.may_return(scene.now)
    del scene.sights[zero.pid]
    assert scene.desk.may_return(scene.now), "the other one"
    del scene.sights[one.pid]
    assert not scene.desk.may_return(scene.now)


def test_one_that_was_killed_does_not_return() -> None:
    scene = Scene(expected=1)
    (zero,) = scene.together(1)
    scene.desk.died(scene.now, zero)
    assert not scene.desk.may_return(scene.now)

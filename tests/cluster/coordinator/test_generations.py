"""Which members form a generation, and when: second by second, without a socket."""

from __future__ import annotations

import pytest

from echelon.cluster.coordinator.coordinator import Refusal
from echelon.cluster.coordinator.generations import Phase
from echelon.cluster.coordinator.protocol import BadFrame
from tests.cluster.coordinator.scene import STORE, THERE, Scene


def test_the_first_generation_waits_for_all_who_were_started_and_orders_them_by_number() -> None:
    scene = Scene(expected=3)
    two, zero = scene.hello(12, 2), scene.hello(10, 0)
    scene.arrive(two, 0)
    scene.arrive(zero, 0)
    assert scene.desk.generations.number == 0
    one = scene.hello(11, 1)
    scene.tick(20, beating=(zero, one, two))
    assert scene.desk.generations.number == 0, "one has said hello and is still at its preparations"
    scene.arrive(one, 0)
    assert [member.id for member in (zero, one, two)] == [0, 1, 2]
    for index, member in enumerate((zero, one, two)):
        (told,) = scene.told(member, "generation")
        assert (told["number"], told["index"]) == (1, index)
        assert [fellow["id"] for fellow in told["members"]] == [0, 1, 2]
        assert (told["store"], told["source"], told["behind"]) == (list(STORE), None, [])
    assert scene.written("generation")[0]["members"] == [0, 1, 2]


def test_whoever_ends_before_its_hello_is_not_waited_for() -> None:
    scene = Scene(expected=2)
    zero = scene.hello(10, 0)
    scene.arrive(zero, 0)
    scene.desk.gone(scene.now, 11, -9)
    scene.desk.gone(scene.now, 11, -9)
    scene.collect()
    assert [m["id"] for m in scene.told(zero, "generation")[0]["members"]] == [0]


def test_whoever_never_says_hello_is_waited_for_a_minute() -> None:
    scene = Scene(expected=2)
    zero = scene.hello(10, 0)
    scene.arrive(zero, 0)
    scene.tick(59, beating=(zero,))
    assert scene.desk.generations.number == 0
    assert "those that start" in scene.told(zero, "waiting")[0]["why"]
    scene.tick(2, beating=(zero,))
    assert scene.desk.generations.number == 1


def test_after_a_death_survivors_keep_their_order_and_are_ordered_urgently() -> None:
    scene = Scene(expected=3)
    zero, one, two = scene.together(3)
    scene.desk.died(scene.now, zero)
    scene.collect()
    for member in (one, two):
        (order,) = scene.told(member, "regroup")
        assert order["urgent"] is True
        assert order["generation"] == 2
        assert "member 0 (pid 10 on here) is lost" in order["why"]
    scene.arrive(two, 5)
    assert scene.desk.generations.number == 1
    scene.arrive(one, 5)
    told = scene.told(one, "generation")[-1]
    assert [m["id"] for m in told["members"]] == [1, 2]
    (lost,) = scene.written("lost")
    assert (lost["member"], lost["how"]) == (0, "killed")


def test_a_newcomer_asks_for_a_regroup_that_can_wait_and_is_healed_by_the_most_advanced() -> None:
    scene = Scene()
    zero, one = scene.together(2)
    new = scene.hello(20)
    assert new.id == 2
    assert not scene.told(zero, "regroup"), "it prepares itself alone"
    scene.arrive(new, why="")
    assert [scene.told(m, "regroup")[0]["urgent"] for m in (zero, one)] == [False, False]
    assert scene.told(zero, "regroup")[0]["why"].endswith(": it is here to take part")
    scene.arrive(zero, 1, 4)
    scene.arrive(one, 1, 5)
    told = scene.told(new, "generation")[-1]
    assert (told["index"], told["source"], told["behind"]) == (2, 1, [0, 2])


def test_a_regroup_that_could_wait_becomes_urgent_when_someone_dies() -> None:
    scene = Scene(expected=3)
    zero, one, two = scene.together(3)
    scene.arrive(scene.hello(20))
    scene.desk.died(scene.now, two)
    scene.collect()
    assert [order["urgent"] for order in scene.told(zero, "regroup")] == [False, True]
    scene.desk.died(scene.now, one)
    scene.collect()
    assert len(scene.told(zero, "regroup")) == 2, "it knows"


def test_the_lowest_index_of_the_most_advanced_is_the_source() -> None:
    scene = Scene(expected=3)
    zero, one, two = scene.together(3)
    for member, made in ((zero, 3), (one, 4), (two, 4)):
        scene.arrive(member, made)
    told = scene.told(zero, "generation")[-1]
    assert (told["source"], told["behind"]) == (1, [0])


def test_who_does_not_leave_in_time_is_given_up() -> None:
    scene = Scene(expected=3)
    zero, one, two = scene.together(3)
    scene.arrive(zero, 1)
    scene.arrive(one, 1)
    scene.tick(4.8, beating=(zero, one, two))
    assert scene.desk.generations.number == 1
    assert "member 2" in scene.told(zero, "waiting")[-1]["why"]
    scene.tick(0.5, beating=(zero, one, two))
    assert [m["id"] for m in scene.told(zero, "generation")[-1]["members"]] == [0, 1]
    assert "did not leave generation 1 in time" in scene.told(two, "expelled")[0]["why"]
    with pytest.raises(Refusal, match="in time") as refusal:
        scene.hello(12, member=two.id, generation=1)
    assert refusal.value.kind == "expelled"
    back = scene.hello(12)
    assert back.id == 3, "an id is never given twice"


def test_one_that_computes_gets_more_time_and_long_steps_give_all_of_them_more() -> None:
    scene = Scene()
    zero, one = scene.together(2)
    scene.arrive(zero, 1)
    for second in range(20):
        scene.now += 1
        scene.beat(zero, 1)
        scene.beat(one, 1, "computing", cpu=float(second))
        scene.tick()
    assert scene.desk.generations.number == 1
    scene.arrive(one, 1)
    assert scene.desk.generations.number == 2

    slow = Scene()
    zero, one = slow.together(2)
    slow.beat(one, 1)
    slow.tick(5, beating=(zero, one))
    slow.beat(one, 2)
    slow.arrive(zero, 1)
    slow.tick(19, beating=(zero, one))
    assert slow.desk.generations.number == 1
    slow.tick(2, beating=(zero, one))
    assert slow.desk.generations.number == 2


def test_an_order_that_can_wait_runs_from_the_first_who_follows_it() -> None:
    scene = Scene()
    zero, one = scene.together(2)
    new = scene.hello(20)
    scene.arrive(new)
    everybody = (zero, one, new)
    scene.tick(40, beating=everybody)
    assert len(scene.desk.roster) == 3, "they evaluate, and are not to be disturbed"
    scene.arrive(zero, 1)
    scene.tick(5.5, beating=everybody)
    assert scene.desk.roster.get(one.id) is None
    assert scene.desk.generations.current.order == [zero.id, new.id]


def test_too_few_wait_for_more_and_give_up_when_nobody_comes() -> None:
    scene = Scene(min_workers=2)
    zero, one = scene.together(2)
    scene.desk.died(scene.now, one)
    scene.arrive(zero, 3)
    assert scene.desk.generations.number == 1
    assert "1 of at least 2 members" in scene.told(zero, "waiting")[-1]["why"]
    scene.tick(29, beating=(zero,))
    new = scene.hello(20)
    scene.arrive(new)
    assert scene.desk.generations.current.order == [zero.id, new.id]

    scene.desk.died(scene.now, new)
    scene.arrive(zero, 4)
    scene.tick(31, beating=(zero,))
    assert "1 of at least 2" in scene.told(zero, "end")[0]["why"]
    assert scene.written("finished")[0]["status"] == "failed"
    with pytest.raises(Refusal, match="1 of at least 2"):
        scene.hello(30)


def test_generations_without_an_update_are_not_formed_for_ever() -> None:
    scene = Scene()
    zero, one = scene.together(2)
    for _ in range(9):
        scene.arrive(zero, 0)
        scene.arrive(one, 0)
    assert scene.desk.generations.number == 10
    scene.commit(zero, (0, 0, 10, 1, 1))
    for _ in range(10):
        scene.arrive(zero, 0)
        scene.arrive(one, 0)
    assert scene.desk.generations.number == 20
    scene.arrive(zero, 0)
    scene.arrive(one, 0)
    assert scene.desk.generations.phase is Phase.ENDED
    assert "10 generations in a row brought no update" in scene.told(one, "end")[0]["why"]


def test_one_that_leaves_alone_is_missed_and_all_who_leave_together_are_not() -> None:
    scene = Scene(expected=3)
    zero, one, two = scene.together(3)
    scene.say(two, "leave", why="its machine is wanted back", fatal=False, seq=1)
    assert scene.told(two, "ack")[0]["seq"] == 1
    assert scene.told(zero, "regroup")[0]["urgent"] is True
    scene.arrive(zero, 1)
    scene.arrive(one, 1)
    scene.say(zero, "leave", why="done", fatal=False, over=True, seq=1)
    assert len(scene.told(one, "regroup")) == 1
    with pytest.raises(Refusal) as refusal:
        scene.hello(40)
    assert (refusal.value.kind, refusal.value.why) == ("end", "done")
    assert not scene.desk.is_done
    scene.say(one, "leave", why="done", fatal=False, over=True, seq=1)
    assert scene.desk.is_done
    assert [entry["how"] for entry in scene.written("lost")] == ["left"] * 3
    assert [entry["status"] for entry in scene.written("finished")] == ["done"]


def test_when_training_is_over_those_who_wait_to_take_part_are_told() -> None:
    scene = Scene()
    zero, _ = scene.together(2)
    new = scene.hello(20)
    scene.say(zero, "leave", why="done", fatal=False, over=True)
    assert scene.told(new, "end")[0]["why"] == "done"
    scene.arrive(new)
    assert len(scene.told(new, "end")) == 2


def test_a_fatal_error_of_one_ends_the_run_for_all() -> None:
    scene = Scene()
    zero, one = scene.together(2)
    scene.say(one, "leave", why="the loss is not finite", fatal=True)
    assert "member 1 (pid 11 on here): the loss is not finite" in scene.told(zero, "end")[0]["why"]
    assert not scene.told(zero, "regroup")
    assert scene.written("lost")[0]["how"] == "error"
    scene.say(zero, "leave", why="the run has ended", fatal=False)
    assert scene.written("finished")[0]["status"] == "failed"
    scene.desk.disconnected(scene.now, zero)
    assert scene.desk.is_done


def test_the_last_one_to_leave_ends_the_run() -> None:
    scene = Scene(expected=1)
    (zero,) = scene.together(1)
    scene.say(zero, "leave", why="enough", fatal=False)
    assert scene.desk.is_done
    assert scene.written("finished")[0]["status"] == "left"


def test_what_was_missed_with_a_connection_is_said_again() -> None:
    scene = Scene(expected=3)
    zero, one, two = scene.together(3)
    scene.desk.disconnected(scene.now, one)
    scene.desk.died(scene.now, two)
    scene.collect()
    scene.inbox.clear()
    scene.hello(11, member=1, generation=1)
    assert [m["kind"] for m in scene.inbox[1]] == ["welcome", "regroup"]
    scene.arrive(one, 1)
    scene.desk.disconnected(scene.now, one)
    scene.arrive(zero, 1)
    scene.inbox.clear()
    scene.hello(11, member=1, generation=1)
    assert [m["kind"] for m in scene.inbox[1]] == ["welcome", "generation"]
    scene.arrive(one, 1, generation=1)
    assert scene.desk.generations.phase is Phase.FORMED, "an arrival that was answered meanwhile"


def test_nobody_leaves_a_generation_it_is_not_in() -> None:
    scene = Scene()
    zero, _ = scene.together(2)
    with pytest.raises(BadFrame, match="leaves generation 3, and is in 1"):
        scene.arrive(zero, 1, generation=3)


def test_a_stranger_with_a_members_number_is_not_let_in_as_that_member() -> None:
    scene = Scene()
    scene.together(2)
    with pytest.raises(Refusal, match="member 0 is not known here") as refusal:
        scene.hello(99, host=THERE, member=0, generation=1)
    assert refusal.value.kind == "expelled"

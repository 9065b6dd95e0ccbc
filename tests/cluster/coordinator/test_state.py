"""Which member has the run's state when members meet, and what happens if none has."""

from __future__ import annotations

from .scene import Scene


def test_newcomers_that_are_left_alone_begin_where_a_checkpoint_ends() -> None:
    scene = Scene(expected=1)
    (zero,) = scene.together(1)
    scene.commit(zero, (0, 0, 64, 1, 1))
    new, newer = scene.hello(20), scene.hello(21)
    scene.arrive(new, -1)
    scene.arrive(newer, -1)
    scene.desk.died(scene.now, zero)
    scene.collect()
    for member in (new, newer):
        told = scene.told(member, "generation")[-1]
        assert (told["source"], told["behind"], told["anew"]) == (0, [1], True)
    scene.restart()
    current = scene.desk.generations.current
    assert (current.order, current.anew) == ([new.id, newer.id], True)


def test_the_first_generation_begins_with_what_it_has() -> None:
    scene = Scene(expected=1)
    (zero,) = scene.together(1)
    assert scene.told(zero, "generation")[-1]["anew"] is False


def test_one_that_is_back_may_know_of_updates_that_nobody_else_does() -> None:
    scene = Scene(expected=1)
    (zero,) = scene.together(1)
    scene.commit(zero, (0, 0, 64, 1, 1))
    ahead, level = scene.hello(20), scene.hello(21)
    scene.arrive(ahead, 2, 0)
    scene.arrive(level, 1, 0)
    scene.desk.died(scene.now, zero)
    scene.collect()
    told = scene.told(ahead, "generation")[-1]
    assert (told["source"], told["behind"], told["anew"]) == (1, [0], False)


def test_one_that_missed_a_generation_and_its_end_is_told_of_both() -> None:
    scene = Scene()
    zero, one = scene.together(2)
    new = scene.hello(20)
    scene.arrive(new, -1)
    scene.arrive(zero, 1)
    scene.arrive(one, 1)
    scene.inbox.clear()  # the coordinator was killed before it could tell
    scene.restart()
    for member in (zero, one):
        scene.desk.died(scene.now, scene.desk.roster.living[member.id])
    scene.collect()
    scene.inbox.clear()  # its connection is not there yet
    back = scene.hello(20, member=new.id)
    assert scene.told(back, "generation")[-1]["number"] == 2
    assert scene.told(back, "regroup")[-1]["generation"] == 3

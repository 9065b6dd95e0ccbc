"""A successor knows what the journal knows."""

from __future__ import annotations

import pytest

from echelon.cluster.coordinator.generations import Phase
from echelon.core.errors import DataError
from tests.cluster.coordinator.scene import Scene


def test_generation_members_version_and_leases_are_as_before() -> None:
    scene = Scene(expected=3)
    zero, one, two = scene.together(3)
    new = scene.hello(20)
    scene.commit(zero, (0, 0, 50, 1, 5))
    scene.say(one, "lease", epoch=3, wanted=100)
    scene.say(two, "lease", epoch=3, wanted=100)
    scene.say(one, "commits", generation=1, records=[[3, 0, 40, 6, 6, 1]])
    scene.desk.died(scene.now, two)
    before = scene.desk
    scene.restart()
    after = scene.desk
    assert set(after.roster.living) == set(before.roster.living) == {0, 1, new.id}
    assert after.roster.gone == before.roster.gone
    assert after.generations.current == before.generations.current
    assert after.versions.recorded == before.versions.recorded == 6
    assert sorted(after.leases.owners()) == sorted(before.leases.owners())
    assert after.leases.left(3) == before.leases.left(3) == 960
    assert [e["again"] for e in scene.written("coordinator")] == [False, True]
    assert after.generations.phase is Phase.GATHERING, "two was lost, and the others are to regroup"


def test_members_come_back_and_go_on_in_the_same_generation() -> None:
    scene = Scene()
    scene.together(2)
    scene.restart()
    assert scene.written("coordinator")[-1]["again"] is True
    scene.tick(4)
    zero = scene.hello(10, member=0, generation=1)
    one = scene.hello(11, member=1, generation=1)
    scene.tick(5, beating=(zero, one))
    assert scene.desk.generations.phase is Phase.FORMED
    assert not scene.written("lost")
    assert [m["kind"] for m in scene.inbox[1]].count("generation") == 1
    scene.commit(zero, (0, 0, 10, 1, 1))
    assert scene.hello(30).id == 2


def test_those_who_do_not_come_back_have_five_seconds() -> None:
    scene = Scene()
    scene.together(2)
    scene.restart()
    zero = scene.hello(10, member=0, generation=1)
    scene.tick(4.8, beating=(zero,))
    assert not scene.written("lost")
    scene.tick(0.5, beating=(zero,))
    assert [entry["member"] for entry in scene.written("lost")] == [1]
    assert scene.told(zero, "regroup")


def test_one_that_missed_its_generation_is_told_by_the_successor() -> None:
    scene = Scene()
    zero, one = scene.together(2)
    scene.arrive(zero, 3)
    scene.arrive(one, 4)
    told = scene.told(one, "generation")[-1]
    scene.restart()
    scene.inbox.clear()
    scene.hello(11, member=1, generation=1)
    assert scene.inbox[1][1] == told
    assert told["behind"] == [0]


def test_the_end_of_training_is_remembered() -> None:
    scene = Scene()
    zero, one = scene.together(2)
    scene.say(zero, "leave", why="done", fatal=False, over=True)
    scene.restart()
    one = scene.hello(11, member=1, generation=1)
    assert not scene.told(one, "regroup")
    scene.say(one, "leave", why="done", fatal=False, over=True)
    assert scene.desk.is_done
    scene.restart()
    assert scene.desk.is_done
    assert scene.desk.generations.ending == "done"


def test_a_run_that_is_begun_again_counts_on_and_waits_for_its_new_members() -> None:
    scene = Scene()
    zero, _ = scene.together(2)
    scene.commit(zero, (0, 0, 50, 1, 5))
    scene.say(zero, "lease", epoch=1, wanted=100)
    scene.journal.append({"kind": "begun", "time": 0.0, "batch_size": 10})
    scene.restart()
    assert len(scene.desk.roster) == 0
    assert not list(scene.desk.leases.owners())
    assert scene.desk.versions.batch_size == 10
    again = scene.hello(70, 0)
    scene.arrive(again, 5)
    assert scene.desk.generations.phase is Phase.GATHERING
    scene.arrive(scene.hello(71, 1), 5)
    told = scene.told(again, "generation")[-1]
    assert (again.id, told["number"], told["recorded"]) == (0, 2, 5)


def test_what_a_roll_back_made_void_stays_void() -> None:
    scene = Scene()
    zero, one = scene.together(2)
    scene.commit(zero, (0, 0, 50, 1, 5))
    scene.arrive(zero, 5)
    scene.arrive(one, 5)
    scene.say(zero, "rolled_back", version=2, why="no holder was left")
    scene.restart()
    one = scene.hello(11, member=1, generation=2)
    scene.say(one, "commits", generation=1, records=[[0, 20, 50, 3, 5]])
    assert scene.desk.versions.recorded == 2


@pytest.mark.parametrize(
    ("entry", "why"),
    [
        ({"kind": "generation", "number": 1, "members": [0], "version": 0}, "0"),
        ({"kind": "leased", "member": 0, "epoch": 0, "start": 990, "stop": 1010}, "is not free"),
    ],
)
def test_a_journal_that_contradicts_itself_is_refused(entry: dict[str, object], why: str) -> None:
    scene = Scene()
    scene.journal.append(entry | {"time": 0.0})
    with pytest.raises(DataError, match=rf"entry 1 of the journal .*{why}"):
        scene.restart()

"""Every update is journaled once, no matter which members report it and how often."""

from __future__ import annotations

import pytest

from echelon.cluster.coordinator.generations import Phase
from echelon.cluster.coordinator.protocol import BadFrame
from tests.cluster.coordinator.scene import Scene


def ranges(scene: Scene) -> list[tuple[int, ...]]:
    names = ("epoch", "start", "stop", "first", "last")
    return [tuple(entry[name] for name in names) for entry in scene.written("committed")]


def test_what_is_told_twice_is_recorded_once_and_acknowledged_twice() -> None:
    scene = Scene()
    zero, one = scene.together(2)
    rows = [[0, 0, 10, 1, 1], [0, 10, 20, 2, 2]]
    scene.say(zero, "commits", generation=1, records=rows, seq=1)
    scene.say(zero, "commits", generation=1, records=rows, seq=1)
    scene.say(one, "commits", generation=1, records=rows, seq=1)
    assert ranges(scene) == [(0, 0, 10, 1, 1), (0, 10, 20, 2, 2)]
    acks = [(ack["seq"], ack["version"]) for ack in scene.told(zero, "ack")]
    assert acks == [(1, 2), (1, 2)]
    assert scene.written("committed")[0]["generation"] == 1


def test_a_record_of_which_a_part_is_known_is_cut() -> None:
    scene = Scene()
    zero, one = scene.together(2)
    scene.desk.versions.batch_size = 32
    scene.commit(zero, (0, 0, 64, 1, 2))
    scene.commit(one, (0, 0, 100, 1, 4))
    assert ranges(scene) == [(0, 0, 64, 1, 2), (0, 64, 100, 3, 4)]
    assert scene.desk.versions.recorded == 4


def test_without_the_batch_size_a_record_is_cut_if_it_is_of_equal_parts() -> None:
    scene = Scene()
    zero, _ = scene.together(2)
    scene.commit(zero, (0, 0, 10, 1, 1))
    scene.commit(zero, (0, 0, 30, 1, 3))
    assert ranges(scene)[1] == (0, 10, 30, 2, 3)
    scene.commit(zero, (0, 20, 55, 3, 5))
    assert scene.desk.generations.phase is Phase.ENDED
    assert "cannot be cut at 3" in scene.written("finished")[0]["why"]


def test_records_that_are_missing_end_the_run_and_say_which() -> None:
    scene = Scene()
    zero, _ = scene.together(2)
    scene.commit(zero, (0, 10, 20, 2, 2))
    assert scene.written("finished")[0]["why"] == (
        "member 0 (pid 10 on here) recorded version 2 after version 0: the records between are "
        "missing"
    )


def test_samples_that_led_to_no_update_are_recorded_once_too() -> None:
    scene = Scene()
    zero, _ = scene.together(2)
    for _ in range(2):
        scene.commit(zero, (0, 0, 10, 1, 1), (0, 10, 20, 2, 1), (0, 20, 30, 2, 1))
    scene.restart()
    zero = scene.hello(10, member=0, generation=1)
    scene.commit(zero, (0, 10, 20, 2, 1), (0, 20, 30, 2, 1), (0, 30, 40, 2, 2))
    scene.commit(zero, (0, 10, 20, 2, 1))
    expected = [(0, 0, 10, 1, 1), (0, 10, 20, 2, 1), (0, 20, 30, 2, 1), (0, 30, 40, 2, 2)]
    assert ranges(scene) == expected


def test_a_record_beyond_the_epoch_or_of_a_later_generation_is_refused() -> None:
    scene = Scene()
    zero, _ = scene.together(2)
    with pytest.raises(BadFrame, match="an epoch has 1,000 samples"):
        scene.commit(zero, (0, 0, 10, 1, 1), (0, 990, 1001, 2, 2))
    assert ranges(scene) == []
    with pytest.raises(BadFrame, match="of generation 2"):
        scene.say(zero, "commits", generation=2, records=[])
    with pytest.raises(BadFrame, match="it was not in it"):
        scene.say(scene.hello(20), "commits", generation=1, records=[])


def test_after_a_roll_back_versions_go_on_from_there_and_the_old_ones_are_void() -> None:
    scene = Scene()
    zero, one = scene.together(2)
    scene.commit(zero, (0, 0, 50, 1, 5))
    scene.arrive(zero, 5)
    scene.arrive(one, 5)
    scene.say(zero, "rolled_back", version=2, why="a shard had no holder left", seq=1)
    scene.say(one, "commits", generation=1, records=[[0, 20, 50, 3, 5]])
    assert scene.desk.versions.recorded == 2, "of a past that was taken back"
    scene.commit(zero, (0, 20, 30, 3, 3))
    assert scene.written("rolled_back")[0]["version"] == 2
    assert ranges(scene)[-1] == (0, 20, 30, 3, 3)


def test_recovering_is_timed_from_the_loss_to_the_first_update_of_the_next_generation() -> None:
    scene = Scene(expected=3)
    zero, one, two = scene.together(3)
    scene.commit(zero, (0, 0, 50, 1, 5))
    scene.tick(0.5, beating=(zero, one, two))
    scene.desk.died(scene.now, two)
    scene.tick(0.2, beating=(zero, one))
    scene.commit(zero, (0, 50, 60, 6, 6))
    assert not scene.written("recovered"), "it was made before the loss, and told after it"
    scene.arrive(zero, 6)
    scene.arrive(one, 6)
    scene.tick(0.2, beating=(zero, one))
    scene.say(zero, "rolled_back", version=4, why="from the last cut")
    scene.commit(zero, (0, 40, 50, 5, 5))
    (entry,) = scene.written("recovered")
    assert entry["seconds"] == pytest.approx(0.4)
    assert (entry["generation"], entry["lost_steps"]) == (2, 2)
    scene.commit(zero, (0, 50, 60, 6, 6))
    assert len(scene.written("recovered")) == 1


def test_everybody_learns_what_is_on_record() -> None:
    scene = Scene()
    zero, one = scene.together(2)
    scene.commit(zero, (0, 0, 50, 1, 5))
    scene.tick(1.2, beating=(zero, one))
    assert [(ack["version"], ack["seq"]) for ack in scene.told(one, "ack")] == [(5, None)]
    scene.tick(2, beating=(zero, one))
    assert len(scene.told(one, "ack")) == 1


def test_shares_go_to_the_journal() -> None:
    scene = Scene()
    zero, _ = scene.together(2)
    scene.say(zero, "shares", generation=1, version=3, shares=[0.75, 0.25])
    (entry,) = scene.written("shares")
    assert (entry["generation"], entry["version"], entry["shares"]) == (1, 3, [0.75, 0.25])
    with pytest.raises(BadFrame, match="3 shares for 2 members"):
        scene.say(zero, "shares", generation=1, version=3, shares=[1, 1, 1])

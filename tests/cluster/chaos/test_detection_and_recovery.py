"""What the journal shows of a run, and when a fault was detected and repaired."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from echelon.cluster.chaos.measure import measure
from echelon.cluster.chaos.plan import Fault, read_plan
from echelon.cluster.chaos.view import Deed, Scene


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.jsonl"


def write(path: Path, *entries: dict[str, Any]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(entry) + "\n" for entry in entries)


def joined(member: int, time: float, pid: int) -> dict[str, Any]:
    return {"kind": "joined", "time": time, "member": member, "pid": pid, "host": "h", "name": "n"}


def lost(member: int, time: float, how: str = "killed") -> dict[str, Any]:
    return {"kind": "lost", "time": time, "member": member, "how": how, "why": "", "quiet": 0}


def formed(number: int, time: float, *members: int, version: int = 0) -> dict[str, Any]:
    found = {"number": number, "members": list(members), "version": version}
    return {"kind": "generation", "time": time, "why": "", "shares": None, **found}


def committed(generation: int, time: float, last: int) -> dict[str, Any]:
    made = {"epoch": 0, "start": last - 1, "stop": last, "first": last, "last": last}
    return {"kind": "committed", "time": time, "generation": generation, **made}


def plan(text: str) -> Fault:
    (fault,) = read_plan(text)
    return fault


BEGINNING = [
    {"kind": "coordinator", "time": 0.5, "pid": 9, "again": False},
    joined(0, 1.0, 10),
    joined(1, 1.0, 11),
    formed(1, 1.5, 0, 1),
    committed(1, 2.0, 1),
]


def test_an_unfinished_line_is_read_when_it_is_finished(path: Path) -> None:
    scene = Scene(path)
    scene.update()
    assert not scene.events
    write(path, *BEGINNING)
    with path.open("a") as file:
        file.write('{"kind": "lost", "time": 3.0, ')
    scene.update()
    assert [scene.leader, scene.version, scene.coordinator] == [0, 1, 9]
    with path.open("a") as file:
        file.write('"member": 0}\n')
    scene.update()
    assert [scene.leader, scene.taking_part, scene.living] == [1, [1], {1: 11}]


def test_what_is_rolled_back_is_not_there_any_more(path: Path) -> None:
    scene = Scene(path)
    write(path, *BEGINNING, committed(1, 3, 8))
    write(path, {"kind": "rolled_back", "time": 4, "version": 5, "why": ""})
    write(path, {"kind": "over", "time": 5, "status": "done"})
    scene.update()
    assert (scene.version, scene.is_over) == (5, True)


def measured(path: Path, fault: str, *entries: dict[str, Any], **more: Any) -> Deed:
    write(path, *BEGINNING, *entries)
    scene = Scene(path)
    scene.update()
    deed = Deed(plan(fault), version=1, moment=3.0, **more)
    measure(deed, scene)
    return deed


def test_a_kill_is_detected_when_it_is_lost_and_over_with_the_next_update(path: Path) -> None:
    deed = measured(
        path,
        "kill trainer:1@step=1",
        lost(1, 3.25),
        committed(1, 3.3, 2),  # made before, told after
        formed(2, 3.5, 0, version=2),
        committed(2, 4.0, 3),
        {"kind": "recovered", "time": 4.0, "generation": 2, "seconds": 0.75, "lost_steps": 7},
        members=[1],
    )
    assert (deed.detected, deed.recovered, deed.lost_steps) == (0.25, 1.0, 7)


def test_a_loss_without_a_further_update_is_over_with_the_run(path: Path) -> None:
    end = {"kind": "finished", "time": 5.0, "status": "done", "version": 1}
    deed = measured(path, "kill leader@step=1", lost(0, 3.5), formed(2, 3.5, 1), end, members=[0])
    assert (deed.detected, deed.recovered) == (0.5, 2.0)


def test_a_newcomer_that_dies_costs_nobody_anything(path: Path) -> None:
    deed = measured(path, "kill trainer@step=1", joined(2, 2.5, 12), lost(2, 3.5), members=[2])
    assert (deed.detected, deed.recovered, deed.note) == (0.5, None, "it did not take part yet")


def test_a_frozen_member_may_come_back(path: Path) -> None:
    deed = measured(
        path,
        "freeze trainer:1@step=1 for 4s",
        lost(1, 4.5, "frozen"),
        formed(2, 4.5, 0),
        committed(2, 5.0, 2),
        joined(2, 7.0, 11),
        members=[1],
        pids=[11],
    )
    assert (deed.detected, deed.recovered) == (1.5, 2.0)
    assert deed.note == "back as member 2 4.0 s after the fault"


@pytest.mark.parametrize(
    ("entries", "note"),
    [
        ([], "too short to be noticed"),
        ([lost(1, 9.0, "frozen")], "too short to be noticed"),
        ([lost(1, 3.5)], "killed before it was noticed"),
        ([lost(1, 3.5, "left")], "the run was over first"),
    ],
)
def test_not_every_loss_is_due_to_a_freeze(
    path: Path, entries: list[dict[str, Any]], note: str
) -> None:
    deed = measured(path, "freeze trainer:1@step=1 for 1s", *entries, members=[1], pids=[11])
    assert (deed.detected, deed.note) == (None, note)


def test_a_coordinator_is_back_when_its_successor_says_so(path: Path) -> None:
    again = {"kind": "coordinator", "time": 3.5, "pid": 10, "again": True}
    entries = [committed(1, 3.1, 2), again, committed(1, 4.0, 3)]
    deed = measured(path, "kill coordinator@step=1", *entries, coordinator=True)
    assert (deed.detected, deed.recovered) == (0.5, 1.0)


def test_a_join_is_over_with_the_first_update_it_has_a_part_in(path: Path) -> None:
    entries = [
        joined(2, 4.0, 20),
        committed(1, 4.5, 2),
        formed(2, 5.0, 0, 1, 2),
        committed(2, 6.0, 3),
        lost(2, 7.0, "frozen"),
        joined(3, 8.0, 20),  # the same one, back
    ]
    deed = measured(path, "join 1@step=1", *entries, pids=[20])
    assert (deed.members, deed.detected, deed.recovered) == ([2], 1.0, 3.0)


def test_a_join_that_comes_too_late_says_so(path: Path) -> None:
    assert measured(path, "join 1@step=1", pids=[20]).note == "the run was over first"
    deed = measured(path, "join 1@step=1", joined(2, 4.0, 20), pids=[20])
    assert deed.note == "the run was over before it took part"


def test_slowness_is_noticed_where_batches_are_divided_anew(path: Path) -> None:
    shares = {"kind": "shares", "time": 4.0, "generation": 1, "version": 2, "shares": [1, 0]}
    deed = measured(path, "slow trainer:1@step=1 by 4x for 2s", shares, members=[1])
    assert (deed.detected, deed.note) == (1.0, "batches are divided anew")


def test_slowness_that_nobody_felt_says_so(path: Path) -> None:
    deed = measured(path, "slow trainer:1@step=1 by 4x for 2s", members=[1])
    assert (deed.detected, deed.note) == (None, "nobody had to wait for long")


def test_a_loss_is_the_doing_of_the_fault_that_came_last(path: Path) -> None:
    write(path, *BEGINNING, lost(1, 6.0, "frozen"), formed(2, 6.0, 0), committed(2, 6.5, 2))
    scene = Scene(path)
    scene.update()
    cut_off = Deed(plan("partition trainer:1@step=1 for 1s"), 1, 3.0, members=[1], pids=[11])
    frozen = Deed(plan("freeze trainer:1@step=1 for 4s"), 1, 4.5, members=[1], pids=[11])
    for deed in (deeds := [cut_off, frozen]):
        measure(deed, scene, deeds)
    assert (cut_off.detected, cut_off.note) == (None, "too short to be noticed")
    assert (frozen.detected, frozen.recovered) == (1.5, 2.0)


def test_a_server_is_lost_with_some_updates_or_its_twin_takes_over(path: Path) -> None:
    rolled = {"kind": "rolled_back", "time": 3.4, "version": 0, "why": ""}
    told = [rolled, committed(2, 3.5, 1)]
    deed = measured(path, "kill server:0@step=1", *told, server=0, pids=[12])
    assert deed.detected == pytest.approx(0.4)
    assert deed.recovered == pytest.approx(0.5)
    assert (deed.lost_steps, deed.note, deed.who) == (1, "went back to version 0", "server 0")
    path.unlink()
    deed = measured(path, "kill server:1@step=1", committed(1, 3.2, 2), server=1, pids=[12])
    assert deed.detected is None
    assert deed.recovered == pytest.approx(0.2)
    assert (deed.lost_steps, deed.note) == (0, "nothing was lost")
    write(path, committed(1, 4.5, 3), rolled | {"time": 5.0}, committed(2, 5.1, 1))
    (scene := Scene(path)).update()
    measure(deed, scene)
    assert deed.note == "nothing was lost", "the run went back for something else"
    path.unlink()
    deed = measured(path, "kill server:1@step=1", committed(1, 2.999, 2), server=1, pids=[12])
    assert deed.recovered == 0, "on record with the fault, by a clock that is a little behind"

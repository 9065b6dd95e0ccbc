"""A member's backlog: frames are kept, and sent again, until they are acknowledged."""

from __future__ import annotations

from echelon.cluster.coordinator.protocol import (
    RECORDS,
)
from echelon.cluster.coordinator.session import Backlog, Item


def records(*versions: int) -> list[tuple[int, int, int, int, int]]:
    return [(0, v, v + 1, v, v) for v in versions]


def test_records_travel_together_and_are_kept_until_they_are_acknowledged() -> None:
    backlog = Backlog()
    backlog.report(1, records(1, 2))
    backlog.report(1, records(3))
    backlog.put(Item("rolled_back", {"version": 0, "why": "x"}))
    backlog.report(2, records(4))
    assert [frame["kind"] for frame in backlog.frames(records=False)] == ["rolled_back"]
    frames = backlog.frames(records=True)
    assert [(f["generation"], len(f["records"]), f["seq"]) for f in frames] == [
        (1, 3, 2),
        (2, 1, 3),
    ]
    assert backlog.frames(records=True) == []
    backlog.acknowledged(2)
    backlog.report(2, records(5))
    backlog.reconnected()
    again = backlog.frames(records=True)
    assert [(f["records"][0][3], f["seq"]) for f in again] == [(4, 3), (5, 4)]


def test_who_does_not_lead_forgets_what_is_on_record() -> None:
    backlog = Backlog()
    for version in range(1, 5):
        backlog.report(1, records(version))
    backlog.on_record(3)
    assert [frame["records"][0][3] for frame in backlog.frames(records=True)] == [4]
    backlog.forget_records()
    backlog.reconnected()
    assert not backlog.waits(records=True)


def test_what_an_expelled_member_did_is_not_its_to_tell_but_its_leave_is() -> None:
    backlog = Backlog()
    backlog.report(1, records(1))
    backlog.put(Item("lease", {}))
    last = backlog.put(Item("leave", {}))
    backlog.expelled()
    assert backlog.holds(last)
    assert [frame["kind"] for frame in backlog.frames(records=True)] == ["leave"]


def test_more_records_than_a_frame_takes_are_sent_in_several() -> None:
    backlog = Backlog()
    backlog.report(1, records(*range(1, 2 * RECORDS + 2)))
    assert [len(f["records"]) for f in backlog.frames(records=True)] == [RECORDS, RECORDS, 1]

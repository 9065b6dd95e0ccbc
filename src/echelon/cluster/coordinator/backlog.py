"""What has to reach the coordinator: kept, in order, until it is known to be there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any

from echelon.cluster.coordinator.frames import Message
from echelon.cluster.coordinator.messages import RECORDS


@dataclass(slots=True)
class Item:
    """A frame, or with others of its kind a part of one."""

    kind: str
    fields: dict[str, Any]
    seq: int | None = None
    """Given when it is first sent."""
    sent: bool = False
    """Over the present connection."""

    @property
    def last(self) -> int:
        """Version of the last of its records."""
        return int(self.fields["records"][-1][4])


class Backlog:
    """Used by two threads.

    Records of updates are kept by everybody and sent by the leader alone; the others send them
    when they leave their generation, so that nothing is missing if the leader is.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._items: list[Item] = []
        self._seq = 0

    def put(self, item: Item) -> Item:
        with self._lock:
            self._items.append(item)
        return item

    def report(self, generation: int, records: Sequence[Sequence[int]]) -> None:
        with self._lock:
            for at in range(0, len(records), RECORDS):
                part = [list(record) for record in records[at : at + RECORDS]]
                self._items.append(Item("commits", {"generation": generation, "records": part}))

    def frames(self, *, records: bool) -> list[Message]:
        """What is to be sent now and counts as sent; `records` too or only the rest."""
        with self._lock:
            waiting = [item for item in self._items if not item.sent]
            # After a leave nothing counts any more: the records go before it.
            records |= any(item.kind == "leave" for item in waiting)
            due = [item for item in waiting if records or item.kind != "commits"]
            return [self._frame(group) for group in _groups(due)]

    def waits(self, *, records: bool) -> bool:
        """Whether something is to be sent that was not; looked at without waiting for the lock."""
        return any(not i.sent and (records or i.kind != "commits") for i in self._items)

    def acknowledged(self, seq: int) -> None:
        """What was sent up to this number has come through."""
        self._keep(lambda item: not item.sent or item.seq is None or item.seq > seq)

    def on_record(self, version: int) -> None:
        """Up to this version, another one has told of the updates as well."""
        self._keep(lambda item: item.kind != "commits" or item.last > version)

    def forget_records(self) -> None:
        """What they tell of was taken back."""
        self._keep(lambda item: item.kind != "commits")

    def expelled(self) -> None:
        """What this member did as one that is given up is no longer its to tell."""
        self._keep(lambda item: item.kind == "leave")

    def clear(self) -> None:
        """Nobody is there to be told."""
        self._keep(lambda _item: False)

    def reconnected(self) -> None:
        """What is not acknowledged may not have come through."""
        with self._lock:
            for item in self._items:
                item.sent = False

    def holds(self, item: Item) -> bool:
        with self._lock:
            return any(kept is item for kept in self._items)

    def _frame(self, group: list[Item]) -> Message:
        seq = group[0].seq
        if seq is None:
            seq = self._seq = self._seq + 1
        for item in group:
            item.seq, item.sent = seq, True
        return {"kind": group[0].kind, **_joined(group), "seq": seq}

    def _keep(self, wanted: Callable[[Item], bool]) -> None:
        with self._lock:
            self._items = [item for item in self._items if wanted(item)]


def _groups(items: Sequence[Item]) -> Iterator[list[Item]]:
    """Records that can go into one frame: those that did before, or none of which was sent."""
    group: list[Item] = []
    for item in items:
        if group and not _fits(group, item):
            yield group
            group = []
        group.append(item)
    if group:
        yield group


def _fits(group: Sequence[Item], item: Item) -> bool:
    first = group[0]
    if first.kind != "commits" or item.kind != "commits" or first.seq != item.seq:
        return False
    count = sum(len(member.fields["records"]) for member in group) + len(item.fields["records"])
    return first.fields["generation"] == item.fields["generation"] and count <= RECORDS


def _joined(group: Sequence[Item]) -> dict[str, Any]:
    if len(group) == 1:
        return group[0].fields
    records = [record for item in group for record in item.fields["records"]]
    return {**group[0].fields, "records": records}

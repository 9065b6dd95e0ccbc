"""A pure coordinator under test: clock, processes, journal and messages are all simulated."""

from __future__ import annotations

from typing import Any

from echelon.cluster.coordinator.coordinator import Desk
from echelon.cluster.coordinator.effects import Settings
from echelon.cluster.coordinator.membership import Member, Sight
from echelon.cluster.coordinator.protocol import Decoder, Message, check
from echelon.cluster.coordinator.replay import replay

HERE = "here/boot/pid:[1]"
THERE = "there/boot/pid:[1]"
STORE = ("127.0.0.1", 29500)


class Scene:
    """One desk: `say` a frame as a member, read answers with `told`, the journal with `written`."""

    def __init__(self, expected: int = 2, min_workers: int = 1, **more: Any) -> None:
        settings = {"wait": 30.0, "samples": 1000, "run": {"job": "x"}, **more}
        self.settings = Settings(
            key=bytes(32), expected=expected, min_workers=min_workers, **settings
        )
        self.now = 100.0
        self.sights: dict[int, Sight | None] = {}
        self.journal: list[dict[str, Any]] = []
        self.inbox: dict[int, list[Message]] = {}
        self.desk = self._desk()
        self.desk.outbox.note("coordinator", pid=1, again=False)

    def _desk(self) -> Desk:
        return Desk(self.settings, STORE, HERE, lambda pid: self.sights.get(pid), self.now)

    def restart(self) -> None:
        """Kill the coordinator: a new one has nothing but the journal."""
        self.collect()
        self.desk = self._desk()
        again = replay(self.desk, self.journal, STORE, self.now)
        self.desk.outbox.note("coordinator", pid=1, again=again)
        self.collect()

    def collect(self) -> None:
        """Do as the server does: write, then send."""
        outbox = self.desk.outbox
        while outbox.notes:
            kind, fields = outbox.notes.popleft()
            self.journal.append({"kind": kind, "time": self.now, **fields})
        for member, parts in outbox.mail:
            self.inbox.setdefault(member, []).extend(Decoder().feed(b"".join(parts)))
        outbox.mail.clear()
        outbox.farewells.clear()

    def hello(self, pid: int, number: int | None = None, **more: Any) -> Member:
        self.sights.setdefault(pid, Sight("S", 0))
        message = {
            "kind": "hello",
            "role": "trainer",
            "version": 1,
            "pid": pid,
            "host": HERE,
            "name": f"n{pid}",
            "number": number,
            "member": None,
            "generation": 0,
            **more,
        }
        check(message)
        member = self.desk.hello(self.now, message)
        self.collect()
        return member

    def say(self, member: Member, kind: str, **fields: Any) -> None:
        message = {"kind": kind, **fields}
        check(message)
        self.desk.take(self.now, member, message)
        self.collect()

    def arrive(self, member: Member, *progress: int, **more: Any) -> None:
        fields = {"generation": member.generation, "why": "it is time", **more}
        self.say(member, "arrived", progress=list(progress), **fields)

    def beat(self, member: Member, step: int | None = None, doing: str = "", **more: Any) -> None:
        self.say(member, "beat", step=step, doing=doing, **more)

    def commit(self, member: Member, *records: tuple[int, int, int, int, int]) -> None:
        rows = [list(record) for record in records]
        self.say(member, "commits", generation=member.generation, records=rows)

    def tick(self, seconds: float = 0.0, beating: tuple[Member, ...] = ()) -> None:
        """Let time pass in steps of 0.1 s, while these members beat."""
        until = self.now + seconds
        while True:
            for member in beating:
                if self.desk.roster.get(member.id) is member:
                    self.beat(member, member.step, member.doing)
            self.desk.tick(self.now)
            self.collect()
            if self.now >= until - 1e-9:
                return
            self.now = round(self.now + 0.1, 6)

    def together(self, count: int) -> list[Member]:
        """So many members in their first generation."""
        members = [self.hello(10 + n, n) for n in range(count)]
        for member in members:
            self.arrive(member, 0)
        assert self.desk.generations.number == 1
        return members

    def told(self, member: Member, kind: str) -> list[Message]:
        return [m for m in self.inbox.get(member.id, []) if m["kind"] == kind]

    def written(self, kind: str) -> list[dict[str, Any]]:
        return [entry for entry in self.journal if entry["kind"] == kind]

"""A server is killed while all shards measure a clipped update: it is made once, and is right."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from echelon.comm.ps.client import Servers
from echelon.core.errors import PeerError
from echelon.server.decisions import Entry
from echelon.server.dispatch import Desk
from echelon.server.gate_link import GateLink
from tests.unit.server.fleet import fleet
from tests.unit.server.small_job import Alone, Job, await_files, begin_together, close
from tests.unit.server.test_twin_takes_over import ADAM

TRAINERS, STEPS, LOST_AT = 2, 10, 6
CLIP = {"norm": 1.0}


@pytest.fixture
def victim(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """The shard that stops within a measurement, once the others have said theirs."""
    shard: int = request.param
    desk, link = Desk._measure, GateLink._measure

    def hold(entry: Entry) -> None:
        if entry.version == LOST_AT and not Path("killed").exists():
            time.sleep(0.3)
            Path("measuring").touch()
            time.sleep(60)

    def at_gate(self: Desk, entry: Entry, square: float) -> float:
        if shard == 0:
            hold(entry)
        return desk(self, entry, square)

    def elsewhere(self: GateLink, entry: Entry, square: float) -> float:
        if self._shard.index == shard:
            hold(entry)
        return link(self, entry, square)

    monkeypatch.setattr(Desk, "_measure", at_gate)
    monkeypatch.setattr(GateLink, "_measure", elsewhere)
    return shard


@pytest.mark.parametrize(("shards", "victim"), [(2, 0), (2, 1), (3, 2)], indirect=["victim"])
def test_its_twin_takes_over_and_the_update_is_made(shards: int, victim: int) -> None:
    def body(servers: Servers, member: int) -> Any:
        job = Job(servers, member, ADAM, replicas=1, clip=CLIP)
        begin_together(job, TRAINERS)
        for step in range(STEPS):
            job.step(step)
        return {"version": job.version, "weights": job.weights()}

    with fleet(shards, replicas=1) as held:

        def besides() -> None:
            await_files("measuring")
            Path("killed").touch()
            held.replace(victim)

        found = held.run(TRAINERS, body, besides=besides)
    alone = Alone(ADAM)
    for step in range(STEPS):
        alone.step([(step, member) for member in range(TRAINERS)], clip=1.0)
    for each in found:
        assert each["version"] == STEPS
        assert close(each["weights"], alone.weights())


@pytest.mark.parametrize("victim", [2], indirect=True)
def test_without_a_twin_all_can_begin_again_at_once(victim: int) -> None:
    def body(servers: Servers, member: int) -> Any:
        job = Job(servers, member, ADAM, clip=CLIP)
        begin_together(job, TRAINERS)
        for step in range(LOST_AT - 1):
            job.step(step)
        with pytest.raises(PeerError):
            job.step(LOST_AT)
        Path(f"{member}-lost").touch()
        await_files("0-lost", "1-lost", "started")
        began = time.monotonic()
        assert servers.set_up(job.layout, job.rules), "nobody has anything that is of use"
        if member == 0:
            job.upload()
        return time.monotonic() - began

    with fleet(3) as held:

        def besides() -> None:
            await_files("measuring")
            Path("killed").touch()
            held.kill(victim)
            held.start(victim)
            Path("started").touch()

        found = held.run(TRAINERS, body, besides=besides)
    assert max(found) < 5.0, "a server waited for its deadline"

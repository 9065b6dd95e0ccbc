"""A shard is killed and its twin takes its place: nothing is lost, and nothing counts twice."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from echelon.comm.ps.client import Servers
from echelon.comm.ps.link import Sender
from echelon.core.config import OptimizerSection
from tests.unit.server.fleet import fleet
from tests.unit.server.small_job import Alone, Job, await_files, begin_together, close

ADAM = OptimizerSection(name="adam", lr=0.02)
STEPS = 40


def train(servers: Servers, member: int, trainers: int, **rules: Any) -> dict[str, Any]:
    job = Job(servers, member, ADAM, replicas=1, **rules)
    begin_together(job, trainers)
    kinds = []
    for step in range(STEPS):
        Path(f"{member}-{step}").touch()
        kinds.append(job.step(step, early=True).kind)
        time.sleep(0.002)
    return {"kinds": kinds, "version": job.version, "weights": job.weights()}


def tidy() -> None:
    for file in Path().iterdir():
        file.unlink()


def undisturbed(shards: int, trainers: int, body: Callable[[Servers, int], Any], plane: str) -> Any:
    tidy()
    with fleet(shards, replicas=1) as held:
        return held.run(trainers, body, plane=plane)


@pytest.mark.parametrize(
    ("plane", "shards", "killed"),
    [("memory", 1, [0]), ("tcp", 2, [1]), ("memory", 2, [0, 1, 0])],
)
def test_weights_are_those_of_an_undisturbed_run(
    plane: str, shards: int, killed: list[int]
) -> None:
    trainers = 2

    def body(servers: Servers, member: int) -> Any:
        return train(servers, member, trainers)

    with fleet(shards, replicas=1) as held:

        def besides() -> None:
            for at, shard in enumerate(killed, start=1):
                await_files(f"0-{at * STEPS // 4}")
                held.replace(shard)

        found = held.run(trainers, body, plane=plane, besides=besides)
    for each in found:
        assert set(each["kinds"]) <= {"applied", "done"}
        assert each["version"] == STEPS
    calm = undisturbed(shards, trainers, body, plane)
    assert [each["weights"] for each in found] == [each["weights"] for each in calm]
    alone = Alone(ADAM)
    for step in range(STEPS):
        alone.step([(step, 0), (step, 1)])
    assert close(calm[0]["weights"], alone.weights())


def test_a_push_reaches_all_when_one_is_replaced_while_it_is_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    flush, began = Sender.flush, [0.0]

    def slowly(self: Sender, seconds: float) -> bool:
        """To one of the servers, as a large push over a slow network."""
        if self._thread.name != "echelon-push-1" or not Path("slow").exists():
            return flush(self, seconds)
        began[0] = began[0] or time.monotonic()
        Path("sending").touch()
        if time.monotonic() > began[0] + 1.5:
            return flush(self, seconds)
        time.sleep(seconds)
        return False

    monkeypatch.setattr(Sender, "flush", slowly)

    def body(servers: Servers, member: int) -> Any:
        job = Job(servers, member, ADAM, ((1500, 1500), (50,), (1500, 1000)), replicas=1)
        begin_together(job, 1)
        found = []
        for step in range(4):
            if step == 2:
                Path("slow").touch()
            found.append(job.step(step, early=True).kind)
        return found

    with fleet(2, replicas=1) as held:

        def besides() -> None:
            await_files("sending")
            time.sleep(0.3)
            held.replace(0)

        [found] = held.run(1, body, plane="tcp", besides=besides, within=15)
    assert set(found) <= {"applied", "done"}

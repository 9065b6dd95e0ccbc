"""Synchronous updates on real server processes."""

from __future__ import annotations

from typing import Any

import pytest

from echelon.comm.ps.client import Servers
from echelon.core.config import OptimizerSection
from tests.unit.server.fleet import fleet
from tests.unit.server.small_job import Alone, Job, close

STEPS = 4
ADAM = OptimizerSection(name="adam", lr=0.01, l2=0.01)


@pytest.mark.parametrize("plane", ["memory", "tcp"])
@pytest.mark.parametrize(("shards", "trainers"), [(1, 1), (1, 4), (2, 1), (2, 3)])
def test_updates_are_as_in_one_process(plane: str, shards: int, trainers: int) -> None:
    def body(servers: Servers, member: int) -> Any:
        job = Job(servers, member, ADAM)
        job.begin(1, range(trainers))
        found = [job.step(step, early=member % 2 == 0) for step in range(STEPS)]
        assert [o.kind for o in found] == ["applied"] * STEPS
        assert [o.version for o in found] == list(range(1, STEPS + 1))
        assert found[-1].row[:3] == (4.0 * trainers, 4.0 * trainers, 1.0 * trainers)
        return job.weights()

    with fleet(shards) as held:
        found = held.run(trainers, body, plane=plane)
    alone = Alone(ADAM)
    for step in range(STEPS):
        alone.step([(step, member) for member in range(trainers)])
    for each in found:
        assert close(each, alone.weights())
        assert each == found[0], "all have the same bits"

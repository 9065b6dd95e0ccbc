"""What concerns all shards together: checkpoints by name, clipping by norm, missing gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from echelon.comm.ps.client import Servers
from echelon.core.config import OptimizerSection
from echelon.core.errors import TrainingError
from echelon.core.types import Lease
from tests.unit.server.fleet import fleet
from tests.unit.server.small_job import Alone, Job, close

ADAM = OptimizerSection(name="adam", lr=0.02, l2=0.1)


@pytest.mark.parametrize(("plane", "before", "after"), [("memory", 2, 1), ("tcp", 1, 3)])
def test_other_shards_go_on_from_a_cut(plane: str, before: int, after: int) -> None:
    saved: dict[str, Any] = {}
    with fleet(before) as held:
        servers = held.trainer(0, plane)
        try:
            job = Job(servers, 0, ADAM)
            job.begin(1, [0])
            for step in range(3):
                job.step(step)
            saved.update(servers.state())
        finally:
            servers.close()
    assert saved["version"] == 3
    assert saved["ledger"]["parts"][0]["done"] == [[0, 12]]
    assert {float(kept["step"]) for kept in saved["optimizer"]["state"].values()} == {3.0}
    with fleet(after) as held:
        servers = held.trainer(5, plane)
        try:
            job = Job(servers, 5, ADAM)
            assert servers.set_up(job.layout, job.rules)
            servers.upload(saved)
            servers.enter(9, [5])
            job.version = servers.pull()
            assert job.version == 3
            again = Lease(0, 8, 12)
            job.fill(0)
            job.push(0, again)
            assert servers.outcome().kind == "done", "the ledger came along"
            job.member = 0
            for step in range(3, 6):
                outcome = job.step(step)
            assert outcome.version == 6
            found = job.weights()
        finally:
            servers.close()
    alone = Alone(ADAM)
    for step in range(6):
        alone.step([(step, 0)])
    assert close(found, alone.weights())


def test_another_model_is_refused_and_the_shard_goes_on() -> None:
    with fleet() as held:
        mine, other = held.trainer(0), held.trainer(1)
        try:
            job = Job(mine, 0)
            job.begin(1, [0])
            stranger = Job(other, 1, shapes=((3, 3),))
            with pytest.raises(TrainingError, match=r"refused .*another model or other rules"):
                other.set_up(stranger.layout, stranger.rules)
            assert job.step(0).kind == "applied"
        finally:
            mine.close()
            other.close()


def test_clipping_by_norm_looks_at_all_shards() -> None:
    def body(servers: Servers, member: int) -> Any:
        job = Job(servers, member, clip={"norm": 0.5})
        job.begin(1, [0, 1])
        for step in range(3):
            job.step(step)
        return job.weights()

    with fleet(2) as held:
        found = held.run(2, body)
    alone = Alone()
    for step in range(3):
        alone.step([(step, 0), (step, 1)], clip=0.5)
    assert found[0] == found[1]
    assert close(found[0], alone.weights(), 1e-4)


def test_parameters_without_a_gradient_stay_what_they_are() -> None:
    with fleet(2) as held:
        servers = held.trainer(0)
        try:
            job = Job(servers, 0, ADAM)
            job.begin(1, [0])
            job.step(0)
            before = [weight.clone() for weight in servers.weights]
            job.fill(1)
            servers.slots[1].zero_()
            job.push(1, missing=[1])
            assert servers.outcome().kind == "applied"
            kept = [torch.equal(a, b) for a, b in zip(before, servers.weights, strict=True)]
        finally:
            servers.close()
    assert kept == [False, True, False, False, False]

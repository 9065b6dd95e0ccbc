"""Rows of tables on real servers: shards are killed, trainers are slow or lost, no row is lost."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from echelon.comm.ps.client import Servers
from echelon.comm.ps.rows import RemoteTables
from echelon.core.errors import PeerError
from echelon.core.types import RowRule, RowSpec
from echelon.optim.tables import RowGradients, Rows, merged
from tests.unit.server.fleet import fleet
from tests.unit.server.small_job import Job

pytestmark = pytest.mark.timeout(90)
STEPS, TRAINERS = 32, 2
SPECS = [
    RowSpec(name="often", width=3, seed=1, rule=RowRule(name="adagrad", lr=0.1)),
    RowSpec(name="late", width=2, seed=2, admit=3, expire=4, rule=RowRule(name="adam", lr=0.1)),
]
ALL = torch.arange(-40, 40)


def gradients(step: int, member: int, table: int) -> RowGradients:
    generator = torch.Generator().manual_seed(100 * step + 10 * member + table)
    drawn = torch.randint(-40, 40, (12,), generator=generator)
    ids, counts = drawn.unique(return_counts=True)
    width = SPECS[table].width
    return RowGradients(ids, torch.randn(len(ids), width, generator=generator), counts)


def job_of(servers: Servers, member: int, **rules: Any) -> Job:
    servers.tables = RemoteTables(SPECS)
    tables = [spec.model_dump(mode="json") for spec in SPECS]
    job = Job(servers, member, tables=tables, **rules)
    job.begin(1, range(TRAINERS))
    return job


def train(servers: Servers, member: int, **rules: Any) -> list[Any]:
    job = job_of(servers, member, **rules)
    for step in range(STEPS):
        Path(f"{member}-{step}").touch()
        for at in range(len(SPECS)):
            servers.tables.store(at).push(*gradients(step, member, at))
        servers.tables.store(0).pull(ALL[: step + 1])
        assert job.step(step).kind in ("applied", "done")
    return [servers.tables.store(at).pull(ALL).tolist() for at in range(len(SPECS))]


def alone(divisor: float) -> list[Tensor]:
    """The same in this process."""
    found = []
    for at, spec in enumerate(SPECS):
        store = Rows(spec)
        for step in range(STEPS):
            ids, sums, counts = merged([gradients(step, m, at) for m in range(TRAINERS)])
            store.push(ids, sums / divisor, counts)
        found.append(store.pull(ALL))
    return found


def check(found: list[Any], divisor: float) -> None:
    for each in found:
        for mine, theirs in zip(each, alone(divisor), strict=True):
            torch.testing.assert_close(torch.tensor(mine), theirs, rtol=1e-4, atol=1e-5)


def divisor_of(job_samples: int = 4) -> float:
    return float(job_samples * TRAINERS)


@pytest.mark.parametrize(("plane", "shards"), [("memory", 1), ("tcp", 2)])
def test_rows_are_those_of_one_process(plane: str, shards: int) -> None:
    with fleet(shards) as held:
        check(held.run(TRAINERS, train, plane=plane), divisor_of())


@pytest.mark.parametrize("shards", [1, 2])
def test_a_twin_has_all_rows(shards: int) -> None:
    def body(servers: Servers, member: int) -> Any:
        return train(servers, member, replicas=1)

    with fleet(shards, replicas=1) as held:

        def besides() -> None:
            for at, shard in enumerate([shards - 1, 0], start=1):
                while not Path(f"0-{at * STEPS // 3}").exists():
                    time.sleep(0.0005)
                held.replace(shard)

        check(held.run(TRAINERS, body, besides=besides), divisor_of())


def test_a_twin_has_the_rows_of_an_upload() -> None:
    ids = torch.arange(10)

    def body(servers: Servers, member: int) -> Any:
        job = job_of(servers, member, replicas=1)
        job.begin(1, [0])
        rows = servers.tables.store(0)
        for step in range(3):
            rows.push(ids, torch.ones(10, SPECS[0].width))
            job.step(step)
        cut, before = rows.state(), rows.pull(ids).clone()
        rows.load({name: value.clone() for name, value in cut.items()})
        job.upload()  # as after a resume: whatever there was is gone
        servers.enter(2, [0])
        servers.pull()
        Path("uploaded").touch()
        while not Path("replaced").exists():
            time.sleep(0.001)
        return float((rows.pull(ids) - before).abs().max())

    with fleet(1, replicas=1) as held:

        def besides() -> None:
            while not Path("uploaded").exists():
                time.sleep(0.001)
            held.replace(0)
            Path("replaced").touch()

        assert held.run(1, body, besides=besides) == [0.0]


def test_an_upload_that_is_broken_off_before_its_rows_counts_for_nothing() -> None:
    def body(servers: Servers, member: int) -> Any:
        servers.tables = RemoteTables(SPECS)
        job = Job(servers, member, tables=[spec.model_dump(mode="json") for spec in SPECS])
        assert servers.set_up(job.layout, job.rules)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(RemoteTables, "upload", lambda _: (_ for _ in ()).throw(PeerError("x")))
            with pytest.raises(PeerError):
                job.upload()
        return servers.set_up(job.layout, job.rules)

    with fleet(2) as held:
        assert held.run(1, body) == [True]


def test_a_trainer_that_leaves_in_mid_push_leaves_no_rows() -> None:
    def body(servers: Servers, member: int) -> Any:
        job = job_of(servers, member)
        if member == 1:
            servers.tables.store(0).push(*gradients(0, 1, 0))
            servers.tables.prepare(servers._seq + 1)
            servers.tables.send(servers._links[0])  # and never the push itself
            return None
        time.sleep(0.3)
        servers.enter(2, [0])
        job.version = servers.pull()
        servers.tables.store(0).push(*gradients(0, 0, 0))
        assert job.step(0).kind == "applied"
        return servers.figures()["shard_0_rows_often"]

    with fleet(1) as held:
        found = held.run(TRAINERS, body)
    assert found[0] == len(gradients(0, 0, 0).ids)

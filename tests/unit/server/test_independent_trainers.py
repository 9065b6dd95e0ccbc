"""Trainers that do not wait for each other: bounded staleness, asynchronous, quorum."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest

from echelon.comm.ps.client import Servers
from echelon.core.config import OptimizerSection
from tests.unit.server.fleet import fleet
from tests.unit.server.small_job import SAMPLES, Alone, Job, close

STEPS, DEADLINE = 12, 20.0
ADAGRAD = OptimizerSection(name="adagrad", lr=0.05)


def replayed(records: list[list[int]]) -> tuple[Alone, int]:
    """One process that makes the same updates in the order the gate put on record."""
    alone = Alone(ADAGRAD)
    versions: dict[int, list[tuple[int, int]]] = {}
    for _, start, _, version, member in records:
        versions.setdefault(version, []).append((start // SAMPLES - 1000 * member, member))
    assert sorted(versions) == list(range(1, len(versions) + 1))
    for version in sorted(versions):
        alone.step(versions[version])
    return alone, len(versions)


def gone_through(
    servers: Servers, member: int, trainers: int, *, meets: bool = True, **rules: Any
) -> dict[str, Any]:
    """One trainer's whole run: steps of irregular length, then a meeting."""
    job = Job(servers, member, ADAGRAD, balance=False, **rules)
    job.begin(1, range(trainers))
    pause = random.Random(member)
    found = []
    for step in range(STEPS):
        time.sleep(pause.random() * 0.01)
        found.append(job.step(step, early=True))
    servers.rest()
    while meets and len(servers.records(0)) < trainers * STEPS:
        time.sleep(0.005)
    return {
        "kinds": [o.kind for o in found],
        "staleness": [o.staleness for o in found if o.kind == "applied"],
        "version": servers.pull(begin=False),
        "weights": job.weights(),
        "records": servers.records(0),
        "figures": servers.figures(),
    }


@pytest.mark.parametrize("plane", ["memory", "live", "tcp"])
@pytest.mark.parametrize(("staleness", "shards"), [(0, 1), (2, 2), (None, 2)])
def test_updates_have_one_order_on_all_shards_and_are_never_too_old(
    plane: str, staleness: int | None, shards: int
) -> None:
    trainers = 3
    rules: dict[str, Any] = {"staleness": staleness, "quorum": 1, "live": plane == "live"}
    plane = "memory" if plane == "live" else plane

    def body(servers: Servers, member: int) -> Any:
        return gone_through(servers, member, trainers, **rules)

    with fleet(shards) as held:
        found = held.run(trainers, body, plane=plane)
    for each in found:
        assert each["kinds"] == ["applied"] * STEPS
        assert staleness is None or max(each["staleness"]) <= staleness
        assert each["version"] == trainers * STEPS
    alone, updates = replayed(found[0]["records"])
    assert updates == trainers * STEPS
    for each in found:
        assert close(each["weights"], alone.weights())
        assert each["weights"] == found[0]["weights"]
        figures = each["figures"]
        assert figures["applied"] == STEPS
        assert figures["shard_0_apply_seconds"] > 0
        assert figures["shard_0_gate_applied"] == STEPS
        assert (figures["bytes_pushed"] > 0) == (plane == "tcp")


@pytest.mark.parametrize("plane", ["memory", "tcp"])
def test_a_quorum_waits_for_nobody_and_who_is_late_is_told(plane: str) -> None:
    trainers = 3

    def body(servers: Servers, member: int) -> Any:
        rules = {"staleness": 0, "quorum": 2}
        return gone_through(servers, member, trainers, meets=False, **rules)

    with fleet(2) as held:
        found = held.run(trainers, body, plane=plane)
    last = max(found, key=lambda each: each["version"])
    kinds = [kind for each in found for kind in each["kinds"]]
    assert set(kinds) == {"applied", "late"}
    alone, updates = replayed(last["records"])
    assert updates == last["version"]
    assert sum(kind == "applied" for kind in kinds) == len(last["records"])
    assert close(last["weights"], alone.weights())


def test_one_trainer_asynchronously_is_a_single_process() -> None:
    def body(servers: Servers, member: int) -> Any:
        return gone_through(servers, member, 1, staleness=None, quorum=1)["weights"]

    with fleet(2) as held:
        [found] = held.run(1, body)
    alone = Alone(ADAGRAD)
    for step in range(STEPS):
        alone.step([(step, 0)])
    assert close(found, alone.weights())


def test_live_weights_change_under_whoever_computes_with_them() -> None:
    def body(servers: Servers, member: int) -> Any:
        job = Job(servers, member, staleness=None, quorum=1, live=True)
        job.begin(1, range(2))
        before = servers.weights[0].clone()
        if member == 0:
            servers.rest()
            until = time.monotonic() + DEADLINE
            while servers.weights[0].equal(before) and time.monotonic() < until:
                time.sleep(0.002)
        else:
            job.step(0)
        return not servers.weights[0].equal(before)

    with fleet(2) as held:
        assert held.run(2, body) == [True, True]

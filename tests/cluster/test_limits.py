"""When the system gives no more processes or descriptors, one line says so; none is left behind."""

from __future__ import annotations

import itertools
import os
import re
import resource
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from echelon.cluster.services import Fleet
from echelon.cluster.start import start
from echelon.cluster.supervisor import launch
from echelon.cluster.workers import Member
from echelon.core.config import job_from
from echelon.core.errors import ConfigError, TrainingError
from echelon.core.interfaces import Task
from tests.cluster.shared import Counters, is_alive

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def few_descriptors() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = {int(path.name) for path in Path("/proc/self/fd").iterdir()}
    free = itertools.islice((number for number in itertools.count() if number not in used), 20)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(free), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.usefixtures("few_descriptors")
def test_too_many_members_for_the_descriptors_there_are() -> None:
    with pytest.raises(TrainingError, match=r"30 members could not be started: .*\(ulimit -n"):
        launch(30, lambda _: {}, deadline=5)


def test_a_member_that_cannot_be_held_is_not_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    pids = Counters(2)

    def work(_: Member) -> dict[str, Any]:
        time.sleep(60)
        return {}

    def refuse(pid: int) -> int:
        pids[1 if pids[0] else 0] = pid
        if pids[1]:
            raise OSError(24, "Too many open files")
        return real(pid)

    real = os.pidfd_open
    monkeypatch.setattr(os, "pidfd_open", refuse)
    with pytest.raises(TrainingError, match="member 1 of 3 could not be started: Too many open"):
        launch(3, work, deadline=5)
    assert pids[1]
    assert not [pid for pid in pids.list() if is_alive(pid)]


@pytest.mark.parametrize("address", ["198.51.100.7", "nowhere.invalid", "a\0b"])
@pytest.mark.parametrize("section", ["elastic", "parameter_server"])
def test_an_address_that_is_not_of_this_machine_is_refused_before_there_is_a_run(
    tmp_path: Path, section: str, address: str
) -> None:
    folder = tmp_path / "runs"
    job = job_from(
        {
            "strategy": "parameter_server",
            "track": {"folder": str(folder)},
            section: {"address": address},
        }
    )
    words = re.escape(f"{section}.address = {address!r}: nothing can listen there (")
    with pytest.raises(ConfigError, match=rf"^{words}[\w ]+\); give an IPv4 address"):
        start(job, Task(nn.Identity, lambda _, __: (torch.zeros(()), 1.0)))
    assert not folder.exists()


def test_more_servers_than_there_are_descriptors(
    tmp_path: Path,
    few_descriptors: None,  # noqa: ARG001
) -> None:
    job = job_from({"strategy": "parameter_server", "parameter_server": {"servers": 100}})
    with pytest.raises(TrainingError, match="100 servers cannot be started: Too many open files"):
        Fleet(job, bytes(32), tmp_path / "journal.jsonl")

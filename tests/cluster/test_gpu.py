"""Members of one machine take a GPU each; torchrun says which of them this one is."""

from __future__ import annotations

import pytest
import torch

from echelon.cluster.environment import beside
from echelon.cluster.start import take_gpu
from echelon.core.config import job_from
from echelon.core.errors import ConfigError, UserError
from echelon.loop.build import find_device


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A machine that says it has two GPUs; the last taken is the process's own."""
    found = [0]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", found.append)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: found[-1])
    return found


@pytest.mark.parametrize("name", ["auto", "cuda"])
def test_each_member_has_its_own(taken: list[int], name: str) -> None:
    take_gpu(job_from({"device": name}), 1)
    assert taken == [0, 1]
    assert find_device(name) == torch.device("cuda:1")


def test_a_cpu_job_takes_none(taken: list[int]) -> None:
    take_gpu(job_from({"device": "cpu"}), 5)
    assert taken == [0]
    assert find_device("cpu") == torch.device("cpu")


@pytest.mark.usefixtures("taken")
def test_members_cannot_share_one() -> None:
    with pytest.raises(ConfigError, match="member 2 of this machine has no GPU of its own"):
        take_gpu(job_from({}), 2)
    with pytest.raises(ConfigError, match="'cuda:1' is one GPU, and 2 members"):
        take_gpu(job_from({"device": "cuda:1", "workers": 2}), 0)


def test_without_gpus_there_is_nothing_to_take(
    taken: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    take_gpu(job_from({}), 3)
    assert taken == [0]


def test_torchrun_says_who_shares_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "5", "WORLD_SIZE": "6"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert beside() == (5, 6)
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert beside() == (1, 2)
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(UserError, match="LOCAL_RANK = '2': it must be a whole number, 0 to 1"):
        beside()

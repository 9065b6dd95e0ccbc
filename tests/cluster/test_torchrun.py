"""A process that torchrun started finds its place and meets the others there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from echelon.cluster.environment import joined
from echelon.cluster.start import start
from echelon.core.config import job_from
from echelon.core.errors import ConfigError, UserError
from echelon.core.interfaces import Task

pytestmark = pytest.mark.timeout(180)

VARIABLES = {
    "RANK": "1",
    "WORLD_SIZE": "4",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}
OTHERS = (
    "LOCAL_RANK",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_USE_AGENT_STORE",
)


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*VARIABLES, *OTHERS):
        monkeypatch.delenv(name, raising=False)


def give(monkeypatch: pytest.MonkeyPatch, **changes: str) -> None:
    for name, value in (VARIABLES | changes).items():
        monkeypatch.setenv(name, value)


def test_without_torchrun_there_is_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    assert joined() is None
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")  # says where, not that we are a member
    assert joined() is None


def test_the_agent_serves_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    give(monkeypatch, TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_RUN_ID="abc")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    place = joined(deadline=30)
    assert place is not None
    assert (place.index, place.count, place.host, place.port) == (1, 4, "127.0.0.1", 29500)
    assert (place.served, place.listener, place.deadline) == (True, None, 30)
    assert place.name == "echelon/abc/2"


def test_without_an_agent_member_0_serves_it(monkeypatch: pytest.MonkeyPatch) -> None:
    give(monkeypatch, RANK="0")
    place = joined()
    assert place is not None
    assert not place.served


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
def test_a_missing_variable_is_named(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    give(monkeypatch)
    monkeypatch.delenv(name)
    with pytest.raises(UserError, match=f"is set but {name} is not: start with torchrun"):
        joined()


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("RANK", "4", "0 to 3"),
        ("RANK", "-1", "0 to 3"),
        ("RANK", "one", "0 to 3"),
        ("WORLD_SIZE", "0", "at least 1"),
        ("MASTER_PORT", "70000", "1 to 65535"),
    ],
)
def test_a_wrong_variable_is_named(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, rule: str
) -> None:
    give(monkeypatch, **{name: value})
    with pytest.raises(UserError, match=f"{name} = '{value}': it must be a whole number, {rule}"):
        joined()


SCRIPT = """
import dataclasses, json, os, sys
from pathlib import Path
from datetime import timedelta
from torch.distributed import PrefixStore, TCPStore
import torch.distributed as dist
from echelon.cluster.environment import joined

place = joined()
store = TCPStore(place.host, place.port, is_master=place.index == 0 and not place.served,
                 timeout=timedelta(seconds=60), wait_for_workers=False)
dist.init_process_group("gloo", store=PrefixStore(place.name, store), rank=place.index,
                        world_size=place.count)
dist.barrier()
if "TORCHELASTIC_RESTART_COUNT=0" in sys.argv and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    sys.exit(3)
Path(f"{place.index}.json").write_text(json.dumps(dataclasses.asdict(place)))
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"strategy": "parameter_server"}, "torchrun starts trainers only"),
        ({}, "torchrun started 4 processes, and strategy 'single' is one"),
        ({"strategy": "all_reduce", "workers": 3}, "workers = 3, but torchrun started 4"),
        (
            {"strategy": "all_reduce", "elastic": {"enabled": True}},
            "elastic.enabled has no effect among processes that torchrun started",
        ),
    ],
)
def test_a_job_that_torchrun_cannot_start_is_refused(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], words: str
) -> None:
    give(monkeypatch)
    with pytest.raises(ConfigError, match=words):
        start(job_from(settings), Task(nn.Identity, lambda _, __: (torch.zeros(()), 1.0)))


def torchrun(folder: Path, *options: str, arguments: tuple[str, ...] = (), **env: str) -> list[str]:
    """Two members of a real torchrun: what each said of its place."""
    script = folder / "member.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--log-dir", str(folder / "torchrun")),  # it leaves it behind
            *("--nproc-per-node=2", *options, str(script), *arguments),
        ],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1", **env},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [(folder / f"{index}.json").read_text() for index in range(2)]


def test_members_of_torchrun_meet_and_meet_again_after_a_restart(tmp_path: Path) -> None:
    arguments = ("TORCHELASTIC_RESTART_COUNT=0",)
    found = torchrun(tmp_path, "--max-restarts=1", arguments=arguments)
    places = [json.loads(text) for text in found]
    assert [place["index"] for place in places] == [0, 1]
    assert [place["count"] for place in places] == [2, 2]
    assert all(place["served"] for place in places), "on the same store"
    assert all(place["name"].endswith("/1") for place in places)
    assert places[0]["port"] == places[1]["port"] > 0


def test_members_meet_where_torchrun_does_not_share_its_store(tmp_path: Path) -> None:
    places = torchrun(tmp_path, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
    assert not any(json.loads(text)["served"] for text in places)

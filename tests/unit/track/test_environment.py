"""Facts of the machine, also inside a container."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from echelon.track import environment


def test_the_machine_is_described() -> None:
    found = environment.environment()
    assert found["torch"].startswith("2.")
    assert found["python"].count(".") == 2
    assert found["cpu"]
    assert found["os"]
    assert 1 <= found["cores"] <= (os.cpu_count() or 1)
    assert found["memory"] > 100_000_000
    assert found["disk_free"] > 0


def test_a_container_s_limits_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in (
        ("cpu.max", "150000 100000\n"),
        ("memory.max", "500000000\n"),
        ("memory.current", "400000000\n"),
    ):
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(environment, "_CGROUP", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(16)))
    assert environment.cpu_quota() == 1.5
    assert environment.usable_cores() == 2
    assert environment.memory_bytes() == 500_000_000
    assert environment.memory_free() == 100_000_000


def test_a_container_without_limits_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = environment.memory_bytes()
    (tmp_path / "cpu.max").write_text("max 100000\n")
    (tmp_path / "memory.max").write_text("max\n")
    monkeypatch.setattr(environment, "_CGROUP", tmp_path)
    assert environment.cpu_quota() is None
    assert environment.memory_bytes() == before


def test_a_package_that_is_not_there_has_no_version() -> None:
    assert environment.package_version("no-such-package-at-all") is None


def test_the_nearest_folder_that_exists(tmp_path: Path) -> None:
    assert environment.existing(tmp_path / "a" / "b") == tmp_path.resolve()

"""`echelon doctor`."""

from __future__ import annotations

import json
import os
import shutil
import socket
import sys
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

from echelon.cli.doctor import doctor
from echelon.track import Store, environment
from echelon.track import doctor as checks

Usage = namedtuple("Usage", ["total", "used", "free"])


def _run(*arguments: str) -> tuple[int, str]:
    app = typer.Typer()
    app.command()(doctor)
    found = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    return found.exit_code, found.output


def test_this_machine_is_fit_to_run_the_tests() -> None:
    code, said = _run("--json")
    found = json.loads(said)
    names = [check["name"] for check in found["checks"]]
    assert names == [
        "python",
        "torch",
        "cores",
        "memory",
        "disk",
        "shared memory",
        "gpu",
        "ports",
        "store",
        "bf16",
    ]
    assert found["ok"] is (code == 0)
    by_name = {check["name"]: check for check in found["checks"]}
    assert by_name["python"]["verdict"] == "ok"
    assert by_name["torch"]["figure"].startswith(torch.__version__)
    assert by_name["ports"]["verdict"] == "ok"
    assert all(check["meaning"].endswith(".") for check in found["checks"])


def test_the_table_names_each_check_and_what_it_means() -> None:
    _, said = _run()
    assert "shared memory" in said
    assert "Processes on this machine can connect." in said
    assert "\x1b" not in said


def test_looking_leaves_nothing_behind(tmp_path: Path) -> None:
    _run("--folder", str(tmp_path / "runs"))
    assert list(tmp_path.iterdir()) == []


def test_a_failed_check_is_the_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "memory_free", lambda: 500_000_000)
    code, said = _run()
    assert code == 1
    assert "FAIL" in said


def test_an_old_python_fails() -> None:
    assert checks.check_python((3, 10, 4)) == (
        "python",
        "fail",
        "3.10.4",
        "Echelon needs Python 3.11 or newer.",
    )


def test_more_threads_than_cores_are_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64)
    assert checks.check_torch().verdict == "warn"


@pytest.mark.parametrize(
    ("check", "verdict"), [(checks.check_torch, "fail"), (checks.check_gpu, "warn")]
)
def test_without_torch_nothing_can_be_trained(
    check: Callable[[], checks.Check], verdict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert check().verdict == verdict


def test_one_core_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "usable_cores", lambda: 1)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    found = checks.check_cores()
    assert (found.verdict, found.figure) == ("warn", "1 usable of 8")


@pytest.mark.parametrize(("free", "verdict"), [(5e8, "fail"), (2e9, "warn"), (3.2e10, "ok")])
def test_memory(free: float, verdict: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "memory_free", lambda: free)
    assert checks.check_memory().verdict == verdict


def test_memory_says_how_large_a_model_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "memory_free", lambda: 32e9)
    assert "1.0 billion parameters" in checks.check_memory().meaning


@pytest.mark.parametrize(("free", "verdict"), [(1e8, "fail"), (5e9, "warn"), (1e12, "ok")])
def test_disk(free: float, verdict: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _place: Usage(0, 0, free))
    assert checks.check_disk(tmp_path).verdict == verdict


@pytest.mark.parametrize(("free", "verdict"), [(1e6, "fail"), (6.4e7, "warn"), (1e10, "ok")])
def test_shared_memory(free: float, verdict: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _place: Usage(0, 0, free))
    assert checks.check_shared_memory().verdict == verdict


def test_a_machine_without_dev_shm_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "_SHM", tmp_path / "none")
    assert checks.check_shared_memory().verdict == "warn"


def test_memory_that_forgets_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    class Forgetful:
        def __enter__(self) -> Any:
            return self

        def __exit__(self, *_: object) -> None: ...

        def __setitem__(self, _where: slice, _value: bytes) -> None: ...

        def __getitem__(self, _where: int) -> int:
            return 0

    monkeypatch.setattr("mmap.mmap", lambda *_: Forgetful())
    found = checks._tried("shared memory", checks.check_shared_memory)
    assert found.verdict == "fail"
    assert "does not keep what is written" in found.meaning


def test_a_port_that_cannot_be_bound_fails_without_stopping_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError("not here")

    monkeypatch.setattr(socket, "create_server", refuse)
    found = {check.name: check for check in checks.check_all(tmp_path)}
    assert found["ports"][1:] == ("fail", "did not work", "PermissionError: not here")
    assert found["store"].verdict == "ok"


def test_bytes_lost_on_loopback_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    class Lossy:
        """Sends something else than it was given."""

        def __init__(self, address: tuple[str, int], seconds: float) -> None:
            self._real = socket.socket()
            self._real.settimeout(seconds)
            self._real.connect(address)

        def __enter__(self) -> Lossy:
            return self

        def __exit__(self, *_: object) -> None:
            self._real.close()

        def sendall(self, _bytes: bytes) -> None:
            self._real.sendall(b"nothing")

    monkeypatch.setattr(socket, "create_connection", Lossy)
    assert checks.check_ports().verdict == "fail"


def test_a_store_that_is_there_is_read(store: Store, trained: Callable[..., str]) -> None:
    trained()
    found = checks.check_store(store.folder)
    assert (found.verdict, found.figure) == ("ok", f"1 runs in {store.path}")


def test_a_corrupt_store_fails(store: Store) -> None:
    store.folder.mkdir()
    store.path.write_bytes(b"no database" * 1000)
    found = checks._tried("store", lambda: checks.check_store(store.folder))
    assert found.verdict == "fail"
    assert "echelon.db" in found.meaning


def test_a_damaged_page_fails(store: Store) -> None:
    store.create("digits", {"filler": "x" * 100_000}, {})
    whole = bytearray(store.path.read_bytes())
    half = len(whole) // 2 // 4096 * 4096
    whole[half : half + 4096] = b"\xee" * 4096
    store.path.write_bytes(bytes(whole))
    assert checks._tried("store", lambda: checks.check_store(store.folder)).verdict == "fail"


def test_a_file_system_without_a_log_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("echelon.track.store._use_wal", lambda _connection: None)
    found = checks.check_store(tmp_path)
    assert (found.verdict, found.figure) == ("warn", "journal delete")


def test_a_gpu_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(name="A100", total_memory=40_000_000_000)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _index: properties)
    real = torch.ones
    monkeypatch.setattr(torch, "ones", lambda size, **_device: real(size))
    found = checks.check_gpu()
    assert (found.verdict, found.figure) == ("ok", "2 × A100, 40 GB")

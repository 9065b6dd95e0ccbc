"""`python -m echelon` as a process of its own, forked from one that has imported torch already.

The import takes most of the time of a short command. A server imports it once for all tests of a
session; each command is a fork of it with its own folder, arguments and files for its text.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from types import TracebackType
from typing import IO

from echelon.cluster.environment import calm_threads

_PRELOADED = ["echelon.cli.train", "sklearn.datasets"]
_FORKS = multiprocessing.get_context("forkserver")


def serve() -> None:
    """Start the server, so that it is there before any test."""
    calm_threads()  # as the command does before it imports torch
    _FORKS.set_forkserver_preload(_PRELOADED)
    resource_tracker.ensure_running()
    forkserver.ensure_running()


def forks() -> multiprocessing.context.ForkServerContext:
    """For processes that are no commands."""
    return _FORKS


class Command:
    """A command that runs, as `subprocess.Popen` shows one."""

    def __init__(self, arguments: Sequence[str], folder: Path) -> None:
        self._output, self._errors = (_file() for _ in range(2))
        names = (self._output.name, self._errors.name)
        self._process = _FORKS.Process(target=_be, args=(arguments, str(folder), *names))
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    @property
    def errors(self) -> str:
        return Path(self._errors.name).read_text(encoding="utf-8")

    def communicate(self, timeout: float) -> tuple[str, str]:
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("echelon", timeout, stderr=self.errors.encode())
        return Path(self._output.name).read_text(encoding="utf-8"), self.errors

    def __enter__(self) -> Command:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None
    ) -> None:
        if kind is not None and self.returncode is None:
            os.kill(self.pid, signal.SIGKILL)
        self._process.join()
        self._output.close()
        self._errors.close()


def _file() -> IO[bytes]:
    return tempfile.NamedTemporaryFile(prefix="text-")


def _be(arguments: Sequence[str], folder: str, output: str, errors: str) -> None:
    """What `python -m echelon` is in this folder."""
    for number, path in enumerate((os.devnull, output, errors)):
        descriptor = os.open(path, os.O_WRONLY if number else os.O_RDONLY)
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.chdir(folder)
    sys.path.insert(0, folder)
    sys.argv = ["echelon", *arguments]
    runpy.run_module("echelon", run_name="__main__", alter_sys=True)

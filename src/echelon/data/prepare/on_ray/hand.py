"""A worker on a Ray cluster: an actor that has one core of some node."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from echelon.core.process import keep_freed_memory
from echelon.data.prepare.answers import WorkerError, answered
from echelon.data.prepare.on_ray.node import Check, look_again

if TYPE_CHECKING:
    from echelon.data.prepare.work import Work

TRIES = 4
"""A task is given again when its worker dies, but not to kill one after the other."""


class Hand:
    """Makes a table of one answer of a table of one task; raises nothing."""

    def __init__(
        self,
        enter: Callable[[], None],
        setting: Mapping[str, Any],
        folder: str,
        run: str,
        check: Check,
    ) -> None:
        """`enter` raises if it is all over; `folder`: where whoever began it is; `run` tells one
        start of it from another."""
        enter()
        self._setting, self._folder, self._run, self._check = setting, folder, run, check
        self._known: Work | None = None

    def __call__(self, tasks: pa.Table) -> pa.Table:
        (text,), (data,) = tasks["task"].to_pylist(), tasks["data"].to_pylist()
        answer = answered(self._do, *json.loads(text), data)
        return pa.table({"answer": [json.dumps(answer)]})

    def _do(self, told: str, task: Mapping[str, Any], data: bytes) -> Any:
        self._known = self._known or self._begin()
        look_again(self._known.desk)
        begun = self._known.desk.path(task["stage"], task["number"], f"begun-{self._run}")
        try:
            with _counted(begun, told):
                return self._known.do(task, memoryview(data))
        except OSError as error:
            why = f"{error.strerror} (on node {socket.gethostname()})"
            raise OSError(error.errno, why, error.filename) from None

    def _begin(self) -> Work:
        """As worker processes do: one thread, and the folder of whoever began it."""
        from threadpoolctl import threadpool_limits

        from echelon.data.prepare.work import Work, one_thread

        self._check()
        if Path(self._folder).is_dir():  # without it only whole paths are found
            os.chdir(self._folder)
        keep_freed_memory()
        one_thread()
        work = Work(self._setting)
        threadpool_limits(1)
        return work


@contextmanager
def _counted(begun: Path, told: str) -> Iterator[None]:
    """One byte for each time that it was begun and not ended."""
    with begun.open("ab") as file:
        file.write(b".")
        tries = file.tell()
    if tries > TRIES:
        begun.unlink()
        raise WorkerError(f"workers have died {TRIES} times at: {told} (is there enough memory?)")
    yield
    begun.unlink()

"""The third kind of pool: workers on the machines of a Ray cluster, which share a file system.

The desk, the inputs and Echelon itself must be the same on every node: each is asked before
anything is done, and every worker looks again where it begins.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import echelon
from echelon.data.prepare.answers import Answer, WorkerError, result_of
from echelon.data.prepare.desk import Desk
from echelon.data.prepare.inputs import Source
from echelon.data.prepare.on_ray.cluster import connected, in_a_line
from echelon.data.prepare.on_ray.node import Check, check_here
from echelon.data.prepare.pool import Task
from echelon.data.prepare.remote import is_remote
from echelon.data.readers.stream import plain_name

TOKEN = "token"
_LOOK_SECONDS = 120.0


class OnRay:
    """`workers` of a cluster, or as many as it has cores."""

    def __init__(
        self,
        address: str,
        workers: int | None,
        setting: Mapping[str, Any],
        read: Sequence[Source],
    ) -> None:
        token = secrets.token_hex(8)
        check = _check(Desk(Path(setting["desk"]).absolute()), token, read)
        with ExitStack() as stack:
            stack.enter_context(connected(address, workers))
            from echelon.data.prepare.on_ray.stream import Stream, cores

            ask_nodes(check)
            self._stream = Stream(workers or cores(), setting, str(Path.cwd()), token, check)
            stack.enter_context(closing(self._stream))
            self._open = stack.pop_all()

    def map(self, tasks: Iterable[Task]) -> Iterator[Any]:
        waiting = iter(tasks)
        told: deque[str] = deque()
        while True:
            for task in islice(waiting, self._stream.room - len(told)):
                self._stream.put(*task)
                told.append(task.told)
            if not told:
                return
            answer = self._answer(told)
            yield result_of(answer, told.popleft())

    def _answer(self, told: Iterable[str]) -> Answer:
        try:
            return self._stream.take()
        except Exception as error:
            at = ", ".join(dict.fromkeys(told))
            raise WorkerError(
                f"Ray gave up: {in_a_line(error)} (under way: {at}); start again to go on"
            ) from error

    def close(self) -> None:
        self._open.close()


def _check(desk: Desk, token: str, read: Sequence[Source]) -> Check:
    """What a node has to see: a mark on the desk, and files that workers read by themselves."""
    desk.remember(TOKEN, token)
    files = [
        (str(Path(one.file).absolute()), one.size)
        for one in read
        if not is_remote(one.file) and plain_name(Path(one.file)) == Path(one.file).name
    ]
    return partial(check_here, echelon.__version__, desk, TOKEN, token, files)


def ask_nodes(check: Check) -> None:
    import ray
    from ray.exceptions import GetTimeoutError, RayError

    from echelon.data.prepare.on_ray.stream import looks

    for name, coming in looks(check):
        try:
            result_of(ray.get(coming, timeout=_LOOK_SECONDS), f"node {name}")
        except GetTimeoutError:
            raise WorkerError(f"node {name} has not answered for {_LOOK_SECONDS:.0f} s") from None
        except RayError as error:
            raise WorkerError(f"node {name} cannot take part: {in_a_line(error)}") from None

"""Members as real processes, with deadlines; the output of one that fails is shown."""

from __future__ import annotations

import platform
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from echelon.comm import Group, Place
from tests.children import answers, fork, wait

Body = Callable[[Group], Any]
"""One member's part; what it returns has to be JSON."""


def run(
    count: int,
    body: Body,
    *,
    hosts: str | None = None,
    patience: float = 30.0,
    within: float = 100.0,
    may_die: Sequence[int] = (),
    machines: Sequence[str] | None = None,
) -> list[Any]:
    """What `body(group)` returned in each member, None for one that died, or froze, and may.

    `hosts`: a letter per member, the host it pretends to be on; `machines`: what it is.
    """
    with socket.create_server(("127.0.0.1", 0)) as listener:
        places = [
            Place(i, count, port=listener.getsockname()[1], deadline=patience) for i in range(count)
        ]
        kinds = machines or [platform.machine()] * count
        names = hosts or [None] * count
        children = [
            fork(partial(_take_part, place, listener, _Pretence(name, kind), body))
            for place, name, kind in zip(places, names, kinds, strict=True)
        ]
    try:
        wait([child for i, child in enumerate(children) if i not in may_die], within)
        return answers(children, may_die)
    finally:
        for child in children:
            child.end()


class _Pretence(NamedTuple):
    host: str | None
    machine: str


def _take_part(place: Place, listener: socket.socket, pretence: _Pretence, body: Body) -> Any:
    if place.index == 0:
        place = replace(place, listener=listener.detach())
    else:
        listener.close()
    platform.machine = lambda: pretence.machine
    group = Group(place, host=pretence.host)
    try:
        return body(group)
    finally:
        group.close()


def traces() -> dict[str, int]:
    """What this process holds: descriptors, threads, mapped segments."""
    descriptors = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            descriptors.append(str(entry.readlink()))
        except OSError:  # the listing's own
            continue
    return {
        "descriptors": len([name for name in descriptors if not name.startswith("/proc")]),
        "threads": _threads(),
        "segments": Path("/proc/self/maps").read_text().count("memfd:echelon"),
    }


def _threads() -> int:
    """Once those that were joined are gone from the kernel's list too."""
    deadline = time.monotonic() + 1.0
    while (count := len(list(Path("/proc/self/task").iterdir()))) > 1:
        if time.monotonic() > deadline:
            break
        time.sleep(0.001)
    return count


def bits(tensors: Sequence[Tensor]) -> int:
    """The same for the same bits."""
    held = [t.detach().contiguous().view(-1).view(torch.uint8) for t in tensors]
    return hash(bytes(torch.cat(held).numpy()))

"""Messages about rows that are wrong in random ways, against a real server process.

    python -m tests.fuzz.rows --count 300000

Frames are right, what they say is not: heads, sizes, places in shared memory, outlines, ids out of
order, numbers of questions that nobody asked. Whoever says it has the run's key. Now and then a
trainer does what trainers do, and has to find what it would have found without all that.
The last line is JSON: how many messages there were, and how many times something went wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import socket
import struct
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from echelon.comm.channel import Connection, Segment, connect
from echelon.comm.ps.client import Plan, Servers
from echelon.comm.ps.layout import Layout
from echelon.comm.ps.messages import Kind, RowHead, ShardAddress, outline, pack_rows
from echelon.comm.ps.rows import RemoteTables
from echelon.core.errors import PeerError
from echelon.core.types import Lease, RowRule, RowSpec
from echelon.server.process import serve
from echelon.server.shard import ServerSettings

KEY = bytes(range(32))
WIDTH, IDS = 4, 50
PATIENCE = 60.0
_CHECK = 2000
"""Messages between two looks of a trainer."""
_ROOM = 1 << 16
_RULE = RowRule(name="sgd", lr=1.0)
SPECS = [
    RowSpec(name="plain", width=WIDTH, seed=0, rule=_RULE),
    RowSpec(name="late", width=WIDTH, seed=1, rule=_RULE, admit=3),
    RowSpec(name="short", width=WIDTH, seed=2, rule=_RULE, expire=5),
]
_RULES = {
    "optimizer": {"name": "sgd", "lr": 0.1},
    "staleness": 0,
    "quorum": "all",
    "samples": 1 << 40,
    "tables": [spec.model_dump(mode="json") for spec in SPECS],
}


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--count", type=int, default=300_000)
    options.add_argument("--seed", type=int, default=0)
    given = options.parse_args()
    found = run(given.count, given.seed)
    print(json.dumps(found), flush=True)
    sys.exit(1 if found["wrong"] or found["crashes"] else 0)


def run(count: int, seed: int) -> dict[str, float]:
    tcp, near = socket.create_server(("127.0.0.1", 0)), socket.socket(socket.AF_UNIX)
    name = f"echelon-fuzz-rows-{os.getpid()}"
    near.bind(f"\0{name}")
    near.listen()
    shard = ShardAddress(0, "127.0.0.1", tcp.getsockname()[1], name)
    with tempfile.TemporaryFile("w+") as said:
        pid = os.fork()
        if not pid:
            os.dup2(said.fileno(), 2)
            serve([tcp, near], ServerSettings(0, (shard,), KEY, PATIENCE))
            os._exit(0)
        tcp.close()
        near.close()
        began = time.monotonic()
        attack = Attack(shard, random.Random(seed), pid)
        try:
            attack.run(count)
        except PeerError as error:
            print(f"after {attack.sent:,}: {error}", file=sys.stderr)
            attack.wrong += 1
        ended = os.waitpid(pid, os.WNOHANG)[0]
        if not ended:
            os.kill(pid, 9)
            os.waitpid(pid, 0)
        said.seek(0)
        lines = said.read()
    if ended:
        print(lines[-3000:], file=sys.stderr)
    return {
        "messages": attack.sent,
        "answered": attack.answered,
        "hung_up": lines.count("is hung up on"),
        "wrong": attack.wrong,
        "crashes": int(bool(ended)),
        "grown_mb": round(attack.grown / 1e6, 1),
        "seconds": round(time.monotonic() - began, 1),
    }


class Attack:
    def __init__(self, shard: ShardAddress, rng: random.Random, pid: int) -> None:
        self._shard, self._rng, self._pid = shard, rng, pid
        weight = nn.Parameter(torch.zeros(8))
        self._layout = Layout.of(["weight"], [weight], [True])
        self._document = Plan.of(self._layout, 1, _RULES).document
        self.sent = self.answered = self.wrong = 0
        self.grown = 0
        self._good = Good(shard, self._layout)

    def run(self, count: int) -> None:
        first = 0
        while self.sent < count:
            before = self.sent // _CHECK
            self._talk(memory=self._rng.random() < 0.5)
            if self.sent // _CHECK > before:
                self.wrong += not self._good.finds_what_it_should(self._rng)
                first = first or _memory(self._pid)
                if before % 10 == 0:
                    print(f"{self.sent:,} of {count:,}", file=sys.stderr, flush=True)
        self.grown = _memory(self._pid) - first
        self._good.close()

    def _talk(self, *, memory: bool) -> None:
        """Until it is hung up on."""
        where: Any = self._shard.name if memory else (self._shard.host, self._shard.port)
        caller = connect(where, KEY, role="trainer 7", deadline=PATIENCE)
        try:
            caller.limit = 1 << 30
            caller.send(Kind.SET_UP, {"member": 7}, [self._document], seq=1)
            caller.receive(PATIENCE)
            if memory:
                self._share(caller)
            for number in range(2, 60):
                self.sent += 1
                self._say(caller, number, memory)
        except PeerError as error:
            if "closed the connection" not in str(error):
                raise
        finally:
            caller.close()

    def _share(self, caller: Connection) -> None:
        for area in range(4):
            segment = Segment.create(_ROOM)
            segment.tensor.random_()
            caller.send(Kind.ROW_ROOM, {"area": area, "size": _ROOM}, seq=1)
            caller.send_segment(segment)
            segment.close()
            caller.receive(PATIENCE)

    def _say(self, caller: Connection, number: int, memory: bool) -> None:
        rng = self._rng
        kind, head, body = rng.choice(_SAYINGS)(rng, memory)
        caller.send(kind, head, body, seq=number)
        if kind == Kind.ROW_GRADIENTS:  # nobody answers those
            return
        if caller.receive(PATIENCE) is None:
            raise PeerError(f"neither an answer to {kind!r} {head!r} nor an end: a hang")
        self.answered += 1


class Good:
    """A trainer that knows what its rows should be."""

    def __init__(self, shard: ShardAddress, layout: Layout) -> None:
        self._servers = Servers([shard], KEY, 0, plane="tcp", deadline=PATIENCE)
        self._servers.tables = RemoteTables(SPECS)
        self._servers.set_up(layout, _RULES)
        self._rows = self._servers.tables.store(0)
        self._at = 0

    def finds_what_it_should(self, rng: random.Random) -> bool:
        """Rows as they were loaded, and after an update what that makes of them."""
        ids = torch.arange(IDS)
        rows = torch.full((IDS, WIDTH), rng.random())
        self._rows.load({"ids": ids, "rows": rows, "facts": torch.tensor([0, 0])})
        weight = torch.zeros(8)
        self._servers.upload({"model": {"weight": weight}, "version": 0})
        self._servers.enter(1, [0])
        version = self._servers.pull()
        same = torch.equal(self._rows.pull(ids), rows)
        self._rows.push(ids, torch.ones(IDS, WIDTH))
        self._at += 1
        self._servers.push(Lease(0, 0, 1), version, [1.0, 1.0, 1.0, 0.0, 0.01])
        made = self._servers.outcome()
        return same and made.kind == "applied" and torch.equal(self._rows.pull(ids), rows - 1)

    def close(self) -> None:
        self._servers.close()


def _head(rng: random.Random, memory: bool, **right: Any) -> RowHead:
    """Right for the most part."""
    values: dict[str, Any] = {
        "table": rng.choice((0, 0, 1, 2, 3, 65535)),
        "size": rng.choice((0, 1, 7, 50, 5000, (1 << 32) - 1)),
        "counted": rng.random() < 0.3,
        "more": rng.random() < 0.3,
        "shared": memory if rng.random() < 0.9 else not memory,
        "place": rng.choice((0, 0, 64, 100, _ROOM - 64, (1 << 64) - 1, rng.getrandbits(64))),
        "area": rng.choice((0, 0, 1, 2, 3, 4, 31)),
    }
    return RowHead(**values | {key: right[key] for key in right if rng.random() < 0.8})


def _packed(rng: random.Random, head: RowHead) -> bytes:
    packed = pack_rows(head)
    choice = rng.random()
    if choice < 0.02:
        return packed[: rng.randrange(len(packed))]
    if choice < 0.04:
        return rng.randbytes(rng.randrange(40))
    return packed


def _numbers(rng: random.Random, size: int) -> bytes:
    ids = [rng.choice((rng.getrandbits(64), at)) for at in range(size)]
    return struct.pack(f"<{size}Q", *(sorted(ids) if rng.random() < 0.5 else ids))


def _body(rng: random.Random, size: int) -> list[bytes]:
    """Of so many bytes, or nearly."""
    wrong = rng.choice((0, 0, 0, 0, 0, 1, -1, 8, 4096))
    return [rng.randbytes(max(0, min(size, 1 << 20) + wrong))]


def rows(rng: random.Random, memory: bool) -> tuple[Kind, bytes, list[bytes]]:
    size = rng.choice((0, 1, 7, 50, 300))
    head = _head(rng, memory, table=rng.randrange(3), size=size)
    body = [_numbers(rng, size)] if rng.random() < 0.9 else _body(rng, 8 * size)
    return Kind.ROWS, _packed(rng, head), [] if head.shared else body


def changes(rng: random.Random, memory: bool) -> tuple[Kind, bytes, list[bytes]]:
    head = _head(rng, memory, place=rng.randrange(60))
    return Kind.ROW_CHANGES, _packed(rng, head), _body(rng, 8) if rng.random() < 0.1 else []


def gradients(rng: random.Random, memory: bool) -> tuple[Kind, bytes, list[bytes]]:
    size = rng.choice((1, 7, 50, 300))
    head = _head(rng, memory, table=rng.randrange(3), size=size)
    each = 4 * WIDTH + (4 if head.counted else 0)
    body = [_numbers(rng, size), *_body(rng, each * size)]
    return Kind.ROW_GRADIENTS, _packed(rng, head), [] if head.shared else body


def state(rng: random.Random, _: bool) -> tuple[Kind, dict[str, Any], list[bytes]]:
    fields: dict[str, Any] = {
        "table": rng.choice((0, 1, 2, 3, -1, 1.5, "x", None, 1 << 70)),
        "whole": rng.choice((True, False, 1, "y", None, [])),
        "start": rng.choice((0, 2, -1, 1 << 70, None, "z", 1.5)),
        "count": rng.choice((0, 1, 100, -1, 1 << 70, None, [])),
    }
    for key in list(fields):
        if rng.random() < 0.2:
            del fields[key]
    return Kind.ROW_STATE, fields, []


def load(rng: random.Random, _: bool) -> tuple[Kind, dict[str, Any], list[bytes]]:
    size, table = rng.choice((0, 1, 30)), rng.randrange(3)
    tensors = {
        "ids": torch.randperm(1000)[:size] - 500,
        "rows": torch.rand(size, rng.choice((WIDTH, WIDTH, WIDTH, 3))),
        "facts": torch.tensor([rng.getrandbits(62), rng.choice((0, 5, 1 << 40))]),
    }
    if table == 1 or rng.random() < 0.05:
        for key, kind in (("ids", torch.int64), ("counts", torch.int32), ("seen", torch.int32)):
            tensors[f"waiting_{key}"] = torch.arange(5).to(kind)
    if table == 2 or rng.random() < 0.05:
        tensors["seen"] = torch.arange(size).int()
    lines: Any = outline(tensors)
    body = [value.numpy().tobytes() for value in tensors.values()]
    if rng.random() < 0.4:
        lines = _twisted(rng, lines)
    if rng.random() < 0.1:
        body = _body(rng, sum(map(len, body)))
    more = rng.choice((True, False, False, None, "no"))
    return Kind.ROW_LOAD, {"table": table, "more": more, "outline": lines}, body


def _twisted(rng: random.Random, lines: list[Any]) -> Any:
    at = rng.randrange(len(lines))
    match rng.randrange(7):
        case 0:
            lines[at] = rng.choice((None, [], [1, 2], "ids", ["ids", "float16", 3]))
        case 1:
            lines[at][-1] = rng.choice((-1, 1 << 39, 1 << 60, 1.5, None, True))
        case 2:
            lines[at][1] = rng.choice(("float64", "int64", "int32", "float32"))
        case 3:
            lines[at][0] = rng.choice(("", "ids", "rows", "facts", "x" * 300, "\0"))
        case 4:
            del lines[at]
        case 5:
            lines += lines * rng.choice((1, 20))
        case 6:
            return rng.choice((None, {}, 7, []))
    return lines


def room(rng: random.Random, _: bool) -> tuple[Kind, dict[str, Any], list[bytes]]:
    """Without a segment behind it, or over TCP."""
    area = rng.choice((0, 1, 4, -1, True, "0", None))
    size = rng.choice((-1, 0, 1 << 62, "4096", None, 1.0))
    return Kind.ROW_ROOM, {"area": area, "size": size}, []


_SAYINGS: list[Any] = [rows, rows, rows, gradients, gradients, changes, changes, state, load, room]


def _memory(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * resource.getpagesize()


if __name__ == "__main__":
    main()

"""Frames that are wrong in random ways, by the million, against a real listener.

    python -m tests.fuzz.frames --count 1000000

Each goes over a connection of its own, plain or sealed, to a process that serves as a parameter
server would. Some of the callers show no key, a wrong one, or say nothing that can be understood.
The last line is JSON: how many there were, and how many times something went wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import socket
import sys
import threading
import time
import traceback
from pathlib import Path

from echelon.comm.channel import Address, Listener
from echelon.comm.channel.sockets import address_of, open_socket, serve_socket
from echelon.core.errors import PeerError
from tests.unit.comm.channel.mutants import Wrong, greet, mutated, serve

KEY = bytes(range(32))
HANG = 60.0
"""Seconds: a caller on a busy machine may be slow, too."""
_END = 20.0
"""Seconds without a caller after which there will be none."""
STRANGERS = 0.02
"""The part of the callers who do not get as far as a frame."""


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--count", type=int, default=1_000_000)
    options.add_argument("--seed", type=int, default=0)
    given = options.parse_args()
    found = run(given.count, given.seed)
    print(json.dumps(found), flush=True)
    sys.exit(1 if found["wrong"] or found["hangs"] or found["crashes"] else 0)


def run(count: int, seed: int) -> dict[str, float]:
    held = serve_socket(f"echelon-fuzz-{os.getpid()}")
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(reading)
        _serve(held, writing)
    os.close(writing)
    address = address_of(held)
    held.close()
    began = time.monotonic()
    with os.fdopen(reading) as results:
        sent = _attack(address, count, random.Random(seed))
        told = list(results)
    _, status = os.waitpid(pid, 0)
    found: dict[str, float] = json.loads(told[-1]) if told else {"wrong": 0, "hangs": 0}
    crashed = int(status != 0 or not told)
    return {**sent, **found, "crashes": crashed, "seconds": round(time.monotonic() - began, 1)}


def _attack(address: Address, count: int, rng: random.Random) -> dict[str, float]:
    """Two threads: while one's connection is served, the other's is made."""
    totals = {"frames": 0, "strangers": 0, "late": 0}
    seeds = [rng.getrandbits(64) for _ in range(2)]
    threads = [
        threading.Thread(target=_callers, args=(address, count // 2, seed, totals))
        for seed in seeds
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return dict(totals)


def _callers(address: Address, count: int, seed: int, totals: dict[str, int]) -> None:
    rng = random.Random(seed)
    for at in range(count):
        if rng.random() < STRANGERS:
            _call(address, rng.randbytes(rng.randrange(300)))
            totals["strangers"] += 1
        sealed = rng.random() < 0.5
        try:
            caller, keys = greet(address, KEY, seal=sealed)
        except (OSError, AssertionError):  # a busy machine: it took too long, and was refused
            totals["late"] += 1
            continue
        with caller:
            _send(caller, mutated(keys, sealed, rng))
        totals["frames"] += 1
        if at % 50_000 == 0:
            print(f"{at:,} of {count:,}", file=sys.stderr, flush=True)


def _send(caller: socket.socket, data: bytes) -> None:
    try:
        caller.sendall(data)
    except OSError:  # it has seen enough before all was sent
        return


def _call(address: Address, data: bytes) -> None:
    caller = open_socket(address, HANG)
    with caller:
        _send(caller, data)


def _serve(held: socket.socket, writing: int) -> None:
    code = 1
    try:
        counts = _Server(held).run()
        os.write(writing, (json.dumps(counts) + "\n").encode())
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


class _Server:
    def __init__(self, held: socket.socket) -> None:
        self._refusals = 0
        self._listener = Listener(held, KEY, role="server 0", refused=self._refused)
        self._counts: dict[str, float] = {"wrong": 0, "hangs": 0}

    def _refused(self, line: str) -> None:
        assert line.startswith("a connection from ")
        assert "\n" not in line
        self._refusals += 1

    def run(self) -> dict[str, float]:
        served, memory, silent = 0, 0, 0.0
        while silent < _END:
            since = time.monotonic()
            connection = self._listener.accept(0.5)
            if connection is None:
                silent += time.monotonic() - since
                continue
            silent = 0.0
            try:
                serve(connection, HANG)
            except PeerError:
                served += 1
            except Wrong as error:
                print(f"{error} (sealed: {connection.sealed})", file=sys.stderr, flush=True)
                self._counts["hangs" if "hang" in str(error) else "wrong"] += 1
            finally:
                connection.close()
            if served == 10_000:
                memory = _memory()
        self._counts.update(
            served=served,
            refused=self._refusals,
            grown_mb=round((_memory() - memory) / 1e6, 1) if memory else 0.0,
            descriptors=len(list(Path("/proc/self/fd").iterdir())),
            threads=threading.active_count(),
            peak_mb=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3,
        )
        return self._counts


def _memory() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


if __name__ == "__main__":
    main()

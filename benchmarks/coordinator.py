"""How long members wait for the coordinator's answer when there are thousands of them.

One coordinator on one core, with its journal on disk. Every simulated member has a connection of
its own over loopback, shows the key, says hello, and then beats once a second and every two seconds
leases a range of an epoch and commits it: both are answered, and both are a line in the journal.
A process on another core plays them all; an answer's time is what it sees, from before the request
is sent until after the answer is read. The last line is one JSON object.

    python benchmarks/coordinator.py
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import random
import resource
import secrets
import selectors
import socket
import tempfile
import time
from collections import deque
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from echelon.cluster.coordinator import Settings, serve
from echelon.cluster.coordinator.protocol import VERSION
from echelon.cluster.coordinator.session import Call
from echelon.data.journal import Journal

FORK = multiprocessing.get_context("fork")
SAMPLES = 10**12
WANTED = 1024
PERIOD = 1.0
"""Seconds between two beats of a member; with every other one it asks for a lease."""
START = 180.0
"""Seconds in which all members have to be in."""


def main() -> None:
    chosen = arguments()
    most = open_files(chosen.members)
    cores = sorted(os.sched_getaffinity(0))
    key = secrets.token_bytes(32)
    with (
        tempfile.TemporaryDirectory() as folder,
        socket.create_server(("127.0.0.1", 0), backlog=4096) as listener,
    ):
        where = (listener.getsockname(), key)
        journal = Path(folder) / "journal.jsonl"
        coordinator = FORK.Process(target=coordinate, args=(listener, key, journal, cores[0]))
        coordinator.start()
        try:
            assert coordinator.pid is not None
            waits, busy = measure(chosen, where, cores[1:] or cores, coordinator.pid)
        finally:
            coordinator.terminate()
            coordinator.join(20)
        lines = journal.read_bytes().count(b"\n")
    report(chosen, waits, busy, lines, most)


def coordinate(listener: socket.socket, key: bytes, path: Path, core: int) -> None:
    os.sched_setaffinity(0, {core})
    settings = Settings(
        key=key, expected=1, min_workers=1, wait=60.0, samples=SAMPLES, run={"job": "simulated"}
    )
    with Journal(path) as journal:
        serve(listener, settings, journal, [], ("127.0.0.1", 1))


def measure(
    chosen: argparse.Namespace, where: tuple[Any, bytes], cores: list[int], coordinator: int
) -> tuple[np.ndarray[Any, Any], float]:
    """Seconds from request to answer, and the part of its core that the coordinator used."""
    players = []
    for number in range(chosen.processes):
        ours, theirs = FORK.Pipe()
        count = (chosen.members + number) // chosen.processes
        given = (where, count, theirs, cores[number % len(cores)], chosen.seed + number)
        player = FORK.Process(target=play, args=given)
        player.start()
        theirs.close()
        players.append((player, ours))
    try:
        for _, pipe in players:
            hear(pipe, START)  # all of its members are in
        time.sleep(chosen.warm_up)
        began, used = time.monotonic(), cpu_seconds(coordinator)
        tell(players, "measure")
        time.sleep(chosen.seconds)
        busy = (cpu_seconds(coordinator) - used) / (time.monotonic() - began)
        tell(players, "end")
        found = [hear(pipe, 60) for _, pipe in players]
    finally:
        for player, pipe in players:
            player.terminate()
            player.join(20)
            pipe.close()
    return np.concatenate([np.frombuffer(part) for part in found]), busy


def tell(players: list[tuple[Any, Connection]], word: str) -> None:
    for _, pipe in players:
        pipe.send_bytes(word.encode())


def hear(pipe: Connection, seconds: float) -> bytes:
    if not pipe.poll(seconds):
        raise SystemExit(f"a process that plays members said nothing for {seconds:g} s")
    return pipe.recv_bytes()


class Simulated:
    """One member: a connection, and what it asked last. It costs less than what it asks for."""

    def __init__(self, where: tuple[Any, bytes], name: str) -> None:
        call = Call(*where)
        who = {"pid": os.getpid(), "host": "elsewhere", "name": name}
        call.send("hello", role="trainer", version=VERSION, generation=0, **who)
        call.next("welcome")
        self.socket = call.socket
        self.socket.setblocking(False)
        self.waits = False
        """Whether a lease or its commit is under way."""
        self._beats = 0
        self._asked = 0.0
        self._seq = 0
        self._call = call

    def take_turn(self, pace: float) -> bool:
        """Beat, and every other time lease; says whether the answers of the last time are there."""
        self._beats += 1
        beat = framed(b'{"kind":"beat","step":%d,"doing":"","pace":%f}' % (self._beats, pace))
        if self.waits or self._beats % 2:
            self.socket.sendall(beat)
            return not self.waits
        self.waits = True
        self._ask(b'{"kind":"lease","epoch":0,"wanted":%d,"seq":%%d}' % WANTED, beat)
        return True

    def answer(self) -> float:
        """Go on with what is read; returns how long it was awaited."""
        data = self.socket.recv(1 << 16)
        waited = time.monotonic() - self._asked
        # There is one request at a time, so one answer: all but its length is JSON.
        message = json.loads(data[4:] or b"{}")
        if message.get("kind") == "leased":
            start, stop = message["ranges"][0]
            known = b'{"kind":"commit","epoch":0,"start":%d,"stop":%d,"version":%d,"seq":%%d}'
            self._ask(known % (start, stop, self._seq))
        elif message.get("kind") == "ack":
            self.waits = False
        else:
            raise SystemExit(f"a member was sent away: {message}")
        return waited

    def _ask(self, body: bytes, before: bytes = b"") -> None:
        self._seq += 1
        self._asked = time.monotonic()
        self.socket.sendall(before + framed(body % self._seq))


def framed(body: bytes) -> bytes:
    return len(body).to_bytes(4, "big") + body


def play(where: tuple[Any, bytes], count: int, pipe: Connection, core: int, seed: int) -> None:
    """Be so many members: connect one by one while those who are in go about their work."""
    os.sched_setaffinity(0, {core})
    gc.freeze()
    gc.disable()  # it is the coordinator's pauses that count
    crowd = Crowd(random.Random(seed))
    for number in range(count):
        crowd.join(Simulated(where, f"{seed}-{number}"))
        crowd.turn(0.0)
    crowd.spread()
    pipe.send_bytes(b"in")
    while not pipe.poll(0):
        crowd.turn(0.01)
    pipe.recv_bytes()
    crowd.waits.clear()
    while not pipe.poll(0):
        crowd.turn(0.01)
    pipe.send_bytes(np.array(crowd.waits).tobytes())


class Crowd:
    """Members whose turns come once in a period each, spread evenly."""

    def __init__(self, chance: random.Random) -> None:
        self.waits: list[float] = []
        self.late = 0
        """Turns in which the last one's answers were still awaited."""
        self._due: deque[tuple[float, Simulated]] = deque()
        self._chance = chance
        self._selector = selectors.DefaultSelector()

    def join(self, member: Simulated) -> None:
        self._selector.register(member.socket, selectors.EVENT_READ, member)
        self._due.append((time.monotonic(), member))

    def spread(self) -> None:
        """Let turns come evenly from now on, first of those whose last is longest ago."""
        now, count = time.monotonic(), len(self._due)
        turns = enumerate(self._due)
        self._due = deque((now + PERIOD * at / count, member) for at, (_, member) in turns)

    def turn(self, pause: float) -> None:
        now = time.monotonic()
        while self._due and self._due[0][0] <= now:
            due, member = self._due.popleft()
            self.late += not member.take_turn(0.001 + 0.001 * self._chance.random())
            # Whoever is late keeps its place in the period, or all would come to ask at once.
            periods = 1 + (now - due) // PERIOD
            self._due.append((due + periods * PERIOD, member))
        until = self._due[0][0] - time.monotonic() if self._due else pause
        for key, _ in self._selector.select(max(0.0, min(pause, until))):
            self.waits.append(key.data.answer())


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def open_files(members: int) -> int:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    if members + 200 > most:
        raise SystemExit(f"{members:,} members need more than the {most:,} files of `ulimit -Hn`")
    return most


def report(
    chosen: argparse.Namespace,
    waits: np.ndarray[Any, Any],
    busy: float,
    lines: int,
    most: int,
) -> None:
    p50, p90, p99, worst = 1000 * np.quantile(waits, [0.5, 0.9, 0.99, 1.0])
    rate = len(waits) / chosen.seconds
    print(f"{chosen.members:,} members, {chosen.seconds:g} s, at most {most:,} open files")
    print(f"answers      {len(waits):,} ({rate:,.0f}/s), {lines:,} lines in the journal")
    print(
        f"waited       {p50:.2f} ms median, {p90:.2f} ms p90, {p99:.2f} ms p99, {worst:.1f} ms most"
    )
    print(f"coordinator  {100 * busy:.0f} % of one core")
    print(json.dumps({"p99_ms": round(float(p99), 2)}))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--members", type=int, default=5000)
    parser.add_argument("--seconds", type=float, default=20.0, help="to measure for")
    parser.add_argument("--warm-up", type=float, default=3.0)
    parser.add_argument("--processes", type=int, default=1, help="that play the members")
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    if not 1 <= chosen.processes <= chosen.members or chosen.seconds <= 0:
        parser.error("--processes must be 1 to --members, and --seconds more than 0")
    return chosen


if __name__ == "__main__":
    main()

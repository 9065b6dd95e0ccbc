"""How each fault is injected.

`Actuators.do` injects one fault of the plan. It raises `NotYet` if that is not possible at present,
for example while the disk is full, and `Never` if it will not be. It never destroys the last copy
of the run's state, because no run could survive that. Faults that last for a while are an `Effect`:
ticked until over, and undone at the end.
"""

from __future__ import annotations

import os
import random
import resource
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from echelon.checkpoint import Shelf, verify_cut
from echelon.checkpoint.store import CHECKPOINTS
from echelon.cluster.chaos.plan import PEOPLE, Fault
from echelon.cluster.chaos.view import Command, Deed, Scene
from echelon.cluster.coordinator import Reporter, read_join_string
from echelon.cluster.services import served
from echelon.cluster.start import JOIN
from echelon.core.errors import CheckpointError

_LATEST = 0.8
"""The part of a run after which its disk is not filled any more."""
_PERIOD = 0.04
"""Seconds in which a slowed member runs once and is stopped once: far below a missed heartbeat."""
FULL = 512
"""Bytes per file while the disk is "full"."""
_COMPLAINT = "could not be written"
_NEXT_SECONDS = 30.0
"""How long to wait for the next checkpoint."""


class Actuators:
    """Injects faults into one run."""

    def __init__(
        self, scene: Scene, folder: Path, command: Command, seed: int, steps: int | None
    ) -> None:
        self.effects: list[Effect] = []
        self.newcomers: list[Command] = []
        self._scene, self._folder, self._command = scene, folder, command
        self._chance = random.Random(f"whom/{seed}")
        self._steps = steps
        self._killed: set[int] = set()
        self._replaced: set[int] = set()
        """Servers that were killed. Their replicas are new, and may lack part of the state."""
        self._shelf = Shelf(folder / CHECKPOINTS)
        self._reporter: Reporter | None = None
        self._verbs: dict[str, Callable[[Deed], None]] = {
            "kill": self._kill,
            "freeze": self._freeze,
            "slow": self._slow,
            "partition": self._partition,
            "join": self._join,
            "fill": self._fill,
            "tear": self._tear,
        }

    def do(self, fault: Fault) -> Deed:
        """Inject a fault; raise `NotYet` or `Never` if that is not possible."""
        if any(isinstance(effect, FullDisk) and effect.is_full for effect in self.effects):
            # The file size limit also holds for the members' shared memory: they could not regroup.
            raise NotYet("the disk is full")
        deed = Deed(fault, self._scene.version)
        if fault.target == "coordinator":
            self._aim_at_coordinator(deed)
        elif fault.target == "server":
            self._aim_at_server(deed)
        elif fault.target in PEOPLE:
            self._aim(deed)
        deed.moment = time.time()
        try:
            self._verbs[fault.verb](deed)
        except ProcessLookupError:
            raise NotYet(f"{deed.who} has just ended") from None
        return deed

    def unhurt(self) -> list[int]:
        """Return the members that take part and that no fault has hit."""
        hurt = {member for effect in self.effects for member in effect.members}
        return [
            member
            for member in self._scene.taking_part
            if member not in hurt and member not in self._killed
        ]

    def _aim_at_coordinator(self, deed: Deed) -> None:
        if self._scene.coordinator is None:
            raise NotYet("there is no coordinator")
        deed.coordinator, deed.pids = True, [self._scene.coordinator]

    def _aim_at_server(self, deed: Deed) -> None:
        seats = {s["shard"]: s["pid"] for s in served(self._folder) if not s["twin"]}
        wanted = deed.fault.member
        if not self._scene.order:
            raise NotYet("the run has not begun")
        if not seats:
            raise Never("the run has no servers")
        if wanted is not None and wanted not in seats:
            raise Never(f"there is no server {wanted} (choices: {_listed(seats)})")
        deed.server = self._chance.choice(sorted(seats)) if wanted is None else wanted
        self._spare_the_state(deed.server)
        deed.pids = [seats[deed.server]]

    def _spare_the_state(self, server: int) -> None:
        """Refuse to hit a server unless a replica or a checkpoint has its state."""
        twins = {s["shard"] for s in served(self._folder) if s["twin"]} - self._replaced
        if server not in twins and not self._shelf.versions():
            raise NotYet(f"the state of server {server} is nowhere else")

    def _aim(self, deed: Deed) -> None:
        member = self._chosen(deed.fault)
        deed.members, deed.pids = [member], [self._scene.living[member]]

    def _chosen(self, fault: Fault) -> int:
        scene = self._scene
        if fault.member is not None:
            return self._named(fault.member)
        if fault.target == "trainer":
            known = self.unhurt() if scene.order else sorted(scene.living.keys() - self._killed)
            if not known:
                raise NotYet("there is no trainer")
            return self._chance.choice(known)
        if scene.leader is None or scene.leader in self._killed:
            raise NotYet("there is no leader")
        return scene.leader

    def _named(self, member: int) -> int:
        scene = self._scene
        if member in scene.living and member not in self._killed:
            return member
        if member in scene.seen or member in self._killed:
            raise Never(f"member {member} is lost already (there are {_listed(scene.living)})")
        raise NotYet(f"there is no member {member} (there are {_listed(scene.living)})")

    def _kill(self, deed: Deed) -> None:
        if deed.members:
            self._spare_the_last(deed.members[0])
        os.kill(deed.pids[0], signal.SIGKILL)
        self._killed |= set(deed.members)
        if deed.server is not None:
            self._replaced.add(deed.server)

    def _spare_the_last(self, member: int) -> None:
        """Refuse to kill the last member that holds a complete copy of the state."""
        scene = self._scene
        others = self.unhurt() if scene.order else list(scene.living.keys() - self._killed)
        if set(others) - {member}:
            return
        if self._may_come():
            raise NotYet(f"member {member} is the last trainer, others are on their way")
        raise Never(f"member {member} is the last trainer")

    def _may_come(self) -> bool:
        waiting = self._scene.living.keys() - set(self._scene.order) - self._killed
        joining = any(command.status is None for command in self.newcomers)
        return bool(waiting or self.effects or joining or not self._scene.order)

    def _freeze(self, deed: Deed) -> None:
        handle = Handle(deed.pids[0])
        self.effects.append(Frozen(handle, deed.members, deed.fault.seconds))

    def _slow(self, deed: Deed) -> None:
        handle, fault = Handle(deed.pids[0]), deed.fault
        self.effects.append(Slowed(handle, deed.members, fault.factor, fault.seconds))

    def _partition(self, deed: Deed) -> None:
        if self._reporter is None:
            host, port, key = read_join_string((self._folder / JOIN).read_text(encoding="ascii"))
            self._reporter = Reporter((host, port), key)
        if not self._reporter.drop(deed.members[0], deed.fault.seconds):
            self._reporter = None  # drop the reporter: it would send the order later
            raise NotYet("the coordinator does not answer")
        self.effects.append(CutOff(deed.members, deed.fault.seconds))

    def _join(self, deed: Deed) -> None:
        for _ in range(deed.fault.count):
            command = Command(["join", str(self._folder), "--quiet"])
            self.newcomers.append(command)
            deed.pids.append(command.pid)

    def _fill(self, deed: Deed) -> None:
        leader = self._scene.leader
        if self._steps is not None and self._scene.version > _LATEST * self._steps:
            raise Never("a run that cannot write its last checkpoint fails")
        if leader is None or self.effects or self._is_awaited():
            raise NotYet("it is not quiet enough to fill the disk")
        if max(self._shelf.versions(), default=0) <= self._scene.began:
            # Members create the shared memory for checkpoints with the first one of a generation;
            # with a full disk they could not.
            raise NotYet("no checkpoint was written since the members met")
        deed.members, deed.pids = [leader], [self._scene.living[leader]]
        self.effects.append(FullDisk(deed, self._shelf, self._said_since))

    def _is_awaited(self) -> bool:
        """Return whether a member is about to join, or is lost without being noticed yet."""
        scene, commands = self._scene, (self._command, *self.newcomers)
        pids = {pid for command in commands for pid in command.family()}
        servers = {seat["pid"] for seat in served(self._folder)}
        known = {self._command.pid, scene.coordinator, *scene.living.values()}
        absent = pids - known - servers
        return bool(absent or scene.living.keys() ^ set(scene.order))

    def _said_since(self, moment: float) -> list[tuple[float, str]]:
        said = [line for command in self.newcomers for line in command.lines]
        return [line for line in (*self._command.lines, *said) if line[0] >= moment]

    def _tear(self, deed: Deed) -> None:
        """Tear the newest checkpoint, with the leader stopped so that it writes no other."""
        leader = self._scene.leader
        if leader is None:
            raise NotYet("there is no leader")
        frozen = Frozen(Handle(self._scene.living[leader]), [], 0.0)
        try:
            self._tear_newest(deed)
        finally:
            frozen.end()

    def _tear_newest(self, deed: Deed) -> None:
        cuts = sorted(self._shelf.folder.glob("step-*"))
        if len(cuts) < 2 or not _is_whole(cuts[-2]):
            raise NotYet("there are no two whole checkpoints")
        before, newest = self._shelf.versions()[-2:]
        largest = max(cuts[-1].iterdir(), key=lambda file: file.stat().st_size)
        os.truncate(largest, largest.stat().st_size // 2)
        notices: list[str] = []
        found = Shelf(self._shelf.folder, notice=notices.append).load()["strategy"]["version"]
        if found != before or not any("torn" in notice for notice in notices):
            deed.problem = f"checkpoint {newest} was torn, and {found} was loaded without a word"
        deed.detected = deed.recovered = time.time() - deed.moment
        deed.note = f"checkpoint {newest:,} torn, {found:,} used instead"

    def tick(self) -> None:
        """Continue the effects, and end those that are over."""
        for effect in list(self.effects):
            if effect.tick():
                self._over(effect)
        for command in self.newcomers:
            command.drain()

    def _over(self, effect: Effect) -> None:
        self.effects.remove(effect)
        effect.end()

    def close(self) -> None:
        """End all effects. Members that joined keep running."""
        for effect in list(self.effects):
            self._over(effect)
        if self._reporter is not None:
            self._reporter.close()


class NotYet(Exception):
    """The fault cannot be injected now, but perhaps later."""


class Never(Exception):
    """The fault cannot be injected, now or later."""


def _is_whole(folder: Path) -> bool:
    try:
        verify_cut(folder)
    except CheckpointError:
        return False
    return True


def _listed(members: dict[int, int]) -> str:
    return ", ".join(map(str, sorted(members))) or "none"


# Faults that last for a while.


class Effect(Protocol):
    """A fault that lasts for a while."""

    members: Sequence[int]

    def tick(self) -> bool:
        """Continue; return whether the fault is over."""
        ...

    def end(self) -> None:
        """Undo the fault. May be called at any time."""
        ...


class Frozen:
    """A process stopped by SIGSTOP."""

    def __init__(self, handle: Handle, members: Sequence[int], seconds: float) -> None:
        self.members = members
        self._handle = handle
        handle.send(signal.SIGSTOP)
        self._until = time.monotonic() + seconds

    def tick(self) -> bool:
        return time.monotonic() >= self._until

    def end(self) -> None:
        self._handle.send(signal.SIGCONT)
        self._handle.close()


class Slowed:
    """A process that is stopped for a part of each period, so that it is `factor` times slower."""

    def __init__(self, handle: Handle, members: Sequence[int], factor: float, seconds: float):
        self.members = members
        self._handle, self._runs = handle, _PERIOD / factor
        self._until = time.monotonic() + seconds
        self._next, self._stands = 0.0, False

    def tick(self) -> bool:
        now = time.monotonic()
        if now >= self._next:
            self._stands = not self._stands
            self._handle.send(signal.SIGSTOP if self._stands else signal.SIGCONT)
            self._next = now + (_PERIOD - self._runs if self._stands else self._runs)
        return now >= self._until

    def end(self) -> None:
        self._handle.send(signal.SIGCONT)
        self._handle.close()


class CutOff:
    """A member that the coordinator cuts off; the coordinator itself ends that."""

    def __init__(self, members: Sequence[int], seconds: float) -> None:
        self.members = members
        self._until = time.monotonic() + seconds

    def tick(self) -> bool:
        return time.monotonic() >= self._until

    def end(self) -> None:
        """Do nothing: the coordinator ends the partition."""


class FullDisk:
    """A limit on the size of the leader's files, which makes its checkpoints fail for a while.

    Detected when a process complains about it; recovered when the next checkpoint is written.
    """

    def __init__(
        self, deed: Deed, shelf: Shelf, said: Callable[[float], list[tuple[float, str]]]
    ) -> None:
        self.members: Sequence[int] = ()
        self._deed, self._shelf, self._said = deed, shelf, said
        self._pid = deed.pids[0]
        self._before: tuple[int, int] | None = resource.prlimit(self._pid, resource.RLIMIT_FSIZE)
        _limit(self._pid, (FULL, self._before[1]))
        self._until = time.monotonic() + deed.fault.seconds
        self._newest = 0

    @property
    def is_full(self) -> bool:
        return self._before is not None

    def tick(self) -> bool:
        """Lift the limit after a while; over once a checkpoint was written again."""
        deed = self._deed
        if deed.detected is None:
            complaints = (at for at, text in self._said(deed.moment) if _COMPLAINT in text)
            deed.detected = next((at - deed.moment for at in complaints), None)
        if self._before is not None:
            if time.monotonic() >= self._until:
                self._empty()
            return False
        if max(self._shelf.versions(), default=0) <= self._newest:
            return time.monotonic() > self._until + _NEXT_SECONDS
        deed.recovered = time.time() - deed.moment if deed.detected is not None else None
        return True

    def end(self) -> None:
        if self._before is not None:
            self._empty()
        if self._deed.detected is None:
            self._deed.note = "no checkpoint was due"

    def _empty(self) -> None:
        assert self._before is not None
        self._newest = max(self._shelf.versions(), default=0)
        _limit(self._pid, self._before)
        self._before = None


def _limit(pid: int, limits: tuple[int, int]) -> None:
    with suppress(ProcessLookupError):  # it was killed meanwhile
        resource.prlimit(pid, resource.RLIMIT_FSIZE, limits)


class Handle:
    """A process, held by its pidfd: the pid may come to mean another process, the pidfd not."""

    def __init__(self, pid: int) -> None:
        """Raise ProcessLookupError if the process has ended."""
        self.pid = pid
        self._descriptor = os.pidfd_open(pid)

    def send(self, number: int) -> None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._descriptor, number)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

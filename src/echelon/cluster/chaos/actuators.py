"""How each fault is brought about."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

from echelon.checkpoint import Shelf, verify_cut
from echelon.cluster.chaos.deeds import Deed
from echelon.cluster.chaos.effects import CutOff, Effect, Frozen, FullDisk, Handle, Slowed
from echelon.cluster.chaos.plan import PEOPLE, Fault
from echelon.cluster.chaos.process import Command
from echelon.cluster.chaos.scene import Scene
from echelon.cluster.coordinator import Reporter, read_join_string
from echelon.cluster.fleet import served
from echelon.cluster.joining import JOIN
from echelon.core.errors import CheckpointError
from echelon.loop.assemble import CHECKPOINTS

_LATEST = 0.8
"""Of a run, the part after which its disk is not filled any more."""


class NotYet(Exception):
    """It cannot be done now, and may be later."""


class Never(Exception):
    """It cannot be done, now or later."""


class Actuators:
    """Does to a run what a plan says."""

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
        """Servers that were killed: their twins are new, and may not know all yet."""
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
        """Raises `NotYet` or `Never` if it is not possible."""
        if any(isinstance(effect, FullDisk) and effect.is_full for effect in self.effects):
            # The same limit holds for the memory that members share: they could not meet again.
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

    def tick(self) -> None:
        for effect in list(self.effects):
            if effect.tick():
                self._over(effect)
        for command in self.newcomers:
            command.drain()

    def close(self) -> None:
        """Whatever is still being done is ended; newcomers are not."""
        for effect in list(self.effects):
            self._over(effect)
        if self._reporter is not None:
            self._reporter.close()

    def unhurt(self) -> list[int]:
        """Who takes part and can be expected to go on doing so."""
        hurt = {member for effect in self.effects for member in effect.members}
        return [
            member
            for member in self._scene.taking_part
            if member not in hurt and member not in self._killed
        ]

    def _over(self, effect: Effect) -> None:
        self.effects.remove(effect)
        effect.end()

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
        """What a server has is with its twin, or else the run must have something to go back to."""
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
        """A run without members is no run: somebody who has all of its state has to be left."""
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

    def _is_awaited(self) -> bool:
        """Whether somebody is about to come, or lost and not yet noticed."""
        scene, commands = self._scene, (self._command, *self.newcomers)
        pids = {pid for command in commands for pid in command.family()}
        servers = {seat["pid"] for seat in served(self._folder)}
        known = {self._command.pid, scene.coordinator, *scene.living.values()}
        absent = pids - known - servers
        return bool(absent or scene.living.keys() ^ set(scene.order))

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
            self._reporter = None  # what it has not told is not to be told later
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
            # The memory for meeting over a checkpoint is made with the first one.
            raise NotYet("no checkpoint was written since the members met")
        deed.members, deed.pids = [leader], [self._scene.living[leader]]
        self.effects.append(FullDisk(deed, self._shelf, self._said_since))

    def _said_since(self, moment: float) -> list[tuple[float, str]]:
        said = [line for command in self.newcomers for line in command.lines]
        return [line for line in (*self._command.lines, *said) if line[0] >= moment]

    def _tear(self, deed: Deed) -> None:
        """While the leader stands still, or it might write another one meanwhile."""
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


def _is_whole(folder: Path) -> bool:
    try:
        verify_cut(folder)
    except CheckpointError:
        return False
    return True


def _listed(members: dict[int, int]) -> str:
    return ", ".join(map(str, sorted(members))) or "none"

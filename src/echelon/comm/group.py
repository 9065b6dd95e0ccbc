"""`Group`: the members of a run whose number is fixed, and the connections between them.

Members find each other through torch's store (`peers.Rendezvous`), exchange who and where they are
(`peers.Peer`), and then make collectives of all or some members. A collective takes the fastest
way that its members have in common: see `echelon.comm.collectives`. `Alone` is the group of one.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from echelon.comm.collectives import Local, Remote, Solo, TwoLevel
from echelon.comm.interface import Collective
from echelon.comm.peers import Halt, Peer, Place, Rendezvous, Watch, is_ordered, outward, this_host
from echelon.comm.process_group import Wire
from echelon.core.errors import PeerError
from echelon.core.interfaces import Healing

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from echelon.comm.process_group import TorchWorld


_LINGER = 1.0  # seconds that member 0 serves the store after it is done, for the others
_CPU = torch.device("cpu")


class Fixed:
    """The part of `core.interfaces.Comm` that does nothing while the members never change."""

    elastic = False
    met = True

    def __init__(self) -> None:
        self.asked = 0
        self.pulse: Callable[[int, str], None] = unwatched
        self.watched = False
        self.tell: Callable[[str], None] = unheard

    def regroup(self, progress: Sequence[int], lost: PeerError | None) -> Healing:  # noqa: ARG002
        assert lost is not None, "nobody can join"
        raise lost

    def report(self, records: Sequence[Sequence[int]]) -> None:
        """Do nothing: without a coordinator, member 0 writes the journal itself."""

    def alone(self) -> None:
        """Do nothing: there is no other generation to wait for."""

    def on_record(self, version: int) -> bool | None:  # noqa: ARG002
        """Return True: member 0 writes the journal before it saves a checkpoint."""
        return True

    def rolled_back(self, version: int, why: str) -> None:
        """Do nothing: there is no coordinator to inform."""

    def divided(self, version: int, shares: Sequence[float]) -> None:
        """Do nothing: there is no coordinator to inform."""


class Group(Fixed):
    """This member of a run, connected to all others.

    `host` overrides the name of this host: members of the same host share memory. Through `halt`
    another thread ends all waiting.
    """

    def __init__(self, place: Place, *, host: str | None = None, halt: Halt | None = None) -> None:
        super().__init__()
        self.index, self.count = place.index, place.count
        self._pid = os.getpid()
        self._halt = halt or Halt()
        self._serves = place.index == 0 and not place.served
        self._made: list[Collective] = []
        self._asked_for: Counter[tuple[int, ...]] = Counter()
        self._watch = Watch((), self._halt)
        self._peers: list[Peer] = []
        self._world: TorchWorld | None = None
        self._meeting: Rendezvous | None = Rendezvous(place, self._halt)
        try:
            self._peers = self._introduce(host or this_host())
        except BaseException:
            self.close()
            raise

    def collective(
        self, members: Sequence[int] | None = None, *, device: torch.device = _CPU
    ) -> Collective:
        """Make a collective of these members (default: all).

        Exactly these members call it, each in the same order of calls.
        """
        chosen = tuple(range(self.count) if members is None else members)
        assert self.index in chosen, f"member {self.index} is not among {chosen}"
        made = self._make(chosen, device)
        self._made.append(made)
        return made

    def mesh(self, axes: Mapping[str, int], *, device: torch.device = _CPU) -> DeviceMesh:
        """Return all members as a grid, the first axis outermost. All members call it."""
        from echelon.comm.process_group import TorchWorld  # heavy, and needed by few

        if self._world is None:
            self._world = TorchWorld(self._store(), self.index, self.count, device)
        return self._world.mesh(axes)

    def cut(self) -> None:
        """Break torch's own connections, so that no wait in them lasts. From any thread."""
        world = self._world
        if world is not None:
            world.cut()

    def close(self) -> None:
        """Leave the group. Everything is closed even if closing something else fails."""
        if os.getpid() != self._pid:  # a fork, such as a loader's worker, is not a member
            return
        with contextlib.ExitStack() as last:
            last.callback(self._watch.close)
            meeting, self._meeting = self._meeting, None
            if meeting is not None:
                last.callback(meeting.close)
                last.callback(self._part, meeting)
            world, self._world = self._world, None
            if world is not None:
                last.callback(world.close)
            made, self._made = self._made, []
            for collective in made:
                last.callback(collective.close)

    def _introduce(self, host: str) -> list[Peer]:
        meeting = self._store()
        mine = Peer(self.index, os.getpid(), host, is_ordered(), meeting.address, meeting.seen)
        lines = meeting.gather("peers", range(self.count), mine.line())
        peers = [Peer.read(index, line) for index, line in enumerate(lines)]
        meeting.address = outward(mine, peers)
        near = [p for p in peers if p.host == host and p.index != self.index]
        self._watch = Watch(near, self._halt)
        return peers

    def _make(self, members: tuple[int, ...], device: torch.device) -> Collective:
        if len(members) == 1:
            return Solo()
        key = f"collective/{','.join(map(str, members))}/{self._asked_for[members]}"
        self._asked_for[members] += 1
        peers = [self._peers[member] for member in members]
        hosts = _by_host(peers)
        if device.type != "cpu" or max(map(len, hosts)) == 1:
            everybody = range(len(peers))
            return Remote(lambda name: self._wire(f"{key}/{name}", peers, everybody, device))
        at = members.index(self.index)
        number, here = next((i, held) for i, held in enumerate(hosts) if at in held)
        mine = [peers[place] for place in here]
        inner = Local(self._store(), f"{key}/{number}", mine, here.index(at), self._watch)
        if len(hosts) == 1:
            return inner
        try:
            return TwoLevel(
                at,
                hosts,
                inner,
                lambda name, lane: self._wire(f"{key}/{name}", peers, lane, device),
            )
        except BaseException:
            inner.close()
            raise

    def _wire(
        self, key: str, peers: Sequence[Peer], places: Sequence[int], device: torch.device
    ) -> Wire:
        chosen = [peers[place] for place in places]
        at = [peer.index for peer in chosen].index(self.index)
        return Wire(self._store(), key, chosen, at, device, self._watch)

    def _store(self) -> Rendezvous:
        if self._meeting is None:
            raise PeerError("this member has left its group")
        return self._meeting

    def _part(self, meeting: Rendezvous) -> None:
        """Say goodbye; member 0, if it serves the store, waits until the others have done so.

        Others may still be reading from the store, which ends with the process that serves it.
        """
        with contextlib.suppress(PeerError):  # the process that serves the store has ended first
            meeting.say(f"parted/{self.index}")
            others = self._peers if self._serves else []
            deadline = time.monotonic() + _LINGER
            for peer in others:
                while not (meeting.said(f"parted/{peer.index}") or self._watch.ended(peer)):
                    if time.monotonic() > deadline:
                        return
                    time.sleep(0.001)


def _by_host(peers: Sequence[Peer]) -> list[list[int]]:
    """Group the places of members that may share memory, hosts in order of first appearance.

    All members get the same result, so that all choose the same kind of collective, even where only
    some machines show stores in order.
    """
    hosts: dict[str | int, list[int]] = {}
    for place, peer in enumerate(peers):
        hosts.setdefault(peer.host if peer.ordered else peer.index, []).append(place)
    return list(hosts.values())


class Alone(Fixed):
    """The group of one member."""

    index = 0
    count = 1

    def close(self) -> None:
        """Do nothing: nothing is open."""


def unwatched(_step: int, _doing: str) -> None:
    """Ignore a heartbeat: no process watches over this member."""


def unheard(_text: str) -> None:
    """Ignore a notice: there is no coordinator to send it to."""

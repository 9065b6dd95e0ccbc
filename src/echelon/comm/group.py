"""Group, SoloGroup."""

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


# --- alone ---
# The group of one.


def unwatched(_step: int, _doing: str) -> None:
    """The pulse of a member that nobody watches over."""


def unheard(_text: str) -> None:
    """Nobody is there to be told."""


class Fixed:
    """Members that are always the same."""

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
        """There is no coordinator: member 0 keeps the journal."""

    def alone(self) -> None:
        """They are as they are."""

    def on_record(self, version: int) -> bool | None:  # noqa: ARG002
        """Member 0 writes the journal before it saves."""
        return True

    def rolled_back(self, version: int, why: str) -> None:
        """As above."""

    def divided(self, version: int, shares: Sequence[float]) -> None:
        """As above."""


class Alone(Fixed):
    """A member without others."""

    index = 0
    count = 1

    def close(self) -> None:
        """Nothing is open."""


# --- group ---
# The members of a run, and the ways between them.

_LINGER = 1.0  # seconds the store is served for those who still need it
_CPU = torch.device("cpu")


class Group(Fixed):
    """This member among all of them. `host` overrides what this host is known as; with `halt`
    another thread ends all waiting."""

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
        """Called by exactly these members, in the same order of calls."""
        chosen = tuple(range(self.count) if members is None else members)
        assert self.index in chosen, f"member {self.index} is not among {chosen}"
        made = self._make(chosen, device)
        self._made.append(made)
        return made

    def mesh(self, axes: Mapping[str, int], *, device: torch.device = _CPU) -> DeviceMesh:
        """All members as a grid, the first axis outermost; called by all."""
        from echelon.comm.process_group import TorchWorld  # heavy, and needed by few

        if self._world is None:
            self._world = TorchWorld(self._store(), self.index, self.count, device)
        return self._world.mesh(axes)

    def cut(self) -> None:
        """Let nobody wait in torch's own connections any more; may be called by another thread."""
        world = self._world
        if world is not None:
            world.cut()

    def close(self) -> None:
        """Each thing is closed even if another cannot be. A fork of a member is no member."""
        if os.getpid() != self._pid:
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
        """Whoever serves the store stays a moment for members that are still reading from it."""
        with contextlib.suppress(PeerError):  # whoever served it has gone first
            meeting.say(f"parted/{self.index}")
            others = self._peers if self._serves else []
            deadline = time.monotonic() + _LINGER
            for peer in others:
                while not (meeting.said(f"parted/{peer.index}") or self._watch.ended(peer)):
                    if time.monotonic() > deadline:
                        return
                    time.sleep(0.001)


def _by_host(peers: Sequence[Peer]) -> list[list[int]]:
    """Places of the members that may share memory, hosts in the order they first appear.

    The same for all, so that all take the same way: machines of several kinds may be among them.
    """
    hosts: dict[str | int, list[int]] = {}
    for place, peer in enumerate(peers):
        hosts.setdefault(peer.host if peer.ordered else peer.index, []).append(place)
    return list(hosts.values())

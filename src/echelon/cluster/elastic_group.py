"""A group that forms again, in the same process, whenever a member is lost or joins.

The coordinator orders a new generation. What follows depends on whether it is urgent:

a loss    members that wait for the lost one stop waiting (`Halt`, `Group.cut`)
          ─▶ every survivor calls `regroup` ─▶ the coordinator names the next generation
          ─▶ its members form a `Group` and bring those that are behind up to date
a join    each member adds `Ask.REGROUP` to its next gradients
          ─▶ all leave after the same update and call `regroup` ─▶ the same as after a loss
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from echelon.cluster.coordinator import About, Generation, Liaison
from echelon.comm.group import Group, unheard, unwatched
from echelon.comm.interface import Collective
from echelon.comm.peers import Halt, Place, this_host
from echelon.comm.ps.messages import Directory, ShardAddress
from echelon.core.errors import PeerError, TrainingError
from echelon.core.interfaces import Healing
from echelon.core.types import Ask, Lease

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_CPU = torch.device("cpu")


class RunEnded(TrainingError):
    """The run is over for all members. If an error ended it, another member reports that error."""


class ElasticGroup:
    """The `Comm` of an elastic run: this member among those of the current generation.

    A member that was started with others (`number` is its place among them) meets them in the
    constructor. A member without a number is a newcomer: it is alone until its first `regroup`.
    """

    elastic: bool = True
    watched: bool = True

    def __init__(
        self,
        address: tuple[str, int],
        key: bytes,
        *,
        name: str,
        number: int | None,
        deadline: float,
        pulse: Callable[[int, str], None] = unwatched,
    ) -> None:
        self.index, self.count = 0, 1
        self._own = 0
        self._key, self._deadline = key, deadline
        self.pulse: Callable[[int, str], None] = self._beat
        self._beat_too = pulse
        self._number = 0
        self._fellows: tuple[int, ...] = ()
        self._halt = Halt()
        self._group: Group | None = None
        self.met = False
        self._wanted = False
        self._ended: str | None = None
        self.tell: Callable[[str], None] = unheard
        self._liaison = Liaison(
            address,
            key,
            About(number, name, this_host()),
            regroup=self._order,
            notice=lambda text: self.tell(text),
            ended=self._end,
            deadline=deadline,
        )
        try:
            if number is None:
                self.alone()
            else:
                self._meet()
        except BaseException:
            self.end()
            raise

    @property
    def run(self) -> Mapping[str, Any]:
        """The run's settings as its starter gave them to the coordinator: job, store, servers, …"""
        return self._liaison.run

    def directory(self) -> Directory:
        """Return the addresses of the run's servers, and which members take part."""
        return Directory(
            shards=tuple(ShardAddress(**shard) for shard in self.run["servers"]),
            key=self._key,
            member=self._liaison.member,
            generation=self._number if self.met else 0,
            members=self._fellows,
            deadline=self._deadline,
            halted=lambda: self._halt.why,
        )

    @property
    def generation(self) -> int:
        """The number of the generation that this member is in, or was in last."""
        return self._number

    @property
    def asked(self) -> int:
        """Bits of `Ask`. REGROUP is kept apart, because the client's thread sets it."""
        # A member that is alone waits for no one, so a halt reaches it only here.
        called = self._wanted or self._halt.why is not None
        return self._own | (Ask.REGROUP if called else 0)

    @asked.setter
    def asked(self, value: int) -> None:
        self._own = value & ~Ask.REGROUP

    @property
    def pace(self) -> float | None:
        return self._liaison.pace

    @pace.setter
    def pace(self, seconds: float | None) -> None:
        self._liaison.pace = seconds

    def _beat(self, step: int, doing: str) -> None:
        self._liaison.pulse(step, doing)
        self._beat_too(step, doing)

    def regroup(self, progress: Sequence[int], lost: PeerError | None) -> Healing:
        self.met = False
        if lost is not None and self._group is not None:
            self._group.cut()  # so that the others notice, wherever they wait
        self._leave_group()
        if self._ended is not None:
            raise RunEnded(self._ended)
        why = "" if lost is None else str(lost)
        # From here on orders concern the next generation. An order for the last one that arrives at
        # this moment makes the next generation short, and does no other harm.
        self._halt, self._wanted = Halt(), False
        try:
            found = self._liaison.arrive(self._number, progress, why)
        except PeerError as error:
            if self._liaison.leads:  # then this member alone saves the run's state
                self.index, self.count = 0, 1
            raise RunEnded(self._ended or str(error)) from None
        self._enter(found)
        return self._healing(found)

    def alone(self) -> None:
        self._leave_group()
        self.met, self.index, self.count = False, 0, 1
        self._group = Group(Place(0, 1, deadline=self._deadline))

    def _meet(self) -> None:
        """Meet the members started together. If that fails, stay alone and join as a newcomer."""
        try:
            healing = self.regroup([0], None)
        except PeerError:
            self.alone()
            return
        if healing.peers is not None:
            # The others have met before, and treat this member as a newcomer.
            self.alone()

    def _enter(self, found: Generation) -> None:
        self._number = found.number
        self.index, self.count = found.index, len(found.members)
        self._fellows = tuple(fellow.id for fellow in found.members)
        host, port = found.store
        place = Place(
            index=found.index,
            count=self.count,
            host=host,
            port=port,
            deadline=self._deadline,
            served=True,
            name=found.name,
        )
        self._group = Group(place, halt=self._halt)
        self.met = True

    def _healing(self, found: Generation) -> Healing:
        chosen = [] if found.source is None else [found.source, *found.behind]
        if found.index not in chosen:
            return Healing(recorded=found.recorded)
        peers = self._present().collective(chosen) if found.behind else None
        sends = found.index == found.source
        return Healing(peers, sends, found.anew and sends, found.recorded)

    def _order(self, why: str, urgent: bool) -> None:
        """Take the coordinator's order to regroup. Runs in the client's thread."""
        if urgent:
            self._stop_waiting(why)
        else:
            self._wanted = True

    def _end(self, why: str) -> None:
        """Take the message that the run is over for all. Runs in the client's thread."""
        self._ended = f"the run is over ({why})" if why in ("done", "stopped") else why
        self._stop_waiting(why)

    def _stop_waiting(self, why: str) -> None:
        self._halt.why = why
        group = self._group
        if group is not None:
            group.cut()

    def collective(
        self, members: Sequence[int] | None = None, *, device: torch.device = _CPU
    ) -> Collective:
        return self._present().collective(members, device=device)

    def mesh(self, axes: Mapping[str, int], *, device: torch.device = _CPU) -> DeviceMesh:
        return self._present().mesh(axes, device=device)

    def _present(self) -> Group:
        if self._group is None:
            raise PeerError("this member is between two generations")
        return self._group

    def report(self, records: Sequence[Sequence[int]]) -> None:
        if records:
            self._liaison.report([list(record) for record in records])

    def on_record(self, version: int) -> bool | None:
        """Return whether the updates up to `version` are journaled; None if they may be later."""
        heard = self._liaison.is_heard  # read before `recorded`, which the other thread may advance
        recorded = self._liaison.recorded
        if recorded is None or not heard:
            return recorded is not None and recorded >= version
        return True if recorded >= version else None

    def recorded(self) -> int:
        """Return the last version known to be journaled; 0 for a member that does not lead."""
        return self._liaison.recorded or 0

    def lease(
        self, epoch: int, wanted: int, unit: int, used: Sequence[tuple[int, int]]
    ) -> list[Lease]:
        """Lease samples of an epoch; return all ranges that this member holds of it now."""
        try:
            return self._liaison.lease(epoch, wanted, unit, used)[0]
        except PeerError as error:
            raise RunEnded(self._ended or str(error)) from None

    def open_ledger(self, version: int, ledger: Mapping[str, Any]) -> None:
        """Publish what is consumed (member 0 only); all leases become void."""
        self._liaison.open_ledger(version, ledger)

    def rolled_back(self, version: int, why: str) -> None:
        self._liaison.rolled_back(version, why)

    def divided(self, version: int, shares: Sequence[float]) -> None:
        if self.index == 0:
            self._liaison.shares(version, shares)

    def leave(self, why: str, *, fatal: bool = False, over: bool = False) -> None:
        """Tell the coordinator that this member ends, and whether that ends the run for all.

        `fatal`: with the error `why`. `over`: training is over with the status `why`.
        """
        self._liaison.leave(why, fatal=fatal, over=over)

    def close(self) -> None:
        """Leave the group, but stay connected to the coordinator."""
        self._leave_group()

    def end(self) -> None:
        """Leave the group and disconnect from the coordinator."""
        self._leave_group()
        self._liaison.close()

    def _leave_group(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            with contextlib.suppress(PeerError):
                group.close()

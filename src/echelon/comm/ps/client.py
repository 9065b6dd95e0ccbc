"""`Servers`: all shards of a parameter server as one trainer uses them.

    set_up ─▶ (upload) ─▶ enter ─▶ pull ─▶ [ready … ready] ─▶ push ─▶ outcome ─▶ … ─▶ close

Weights and gradients are flat memory, one view per parameter. If all shards are on this host and no
trainer computes while updates are made, `weights` is the memory of the shards themselves.

There is a `Link` to every shard. Shard 0 is the gate, which decides about pushes and answers them.
If the shards have replicas, a lost shard's link is opened again to the replica that took over, and
the open `Request` is sent again.

A set-up sends the layout of the parameters and the rules of the updates, and shares memory:

    trainer                          shard 0                     shard k
    SET_UP layout, rules  ─────────▶ the first one makes it so; the others have to say the same
    SET_UP layout, rules  ─────────────────────────────────────▶ (asks shard 0 for its memory)
    ◀────────────────────── ANSWER pid, incarnation, version, shared
    ROOM + segments       ─────────▶ mapped                      mapped          memory plane alone
    ◀────────────────────── ANSWER (+ the weights' segment, of shard 0)
"""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

from echelon.comm.channel import Segment
from echelon.comm.ps.layout import Layout, Partition, Room
from echelon.comm.ps.link import Link, LostShard, TcpLink, Terms, open_link
from echelon.comm.ps.messages import MOST_MISSING, Kind, Outcome, PushHead, ShardAddress, to_bytes
from echelon.comm.ps.rows import RemoteTables
from echelon.comm.ps.state import collect, hand_out
from echelon.core.errors import PeerError, TrainingError
from echelon.core.types import Lease

_LAST = 16
"""Staleness of this many versions or more is counted together."""
T = TypeVar("T")


class Servers:
    """The connections of one trainer to all shards. For use by one thread."""

    weights: list[Tensor]
    """Per parameter. `set_up` replaces these tensors by others."""
    slots: list[Tensor]
    """Per parameter, where to write its gradient before `ready` or `push`; zeros at first."""

    def __init__(
        self,
        shards: Sequence[ShardAddress],
        key: bytes,
        member: int,
        *,
        plane: str = "auto",
        deadline: float = 30.0,
        halted: Callable[[], str | None] = lambda: None,
    ) -> None:
        assert shards, "a parameter server of no shards"
        self._shards = sorted(shards, key=lambda shard: shard.index)
        self._terms = Terms(key, member, plane, deadline, halted)
        self._terms.look = self._check
        self._links: list[Link] = []
        self._rooms: Rooms | None = None
        self._tally = Tally()
        # Numbers of pushes: larger than those of any earlier process with this member number.
        self._seq = time.time_ns()
        self._generation = self._incarnation = 0
        self._entered: dict[str, Any] = {}
        self._request: Request | None = None
        self._replicated = False
        self.weights, self.slots = [], []
        self.tables = RemoteTables([])
        """Tables of rows, if the model has any. Gradients staged there go with the next push."""

    def set_up(self, layout: Layout, rules: Mapping[str, Any]) -> bool:
        """Connect to all shards. Return whether they are empty, so that a trainer has to `upload`.

        May be called again.
        """
        self._close_links()
        self._plan = Plan.of(layout, len(self._shards), rules)
        answers = []
        for address in self._shards:  # in this order: shard 0 has what the others ask for
            self._links.append(open_link(address, self._terms))
            answers.append(introduce(self._links[-1], self._plan))
        shared = all(link.memory for link in self._links) and all(a.shared for a in answers)
        self._rooms = Rooms(layout, self._links, shared=shared)
        for link in self._links:
            self._rooms.show(link, self._plan.partition)
        self.weights, self.slots = self._rooms.weights.views, self._rooms.gradients.views
        self.tables.links, self.tables.insist = self._links, self._insist
        self._request = None
        self._replicated = bool(rules.get("replicas", 0))
        lives = {answer.incarnation for answer in answers}
        # 0, unless all shards have the same upload: it is still to come, or another trainer is in
        # the middle of it.
        self._incarnation = lives.pop() if len(lives) == 1 else 0
        return not self._incarnation

    def upload(self, state: Mapping[str, Any]) -> None:
        """Replace all that the shards have by a strategy's saved state, divided over the shards."""
        self._incarnation = incarnation = secrets.randbits(62) + 1
        hand_out(self._links, self._plan.partition, state, incarnation)
        self.tables.upload()
        for link in self._links:  # an upload that is broken off before this does not count
            link.call("uploaded", incarnation=incarnation)

    def enter(self, generation: int, members: Sequence[int]) -> None:
        """Take part in a generation. From here on, pushes of older generations are void."""
        self._entered = {"generation": generation, "members": list(members)}
        self._request = None
        self._insist(lambda: self._announce(self._gate))
        self._generation = generation

    def _announce(self, gate: Link) -> None:
        what = f"entering generation {self._entered['generation']}"
        try:
            gate.ask(Kind.ENTER, self._entered, what=what)
        except PeerError:
            raise
        except TrainingError as error:  # refused: the other trainers went on without this one
            raise PeerError(str(error)) from None

    @property
    def sends(self) -> bool:
        """Whether gradients are sent, once only, so that they need not lie in slots: see `give`."""
        return not self._replicated and not any(link.memory for link in self._links)

    def give(self, at: int, gradient: Tensor) -> None:
        """Use this flat gradient instead of `slots[at]`. It must not change before the outcome."""
        for link in self._links:
            link.give(at, gradient)

    def ready(self, at: int) -> None:
        """Say that `slots[at]` is final, so that it can be sent."""
        for link in self._links:
            link.ready(at)

    def push(
        self,
        lease: Lease,
        based_on: int,
        row: Sequence[float],
        *,
        finite: bool = True,
        square: float = 0.0,
        missing: Sequence[int] = (),
    ) -> None:
        """Hand in the gradients of these samples. All slots are final.

        `based_on` is the version of the weights they were computed with, `row` is summed over
        pushes, `square` is the square of their norm, and `missing` are the parameters without a
        gradient, whose slots are zeros.
        """
        if len(missing) > MOST_MISSING:
            raise TrainingError(
                f"{len(missing)} parameters got no gradient; servers do with at most {MOST_MISSING}"
            )
        self._seq += 1
        head = PushHead(
            self._generation, lease, based_on, tuple(row), finite, square, tuple(missing)
        )
        self.tables.prepare(self._seq)
        self._ask(Request(self._seq, head, ahead=self.tables.send))

    def outcome(self) -> Outcome:
        """Wait for the outcome of the push. `weights` are then of its version, if it has any."""
        request = self._request
        assert request is not None, "nothing was pushed"
        outcome = self._answer(request)
        self._tally.note(outcome)
        if request.torn:  # a shard was replaced: pull, so that all weights are of one version
            outcome = outcome._replace(version=self.pull(begin=not outcome.asked))
        return outcome

    def pull(self, *, begin: bool = True) -> int:
        """Fetch the current weights and return their version.

        `begin` says that a batch will be computed with them; otherwise they are only looked at, in
        a meeting of all trainers.
        """
        while True:
            self._seq += 1
            request = Request(self._seq, begin=begin)
            self._ask(request)
            outcome = self._answer(request)
            if not request.torn:
                break
        if outcome.kind != "pulled":
            raise TrainingError(f"the weights are not to be had: {outcome.reason or outcome.kind}")
        return outcome.version

    def rest(self) -> None:
        """Say that this trainer has nothing to compute, so that no trainer waits for its push."""
        self._call("rest")

    def leave_out(self, lease: Lease) -> None:
        """Count these samples as consumed without an update."""
        self._call("leave_out", lease=list(lease))

    def observe(self, schedule: Mapping[str, Any]) -> None:
        """Send the schedule's state after a validation result. Sending it again changes nothing."""
        self._call("observe", schedule=dict(schedule))

    def records(self, recorded: int) -> list[tuple[int, ...]]:
        """Return (epoch, start, stop, version, member) of all samples applied after `recorded`.

        The servers forget the samples of that version and before: the journal has them.
        """
        return [tuple(record) for record in self._call("records", recorded=recorded)["records"]]

    def ledger(self) -> dict[str, Any]:
        """Return which samples are consumed, in the form of `Ledger.state_dict`."""
        found: dict[str, Any] = self._call("ledger")["ledger"]
        return found

    def state(self) -> dict[str, Any]:
        """Return the whole state by names, for a checkpoint. No trainer may push meanwhile."""
        return self._insist(lambda: collect(self._links, self._plan.partition))

    def figures(self) -> dict[str, float]:
        """Return this trainer's staleness, bytes, seconds and outcomes, and the shards' seconds."""
        found = self._tally.figures()
        found["bytes_pushed"] = float(self._tally.pushed + sum(x.pushed for x in self._links))
        found["bytes_pulled"] = float(self._tally.pulled + sum(x.pulled for x in self._links))
        found["wait_seconds"] = self._terms.waited
        for at in range(len(self._links)):
            theirs = self._insist(lambda at=at: self._links[at].call("figures"))  # type: ignore[misc]
            found |= {f"shard_{at}_{key}": float(value) for key, value in theirs.items()}
        return found

    def close(self) -> None:
        self._close_links()

    @property
    def _gate(self) -> Link:
        return self._links[0]

    def _call(self, name: str, **arguments: Any) -> dict[str, Any]:
        return self._insist(lambda: self._gate.call(name, **arguments))

    def _insist(self, question: Callable[[], T]) -> T:
        """Return what `question` returns; ask again where a replica took over a lost shard."""
        if not self._links:
            raise PeerError("this trainer is not connected to the servers")
        while True:
            try:
                return question()
            except LostShard as lost:
                self._replace(lost)

    def _ask(self, request: Request) -> None:
        self._request = request
        for at in reversed(range(len(self._links))):  # the gate last: it waits for the other shards
            while not self._sent(request, at):
                continue

    def _sent(self, request: Request, at: int) -> bool:
        """Send a request to one shard; return whether it has it.

        False if another shard was lost meanwhile: then this one has to be asked again.
        """
        try:
            request.send(self._links[at])
        except LostShard as lost:
            self._replace(lost)  # which sends the request to the replacement
            return lost.shard == at
        return True

    def _answer(self, request: Request) -> Outcome:
        while True:
            try:
                return request.receive(self._links)
            except LostShard as lost:
                self._replace(lost)

    def _replace(self, lost: LostShard) -> None:
        """Connect to the replica that takes the shard's place, and send the open request again.

        Raise `lost` if there are no replicas, or none takes over in time. The replica has every
        update that a trainer has heard of, perhaps more than this one.
        """
        shard = lost.shard
        if not self._replicated:
            raise lost
        deadline = time.monotonic() + self._terms.deadline
        while True:
            try:
                self._drop(self._links[shard])
                self._links[shard] = self._again(shard)
                break
            except LostShard as again:
                if time.monotonic() > deadline:
                    raise lost from again
        request = self._request
        if request is not None and (request.outcome is None or shard):
            request.torn = request.torn or shard > 0
            request.send(self._links[shard])

    def _again(self, shard: int) -> Link:
        link = open_link(self._shards[shard], self._terms)
        try:
            answer = introduce(link, self._plan)
            known = self._incarnation or answer.incarnation
            if not known or answer.incarnation != known:
                raise PeerError(f"{link} took the place of shard {shard}, but has other weights")
            self._incarnation = known
            assert self._rooms is not None
            self._rooms.show(link, self._plan.partition)
            if shard == 0 and self._generation:
                self._announce(link)
        except BaseException:
            link.close()
            raise
        return link

    def _check(self, what: str) -> None:
        for link in self._links:
            link.check(what)

    def _drop(self, link: Link) -> None:
        """Close a link, and count its bytes once."""
        self._tally.pushed += link.pushed
        self._tally.pulled += link.pulled
        link.pushed = link.pulled = 0
        link.close()

    def _close_links(self) -> None:
        links, self._links = self._links, []
        for link in links:
            self._drop(link)
        if self._rooms is not None:
            self._rooms.close()
            self._rooms = None


class Plan(NamedTuple):
    """What a trainer says in SET_UP."""

    partition: Partition
    document: bytes

    @classmethod
    def of(cls, layout: Layout, shards: int, rules: Mapping[str, Any]) -> Plan:
        document = {"layout": layout.to_json(), "rules": dict(rules)}
        return cls(Partition(layout, shards), to_bytes(document))


class Ready(NamedTuple):
    """A shard's answer to SET_UP."""

    incarnation: int
    """The upload that its weights come from; 0 if it has none."""
    version: int
    shared: bool
    """Whether its weights lie in memory that trainers on its host may map."""


def introduce(link: Link, plan: Plan) -> Ready:
    frame = link.ask(
        Kind.SET_UP, {"member": link.member}, [plan.document], "the answer to the set-up"
    )
    match frame.fields():
        case {"incarnation": int(incarnation), "version": int(version), "shared": bool(shared)}:
            return Ready(incarnation, version, shared)
    raise LostShard(f"{link} gave an answer to the set-up that makes no sense", link.address.index)


@dataclass(slots=True)
class Request:
    """A push (if it has a head) or a pull that waits for its outcome.

    It is kept so that a replica that takes over can be asked again.
    """

    seq: int
    head: PushHead | None = None
    begin: bool = True
    """Whether a batch follows a pull."""
    ahead: Callable[[Link], None] = lambda _: None
    """Sends the gradients of rows, which go ahead of a push."""
    outcome: Outcome | None = None
    """The gate's answer, once it is here."""
    torn: bool = False
    """Whether a shard was replaced meanwhile, so that its weights may be of another version."""
    given: set[int] = field(default_factory=set)
    """Shards whose weights of the outcome's version are here."""

    def send(self, link: Link) -> None:
        """Send the request to one shard. Pulls go to the gate only."""
        if self.head is not None:
            self.ahead(link)
            link.push(self.seq, self.head)
        elif link.address.index == 0:
            link.send(Kind.PULL, b"" if self.begin else b"look", seq=self.seq, what="a pull")

    def receive(self, links: list[Link]) -> Outcome:
        """Wait for the gate's answer, and for the weights of all shards if they come with it."""
        if self.outcome is None:
            self.outcome = links[0].outcome(self.seq)
        if self.outcome.weights and not self.torn:
            for link in links[1:]:
                if link.address.index not in self.given:
                    link.given(self.seq)
                    self.given.add(link.address.index)
        return self.outcome


class Rooms:
    """The memory of a trainer's gradients and weights.

    Segments stay open: when a shard moves, they are shown to another process.
    """

    def __init__(self, layout: Layout, links: Sequence[Link], *, shared: bool) -> None:
        self._layout = layout
        size = layout.bytes
        memory = any(link.memory for link in links)
        self.shared = shared
        self._gradients = Segment.create(size) if memory else None
        self._weights = Segment.create(size) if memory and not shared else None
        self.gradients = self._room(self._gradients)
        self.gradients.clear()  # the gaps between parameters must be zeros
        self.weights = self._room(self._weights) if not shared else self.gradients

    def show(self, link: Link, partition: Partition) -> None:
        """Give a link, or its shard, the places of gradients and weights."""
        if isinstance(link, TcpLink):
            link.furnish(partition, self.gradients.flats, self.weights.flats)
            return
        assert self._gradients is not None
        theirs = link.hand_over(self._gradients, self._weights, self._layout.bytes)
        if theirs is not None:
            self.weights = Room(self._layout, theirs.tensor)
            theirs.close()

    def close(self) -> None:
        for segment in (self._gradients, self._weights):
            if segment is not None:
                segment.close()

    def _room(self, segment: Segment | None) -> Room:
        return Room(self._layout, None if segment is None else segment.tensor)


class Tally:
    """Counts of a trainer's outcomes, their staleness, and bytes."""

    def __init__(self) -> None:
        self._fates: Counter[str] = Counter()
        self._staleness: Counter[int] = Counter()
        self.pushed = self.pulled = 0
        """Bytes over connections that are closed by now."""

    def note(self, outcome: Outcome) -> None:
        self._fates[outcome.kind] += 1
        if outcome.kind == "applied":
            self._staleness[min(outcome.staleness, _LAST)] += 1

    def figures(self) -> dict[str, float]:
        found = {f"staleness_{at}": float(n) for at, n in sorted(self._staleness.items())}
        found["applied"] = float(self._fates["applied"])
        found["duplicates"] = float(self._fates["done"])
        found["refused"] = float(sum(self._fates[kind] for kind in ("late", "refused", "void")))
        return found

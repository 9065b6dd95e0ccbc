"""ServerGroup: all shards as one trainer sees them.

The shards of the parameters, as one trainer sees them.

    set_up ─▶ (upload) ─▶ enter ─▶ pull ─▶ [ready … ready] ─▶ push ─▶ outcome ─▶ … ─▶ close

Weights and gradients are flat memory, one view per parameter. Where all shards are on this host and
nobody computes while updates are made, `weights` is memory of the shards themselves.
"""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from echelon.comm.channel import Segment
from echelon.comm.ps.layout import Layout, Partition
from echelon.comm.ps.link import Link, LostShard, TcpLink, Terms, dial
from echelon.comm.ps.messages import MOST_MISSING, Kind, Outcome, PushHead, ShardAddress, to_bytes
from echelon.comm.ps.rows import RemoteTables
from echelon.comm.ps.state import collect, hand_out
from echelon.core.errors import PeerError, TrainingError
from echelon.core.types import Lease

# --- servers ---

T = TypeVar("T")


class Servers:
    """Of one trainer, and for one thread."""

    weights: list[Tensor]
    """Per parameter; other tensors after every `set_up`."""
    slots: list[Tensor]
    """Per parameter, where its gradient belongs before `ready` or `push`; zeros at first."""

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
        self._seq = time.time_ns()  # larger than any of a process that had this number before
        self._generation = self._incarnation = 0
        self._entered: dict[str, Any] = {}
        self._request: Request | None = None
        self._replicated = False
        self.weights, self.slots = [], []
        self.tables = RemoteTables([])
        """Tables of rows, if the model has any: what is staged there is part of the next push."""

    def set_up(self, layout: Layout, rules: Mapping[str, Any]) -> bool:
        """Whether the shards are empty, so that somebody has to `upload`. May be called again."""
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
        # Of an upload that is still to come, perhaps by another trainer, nothing is known.
        self._incarnation = lives.pop() if len(lives) == 1 else 0
        return not self._incarnation

    def upload(self, state: Mapping[str, Any]) -> None:
        """What a strategy saves, divided over the shards; whatever they had is gone."""
        self._incarnation = incarnation = secrets.randbits(62) + 1
        hand_out(self._links, self._plan.partition, state, incarnation)
        self.tables.upload()
        for link in self._links:  # one that is broken off before counts for nothing
            link.call("uploaded", incarnation=incarnation)

    def enter(self, generation: int, members: Sequence[int]) -> None:
        """Take part in a generation; pushes of older ones are void from here on."""
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
        except TrainingError as error:  # refused: the others went on without this trainer
            raise PeerError(str(error)) from None

    @property
    def sends(self) -> bool:
        """Whether gradients are sent, once, so that they need not be in slots: see `give`."""
        return not self._replicated and not any(link.memory for link in self._links)

    def give(self, at: int, gradient: Tensor) -> None:
        """Instead of `slots[at]`: flat memory that stays as it is until the push is answered."""
        for link in self._links:
            link.give(at, gradient)

    def ready(self, at: int) -> None:
        """`slots[at]` is final: it may be on its way."""
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
        """All slots are final: hand the gradients of these samples in.

        `square`: of their norm; `missing`: parameters without a gradient, whose slots are zeros.
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
        """What became of the push. Waits; `weights` are those of its version, if it has any."""
        request = self._request
        assert request is not None, "nothing was pushed"
        outcome = self._answer(request)
        self._tally.note(outcome)
        if request.torn:  # a shard was replaced: all weights of one version, by asking for them
            outcome = outcome._replace(version=self.pull(begin=not outcome.asked))
        return outcome

    def pull(self, *, begin: bool = True) -> int:
        """Get the weights as they are, and their version: to `begin` a batch with, or to look at
        in a meeting."""
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
        """Nothing to compute for now: nobody has to wait for this trainer's push."""
        self._call("rest")

    def leave_out(self, lease: Lease) -> None:
        """These samples are done with, without an update."""
        self._call("leave_out", lease=list(lease))

    def observe(self, schedule: Mapping[str, Any]) -> None:
        """The schedule's state after a validation result; it may be said again and again."""
        self._call("observe", schedule=dict(schedule))

    def records(self, recorded: int) -> list[tuple[int, ...]]:
        """(epoch, start, stop, version, member) of what is applied after `recorded`; what is
        before it is on record, and forgotten."""
        return [tuple(record) for record in self._call("records", recorded=recorded)["records"]]

    def ledger(self) -> dict[str, Any]:
        """Which samples are consumed, as `Ledger.state_dict` says it."""
        found: dict[str, Any] = self._call("ledger")["ledger"]
        return found

    def state(self) -> dict[str, Any]:
        """The cut by names, while nobody pushes."""
        return self._insist(lambda: collect(self._links, self._plan.partition))

    def figures(self) -> dict[str, float]:
        """Staleness, bytes, seconds and fates of this trainer; the shards' own seconds."""
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
        """Ask again where somebody was lost and another one took over."""
        if not self._links:
            raise PeerError("this trainer is not connected to the servers")
        while True:
            try:
                return question()
            except LostShard as lost:
                self._replace(lost)

    def _ask(self, request: Request) -> None:
        self._request = request
        for at in reversed(range(len(self._links))):  # the gate last: it waits for word of others
            while not self._sent(request, at):
                continue

    def _sent(self, request: Request, at: int) -> bool:
        """Whether this shard has it; another one may be lost meanwhile."""
        try:
            request.send(self._links[at])
        except LostShard as lost:
            self._replace(lost)  # who is told itself
            return lost.shard == at
        return True

    def _answer(self, request: Request) -> Outcome:
        while True:
            try:
                return request.receive(self._links)
            except LostShard as lost:
                self._replace(lost)

    def _replace(self, lost: LostShard) -> None:
        """Go on with whoever took the shard's place, and ask it again; if nobody does, it is lost.

        What its twin has is all that anybody was told of, and more than this trainer was.
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
        """Its bytes count all the same, once."""
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


# --- set_up ---
# The first words between a trainer and the shards: what is trained, by which rules, and where.
#
# trainer                          shard 0                     shard k
# SET_UP layout, rules  ─────────▶ the first one makes it so; the others have to say the same
# SET_UP layout, rules  ─────────────────────────────────────▶ (asks shard 0 for its memory)
# ◀────────────────────── ANSWER pid, incarnation, version, shared
# ROOM + segments       ─────────▶ mapped                      mapped          memory plane alone
# ◀────────────────────── ANSWER (+ the weights' segment, of shard 0)


class Plan(NamedTuple):
    """What a trainer says first."""

    partition: Partition
    document: bytes

    @classmethod
    def of(cls, layout: Layout, shards: int, rules: Mapping[str, Any]) -> Plan:
        document = {"layout": layout.to_json(), "rules": dict(rules)}
        return cls(Partition(layout, shards), to_bytes(document))


class Ready(NamedTuple):
    """What a shard answers."""

    incarnation: int
    """Of which upload its weights are; 0: it has none."""
    version: int
    shared: bool
    """Whether its weights lie in memory that trainers of its host may map."""


def open_link(address: ShardAddress, terms: Terms) -> Link:
    connection, memory = dial(address, terms)
    return (Link if memory else TcpLink)(address, connection, terms)


def introduce(link: Link, plan: Plan) -> Ready:
    frame = link.ask(
        Kind.SET_UP, {"member": link.member}, [plan.document], "the answer to the set-up"
    )
    match frame.fields():
        case {"incarnation": int(incarnation), "version": int(version), "shared": bool(shared)}:
            return Ready(incarnation, version, shared)
    raise LostShard(f"{link} gave an answer to the set-up that makes no sense", link.address.index)


class Rooms:
    """This trainer's gradients and weights. Segments stay open: another process may have to be
    shown them, when a shard moves."""

    def __init__(self, layout: Layout, links: Sequence[Link], *, shared: bool) -> None:
        self._layout = layout
        size = layout.bytes
        memory = any(link.memory for link in links)
        self.shared = shared
        self._gradients = Segment.create(size) if memory else None
        self._weights = Segment.create(size) if memory and not shared else None
        self.gradients = self._room(self._gradients)
        self.gradients.clear()  # the gaps between parameters have to be zeros
        self.weights = self._room(self._weights) if not shared else self.gradients

    def show(self, link: Link, partition: Partition) -> None:
        """Let this link's shard know where to read and write."""
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


# --- request ---
# What a trainer is waiting for, kept so that it can be asked again where a twin took over.


@dataclass(slots=True)
class Request:
    """A push, if it has a head, or else a pull."""

    seq: int
    head: PushHead | None = None
    begin: bool = True
    """Of a pull: whether a batch follows."""
    ahead: Callable[[Link], None] = lambda _: None
    """Sends what goes ahead of a push: gradients of rows."""
    outcome: Outcome | None = None
    """What the gate has answered."""
    torn: bool = False
    """Whether a shard was replaced meanwhile, so that its weights may be of another version."""
    given: set[int] = field(default_factory=set)

    def send(self, link: Link) -> None:
        """To one shard; the gate alone hears of pulls."""
        if self.head is not None:
            self.ahead(link)
            link.push(self.seq, self.head)
        elif link.address.index == 0:
            link.send(Kind.PULL, b"" if self.begin else b"look", seq=self.seq, what="a pull")

    def receive(self, links: list[Link]) -> Outcome:
        """The gate's answer, and the weights of all shards if they come with it."""
        if self.outcome is None:
            self.outcome = links[0].outcome(self.seq)
        if self.outcome.weights and not self.torn:
            for link in links[1:]:
                if link.address.index not in self.given:
                    link.given(self.seq)
                    self.given.add(link.address.index)
        return self.outcome


# --- tally ---
# What a trainer's updates cost, and what became of them.

_LAST = 16
"""Staleness from here on is counted as one."""


class Tally:
    def __init__(self) -> None:
        self._fates: Counter[str] = Counter()
        self._staleness: Counter[int] = Counter()
        self.pushed = self.pulled = 0
        """Bytes over connections that are closed."""

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


# --- room ---
# Memory for one value per parameter: whole flats, and each parameter's view of them.

_PAGE = 4096


class Room:
    """`memory` is bytes, one flat behind the other, each a whole number of cache lines."""

    def __init__(self, layout: Layout, memory: Tensor | None = None) -> None:
        if memory is None:
            memory = torch.empty(layout.bytes, dtype=torch.uint8)
        assert memory.numel() >= layout.bytes, f"{memory.numel()} bytes of {layout.bytes}"
        self.memory = memory
        self.flats: list[Tensor] = []
        start = 0
        for flat in layout.flats:
            self.flats.append(memory[start : start + flat.bytes].view(flat.dtype))
            start += flat.bytes
        self.views = layout.views(self.flats)

    def clear(self) -> None:
        """Zeros, and every page touched now: a first touch costs more than a copy."""
        self.memory.zero_()

    def touch(self) -> None:
        """Have every page mapped, whatever it holds."""
        self.memory[::_PAGE].sum()

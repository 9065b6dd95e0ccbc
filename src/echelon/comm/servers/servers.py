"""The shards of the parameters, as one trainer sees them.

    set_up ─▶ (upload) ─▶ enter ─▶ pull ─▶ [ready … ready] ─▶ push ─▶ outcome ─▶ … ─▶ close

Weights and gradients are flat memory, one view per parameter. Where all shards are on this host and
nobody computes while updates are made, `weights` is memory of the shards themselves.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from torch import Tensor

from echelon.comm.servers.address import ShardAddress
from echelon.comm.servers.cuts import collect, hand_out
from echelon.comm.servers.layout import Layout
from echelon.comm.servers.link import Link, LostShard, Terms
from echelon.comm.servers.messages import MOST_MISSING, Kind, PushHead
from echelon.comm.servers.outcome import Outcome
from echelon.comm.servers.request import Request
from echelon.comm.servers.rows import RemoteTables
from echelon.comm.servers.set_up import Plan, Rooms, introduce, open_link
from echelon.comm.servers.tally import Tally
from echelon.core.errors import PeerError, TrainingError
from echelon.core.types import Lease

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

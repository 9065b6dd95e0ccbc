"""What a trainer is waiting for, kept so that it can be asked again where a twin took over."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from echelon.comm.servers.link import Link
from echelon.comm.servers.messages import Kind, PushHead
from echelon.comm.servers.outcome import Outcome


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

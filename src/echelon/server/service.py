"""One shard as its sessions see it: the weights, the gate or the link to it, and the twin.

What a request does depends on the shard. Shard 0 asks the gate in this process; every other shard
reports to the gate over its link. Both keep a twin up to date, if there is one. `ShardService`
holds these parts together, so that sessions need not know which shard they serve.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from echelon.comm.channel import Segment
from echelon.comm.ps.messages import PushHead
from echelon.comm.ps.state import Part
from echelon.core.errors import PeerError
from echelon.server.dispatch import Desk
from echelon.server.gate_link import GateLink, borrow
from echelon.server.replication import Mirror
from echelon.server.shard import Holding, ServerSettings, Shard

__all__ = ["ShardService"]


class ShardService:
    """The shard of this process, with `desk` (the gate, at shard 0) or `link` (to the gate).

    All threads of the process share it.
    """

    def __init__(self, settings: ServerSettings, halted: Callable[[], bool]) -> None:
        self.settings = settings
        self.shard = Shard(settings.shard, len(settings.shards))
        self.mirror = Mirror(self.shard, settings.deadline)
        self.shard.mirror = self.mirror
        self._uploading = 0
        """Incarnation of the upload that is under way; 0 if there is none."""
        self.desk = Desk(self.shard, settings) if settings.shard == 0 else None
        self.link = None if settings.shard == 0 else GateLink(settings, self.shard, halted)
        if self.desk is not None:
            self.desk.mirror = self.mirror
            self.mirror.snapshot, self.mirror.gated = self.desk.snapshot, self.desk.quiet

    @property
    def gate(self) -> Desk:
        """The gate's dispatcher. Raises PeerError on all shards but 0: trainers must ask there."""
        if self.desk is None:
            raise PeerError("asks a shard that is not the gate")
        return self.desk

    def set_up(self, member: int, session: object, document: Any) -> None:
        """Set the shard up, or check that it is set up with the same document.

        From now on the gate answers this member through `session`.
        """
        self.shard.set_up(document, self._lend, self._prepare)
        if self.desk is not None:
            self.desk.arrived(member, session)

    def load(self, part: Part, incarnation: int, state: dict[str, Any]) -> None:
        """Load an upload's weights and optimizer state, and at shard 0 the gate's state.

        Rows of tables follow. The upload counts only after `uploaded`.
        """
        self._uploading = 0
        self.shard.load(part, 0, int(state.get("version", 0)), self._lend)
        if self.desk is not None:
            self.desk.load(state, incarnation)
        self._uploading = incarnation

    def uploaded(self, incarnation: int) -> None:
        """Make a complete upload count, and pass it on to the twin."""
        if incarnation != self._uploading:
            raise PeerError("an upload is said to be whole that another one has replaced")
        self.shard.incarnation = incarnation
        if self.link is not None:
            self.link.greet()
        self.mirror.refresh()

    def pushed(self, member: int, seq: int, head: PushHead) -> None:
        """Report to the gate that a push is staged on this shard."""
        if self.desk is not None:
            self.desk.push(member, seq, head)
        elif self.link is not None:
            self.link.staged(member, seq)

    def left(self, member: int, session: object) -> None:
        """Report to the gate that a session has ended; member −1 was never set up."""
        if self.desk is not None and member >= 0:
            self.desk.left(member, session)

    def gate_state(self) -> dict[str, Any]:
        """Return the gate's part of a checkpoint; empty on all shards but 0."""
        return {} if self.desk is None else self.desk.state()

    def figures(self, asking: int) -> dict[str, float]:
        """Return the shard's metrics, the gate's counts for the asking member, and every member's
        merit."""
        found = self.shard.figures()
        if self.desk is not None and self.shard.incarnation:
            for member, values in self.desk.figures().items():
                judged = {key: values[key] for key in ("merit", "rejected") if key in values}
                found |= {f"member_{member}_{key}": float(value) for key, value in judged.items()}
                if member == str(asking):
                    found |= {f"gate_{key}": float(value) for key, value in values.items()}
        return found

    def _prepare(self, holding: Holding) -> None:
        if self.desk is not None:
            self.desk.prepare(holding.rules, len(holding.layout.slots))

    def _lend(self, size: int) -> Segment | None:
        """Return memory for all shards' weights: shard 0 makes it, the others borrow it."""
        if self.settings.shard == 0:
            return Segment.create(size)
        return borrow(self.settings, size)

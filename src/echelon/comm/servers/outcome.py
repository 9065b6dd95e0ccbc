"""What became of a push, as the gate tells it."""

from __future__ import annotations

import struct
from typing import NamedTuple

from echelon.core.errors import PeerError

FATES = ("applied", "done", "late", "refused", "void", "pulled")
MOST_VALUES, LONGEST_REASON = 64, 4096

_HEAD = struct.Struct("<B?qqqdBH")


class Outcome(NamedTuple):
    """`applied`: it is part of `version`. `done`: its samples were applied before. `late`,
    `refused`, `void`: nothing came of it, for `reason`; its lease goes back."""

    kind: str
    version: int
    staleness: int = 0
    row: tuple[float, ...] = ()
    """Sums over all pushes that were applied since this trainer's last outcome."""
    asked: int = 0
    share: float = 0.0
    """Samples of this trainer's next push; 0 where nobody has a say in that."""
    reason: str = ""
    weights: bool = False
    """Whether the weights of `version` come with it."""

    def pack(self) -> bytes:
        reason = self.reason.encode()[:LONGEST_REASON]
        head = _HEAD.pack(
            FATES.index(self.kind),
            self.weights,
            self.version,
            self.staleness,
            self.asked,
            self.share,
            len(self.row),
            len(reason),
        )
        return head + struct.pack(f"<{len(self.row)}d", *self.row) + reason

    @classmethod
    def unpack(cls, head: bytes) -> Outcome:
        if len(head) < _HEAD.size:
            raise PeerError(f"an outcome of {len(head)} bytes")
        kind, weights, version, staleness, asked, share, values, length = _HEAD.unpack_from(head)
        start = _HEAD.size + 8 * values
        if kind >= len(FATES) or values > MOST_VALUES or len(head) != start + length:
            raise PeerError(f"an outcome of {len(head)} bytes that makes no sense")
        row = struct.unpack_from(f"<{values}d", head, _HEAD.size)
        reason = head[start:].decode(errors="replace")
        return cls(FATES[kind], version, staleness, row, asked, share, reason, weights)

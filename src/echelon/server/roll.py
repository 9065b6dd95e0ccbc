"""Who has weights of which version, and who is not at work.

coming ─ begins ─▶ at work (weights of v) ─ push ─▶ waiting ─ applied ─▶ (owed weights) ─▶ at work
   ▲                     └───────────── rests, meets ─────────────▶ away ─┘
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from echelon.server.decisions import Push


class Roll:
    """The members of one generation."""

    def __init__(self, members: Iterable[int] = ()) -> None:
        self.members = set(members)
        self.away: set[int] = set()
        """Those who will not push before they ask for weights again."""
        self._idle: set[int] = set()
        """Of these, who has nothing to push, and does not only look about in a meeting."""
        self.versions: dict[int, int] = {}
        """The weights of those whose gradient is under way, or waits to be applied."""
        self.waiting: dict[int, Push] = {}
        """Pushes that wait to be applied, in the order they came."""

    def begin(self, member: int, version: int) -> None:
        """It has these weights, and computes."""
        self.away.discard(member)
        self._idle.discard(member)
        self.waiting.pop(member, None)
        self.versions[member] = version

    def state_dict(self) -> dict[str, Any]:
        """For a gate that takes over: pushes that wait are sent again, so it waits for them."""
        return {
            "members": sorted(self.members),
            "work": [[member, version] for member, version in self.versions.items()],
            "away": sorted(self.away),
            "idle": sorted(self._idle),
        }

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> Roll:
        roll = cls(state["members"])
        roll.versions = dict(state["work"])
        roll.away, roll._idle = set(state["away"]), set(state["idle"])
        return roll

    def wait(self, member: int, push: Push) -> None:
        self.begin(member, push.based_on)
        self.waiting[member] = push

    def settled(self, member: int) -> None:
        """Its gradient is applied, or nothing will come of it."""
        self.waiting.pop(member, None)
        self.versions.pop(member, None)

    def ask_again(self, member: int) -> None:
        """A push that waits comes once more; the weights it was made with are the same."""
        self.waiting.pop(member, None)

    def rest(self, member: int, *, meets: bool = False) -> None:
        self.settled(member)
        self.away.add(member)
        (self._idle.discard if meets else self._idle.add)(member)

    def come_back(self) -> None:
        """A meeting is over: everybody is expected but those who found nothing to do after it."""
        self.away &= self._idle

    @property
    def all_away(self) -> bool:
        return self.away >= self.members

    def busy(self, but: Collection[int] = ()) -> bool:
        """Whether somebody else than these may still push."""
        return not self.members <= self.away.union(but)

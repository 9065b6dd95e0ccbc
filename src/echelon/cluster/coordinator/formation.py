"""A generation as it is told to its members."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from echelon.cluster.coordinator.frames import Message, common_part, encode_with
from echelon.cluster.coordinator.roster import Member


@dataclass(frozen=True)
class Formation:
    """A fixed set of members in their order, and who of them needs what from whom."""

    number: int = 0
    members: list[Message] = field(default_factory=list)
    source: int | None = None
    """The index of one that everybody can be healed from; None if nobody has to be."""
    behind: list[int] = field(default_factory=list)
    anew: bool = False
    """Whether nobody has the run's state: the source has to begin where a checkpoint ends."""
    version: int = 0
    """On record when it was formed."""
    store: tuple[str, int] = ("", 0)
    """Where its members meet."""

    @cached_property
    def order(self) -> list[int]:
        return [member["id"] for member in self.members]

    @cached_property
    def entry(self) -> dict[str, Any]:
        """For the journal."""
        return {
            "number": self.number,
            "members": self.order,
            "version": self.version,
            "source": self.source,
            "behind": self.behind,
            **({"anew": True} if self.anew else {}),
        }

    def frame(self, member: int) -> tuple[bytes, bytes]:
        """What this member is told, in two parts."""
        return encode_with(self._common, "generation", index=self._indices[member])

    @cached_property
    def _indices(self) -> dict[int, int]:
        return {member: index for index, member in enumerate(self.order)}

    @cached_property
    def _common(self) -> bytes:
        """The same for all, and long: encoded once."""
        return common_part(
            {
                "number": self.number,
                "members": self.members,
                "store": list(self.store),
                "name": f"generation-{self.number}",
                "source": self.source,
                "behind": self.behind,
                "anew": self.anew,
                "recorded": self.version,
            }
        )


def formed(
    number: int, members: Sequence[Member], version: int, store: tuple[str, int]
) -> Formation:
    """The generation of these members; whoever is behind is healed by the most advanced one."""
    progress = [_progress(member, version) for member in members]
    people = [member.public() for member in members]
    best = max(progress)
    if best < [0]:
        others = list(range(1, len(members)))
        return Formation(number, people, 0, others, True, version, store)
    behind = [index for index, made in enumerate(progress) if made < best]
    source = progress.index(best) if behind else None
    return Formation(number, people, source, behind, False, version, store)


def _progress(member: Member, version: int) -> list[int]:
    """One that was given up and is back may have made updates that nobody knows of any more."""
    made = member.arrival.progress if member.arrival else []
    unknown = member.generation == 0 and made[:1] > [version]
    return [-1] if unknown else made


def chosen(here: Iterable[Member], before: Formation) -> list[Member]:
    """Those who have arrived: survivors in their old order, then newcomers.

    Newcomers follow as they came; those started together by their number.
    """
    arrived = {member.id: member for member in here if member.arrival is not None}
    old = [arrived.pop(member) for member in before.order if member in arrived]

    def rank(member: Member) -> tuple[float, int]:
        assert member.arrival is not None
        place = math.inf if before.members or member.number is None else member.number
        return place, member.arrival.order

    return old + sorted(arrived.values(), key=rank)

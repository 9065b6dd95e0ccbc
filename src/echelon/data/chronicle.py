"""What happened in a run beside its updates, and how long it took to get over it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from echelon.data.account import Happening

Entry = dict[str, Any]


class Chronicle:
    """Losses, joins, stalls and rollbacks in their order."""

    def __init__(self) -> None:
        self.happenings: list[Happening] = []
        self._sat = self._begun = self._over = False
        self._time = 0.0
        self._open: list[int] = []
        """Losses whose recovery is not told yet."""
        self._undone: dict[int, int] = {}
        """Rollbacks, and the version at which all that they undid is made again."""
        self._takers: dict[str, Callable[[Entry, int], None]] = {
            "begun": self._sitting,
            "generation": self._manned,
            "over": self._ends,
            "finished": self._ends,
            "coordinator": self._coordinator,
            "joined": self._joined,
            "lost": self._lost,
            "recovered": self._recovered,
            "stalled": self._stalled,
        }

    def take(self, entry: Entry, version: int) -> None:
        """Go on with one entry; `version` is the last one on record."""
        taker = self._takers.get(entry["kind"])
        if taker is not None:
            taker(entry, version)
        self._time = entry["time"]

    def rolled_back(self, entry: Entry, before: int, version: int) -> None:
        """What it cost is counted from the last sign of life before it."""
        since = self._time or entry["time"]
        lost = max(0, before - version)
        if lost:
            self._undone[len(self.happenings)] = before
        why = str(entry.get("why", ""))
        self.happenings.append(
            Happening("rolled_back", since, before, None, why, None if lost else 0.0, lost)
        )

    def committed(self, now: float, version: int) -> None:
        """Rollbacks are over when as many updates are made as there had been."""
        for place in [place for place, before in self._undone.items() if before <= version]:
            del self._undone[place]
            happening = self.happenings[place]
            seconds = round(now - happening.time, 3)
            self.happenings[place] = happening._replace(seconds=seconds)

    def _sitting(self, entry: Entry, version: int) -> None:
        if self._sat:
            count = entry.get("workers")
            text = "1 worker" if count == 1 else f"{count} workers"
            self.happenings.append(Happening("resumed", entry["time"], version, None, text))
        self._sat, self._begun, self._over = True, False, False

    def _manned(self, _entry: Entry, _version: int) -> None:
        self._begun = True

    def _ends(self, _entry: Entry, _version: int) -> None:
        self._over = True

    def _coordinator(self, entry: Entry, version: int) -> None:
        if entry.get("again"):
            self._happened(entry, version, f"started again as process {entry.get('pid')}")

    def _joined(self, entry: Entry, version: int) -> None:
        """Whoever is there from the start is no event."""
        if self._begun:
            host = str(entry.get("host")).partition("/")[0]  # what follows tells namesakes apart
            self._happened(entry, version, f"process {entry.get('pid')} on {host}")

    def _lost(self, entry: Entry, version: int) -> None:
        if self._over and entry["how"] == "left":
            return  # the run is at its end, and everybody goes
        self._open.append(len(self.happenings))
        why = str(entry.get("why") or "")
        self._happened(entry, version, f"{entry['how']}: {why}" if why else str(entry["how"]))

    def _recovered(self, entry: Entry, _version: int) -> None:
        cost, lost = float(entry["seconds"]), entry.get("lost_steps")
        for place in self._open:
            self.happenings[place] = self.happenings[place]._replace(seconds=cost, lost_steps=lost)
        self._open.clear()

    def _stalled(self, entry: Entry, version: int) -> None:
        self._happened(entry, version, str(entry.get("text", "")))

    def _happened(self, entry: Entry, version: int, text: str) -> None:
        kind, when, member = entry["kind"], entry["time"], entry.get("member")
        self.happenings.append(Happening(kind, when, version, member, text))

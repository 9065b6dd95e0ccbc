"""A run as its journal shows it while it is under way."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

Entry = dict[str, Any]


class Commit(NamedTuple):
    time: float
    generation: int
    last: int


class Tail:
    """Lines as they are added. An unfinished one may be cut off again, and is left alone."""

    def __init__(self, path: Path) -> None:
        self._path, self._at = path, 0

    def read(self) -> list[Entry]:
        try:
            with self._path.open("rb") as file:
                file.seek(self._at)
                new = file.read()
        except FileNotFoundError:
            return []
        whole = new[: new.rfind(b"\n") + 1]
        self._at += len(whole)
        return [json.loads(line) for line in whole.splitlines()]


class Scene:
    """Who is there, and what has happened so far."""

    def __init__(self, journal: Path) -> None:
        self.living: dict[int, int] = {}
        """The pid of each member that is not lost."""
        self.seen: set[int] = set()
        """Members there ever were."""
        self.order: list[int] = []
        """The members of the last generation."""
        self.began = 0
        """The version at which it began."""
        self.version = 0
        self.coordinator: int | None = None
        self.events: list[Entry] = []
        """All but commits."""
        self.commits: list[Commit] = []
        self.is_over = False
        """Whether the members are leaving."""
        self._tail = Tail(journal)

    @property
    def leader(self) -> int | None:
        return next((member for member in self.order if member in self.living), None)

    @property
    def taking_part(self) -> list[int]:
        """Members of the last generation that are not lost."""
        return [member for member in self.order if member in self.living]

    def update(self) -> None:
        for entry in self._tail.read():
            if entry["kind"] == "committed":
                self._committed(entry)
            else:
                self.events.append(entry)
                self._happened(entry["kind"], entry)

    def _committed(self, entry: Entry) -> None:
        self.version = max(self.version, entry["last"])
        self.commits.append(Commit(entry["time"], entry["generation"], entry["last"]))

    def _happened(self, kind: str, entry: Entry) -> None:
        if kind == "joined":
            self.seen.add(entry["member"])
            self.living[entry["member"]] = entry["pid"]
        elif kind == "lost":
            self.living.pop(entry["member"], None)
        elif kind == "generation":
            self.order, self.began = entry["members"], entry["version"]
        elif kind == "coordinator":
            self.coordinator = entry["pid"]
        elif kind == "rolled_back":
            self.version = entry["version"]
        elif kind in ("over", "finished"):
            self.is_over = True

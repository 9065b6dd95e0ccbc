"""A journal read from its beginning: what holds after its last line.

begun ─ generation ─ committed … ─ lost ─ generation ─ recovered ─ committed … ─ finished
  └ again after a resume, mostly with `rolled_back`: what came after that version never was
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from echelon.core.errors import DataError
from echelon.core.types import Lease
from echelon.data.chronicle import Chronicle
from echelon.data.intervals import Intervals
from echelon.data.journal import entries
from echelon.data.record import Record

Entry = dict[str, Any]


class Part(NamedTuple):
    """A record, and in which circumstances it was made."""

    record: Record
    generation: int | None
    """None for what a checkpoint said."""
    size: int
    """Samples of a whole lease."""
    member: int | None = None
    """Whoever made it alone; None if the generation did it together."""

    def continued_by(self, other: Part) -> bool:
        """Whether both are one stretch of whole leases."""
        mine, its = self.record, other.record
        return (
            self[1:] == other[1:]
            and (mine.epoch, mine.stop, mine.last + 1) == (its.epoch, its.start, its.first)
            and mine.samples % self.size == 0
            and not (mine.left_out or its.left_out)
        )


class Generation(NamedTuple):
    members: list[int]
    parts: int
    """A batch is cut in so many; members that hold parts of one model share theirs."""


class Fault(ValueError):
    """An entry that cannot be."""


class Replay:
    """Takes the entries of a journal one after the other."""

    def __init__(self) -> None:
        self.run = ""
        self.samples = 0
        self.size = 0
        self.version = 0
        self.base = 0
        self.status: str | None = None
        self.parts: list[Part] = []
        self.generations: dict[int, Generation] = {}
        self.shares: dict[int, list[tuple[int, list[float]]]] = {}
        self.chronicle = Chronicle()
        self._latest: Record | None = None
        self._problems: list[tuple[int, str]] = []
        """What cannot be, and the version at which it came to light."""
        self._takers: dict[str, Callable[[Entry], None]] = {
            "begun": self._begun,
            "taken_over": self._taken_over,
            "generation": self._generation,
            "shares": self._shares,
            "committed": self._committed,
            "rolled_back": self._rolled_back,
            "finished": self._finished,
        }

    def take(self, entry: Entry) -> None:
        """Go on with one entry; of a kind that is unknown here nothing follows."""
        taker = self._takers.get(entry["kind"])
        if taker is not None:
            taker(entry)
        self.chronicle.take(entry, self.version)

    @property
    def problems(self) -> list[str]:
        return [problem for _, problem in self._problems]

    def positions(self, version: int, left_out: Iterable[Lease]) -> dict[int, Intervals]:
        """What was consumed of each epoch at `version`, given what had been left out by then."""
        done: dict[int, Intervals] = {}
        for part in _until(self.parts, version, left_out):
            epoch, start, stop, *_ = part.record
            done.setdefault(epoch, Intervals()).add(start, stop)
        return done

    def at_odds(self, version: int, left_out: Iterable[Lease]) -> bool:
        """Whether going on from `version`, given what had been left out, undoes something."""
        return len(list(_until(self.parts, version, left_out))) < len(self.parts)

    def _begun(self, entry: Entry) -> None:
        samples = _count(entry, "samples", 1)
        if self.samples not in (0, samples):
            raise Fault(f"the run has {samples:,} samples, and began with {self.samples:,}")
        self.run = str(entry.get("run", ""))
        self.samples, self.size = samples, _count(entry, "batch_size", 1)
        self.status = None

    def _taken_over(self, entry: Entry) -> None:
        """There was no journal before; a checkpoint tells what was consumed."""
        version = self.base = self.version = _count(entry, "version")
        ledger, left_out = entry["ledger"], [Lease(*lease) for lease in entry["left_out"]]
        pages = [(n, [(0, self.samples)], (first, last)) for n, first, last in ledger["whole"]]
        pages += [
            (page["epoch"], [*page["done"], *page["twice"]], page["versions"])
            for page in ledger["parts"]
        ]
        records = [Record(*lease, version + 1, version) for lease in left_out]
        for epoch, ranges, (first, last) in pages:
            out = [lease for lease in left_out if lease.epoch == epoch]
            for pair in ranges:
                records += (Record(epoch, *rest, first, last) for rest in _without(pair, out))
        self.parts = [Part(record, None, self.samples) for record in records]
        self._problems.clear()

    def _generation(self, entry: Entry) -> None:
        members = entry["members"]
        if not isinstance(members, list) or not members:
            raise Fault(f"members are {members!r}, and must be a list of their numbers")
        parts = entry.get("parts") or len(members)
        self.generations[_count(entry, "number")] = Generation(members, parts)
        if entry.get("shares"):
            self._shares({**entry, "generation": entry["number"]})

    def _shares(self, entry: Entry) -> None:
        shares = [float(share) for share in entry["shares"]]
        if not all(math.isfinite(share) and share >= 0 for share in shares) or not sum(shares):
            raise Fault(f"shares {shares} cannot be")
        number = _count(entry, "generation")
        if number not in self.generations or self.generations[number].parts != len(shares):
            raise Fault(f"{len(shares)} shares are not those of generation {number}")
        self.shares.setdefault(number, []).append((_count(entry, "version"), shares))

    def _committed(self, entry: Entry) -> None:
        record = Record(*(_count(entry, name) for name in Record._fields))
        if not self.samples:
            raise Fault("a commit before the run began")
        if not record.start < record.stop <= self.samples or record.first > record.last + 1:
            raise Fault(f"a commit of positions {record.start:,} to {record.stop:,} cannot be")
        if record == self._latest:
            return  # whoever wrote it was interrupted before it could know
        self._latest = record
        member = entry.get("member")
        if member is None:
            self._check_order(record)
        part = Part(record, _count(entry, "generation"), self.size, member)
        if self.parts and self.parts[-1].continued_by(part):
            last = self.parts[-1]
            grown = last.record._replace(stop=record.stop, last=record.last)
            self.parts[-1] = last._replace(record=grown)
        else:
            self.parts.append(part)
        self.version = max(self.version, record.last)
        self.chronicle.committed(entry["time"], self.version)

    def _check_order(self, record: Record) -> None:
        """Updates made together follow one another."""
        missing, where = record.first - self.version - 1, f"epoch {record.epoch}"
        if missing > 0:
            self._wrong(
                record.first,
                f"{where}: {missing:,} updates between version {self.version:,} and "
                f"{record.first:,} are not in the journal",
            )
        elif missing < 0:
            self._wrong(
                record.first,
                f"{where}: version {record.first:,} follows version {self.version:,}: "
                f"positions {record.start:,} to {record.stop:,} were committed in the past",
            )

    def _rolled_back(self, entry: Entry) -> None:
        version, before = _count(entry, "version"), self.version
        left_out = entry.get("left_out")
        kept = None if left_out is None else [Lease(*lease) for lease in left_out]
        self.parts = list(_until(self.parts, version, kept))
        self._latest = None
        self._problems = [known for known in self._problems if known[0] <= version]
        self.version = version
        if version > before:
            problem = f"the run went on from version {version:,} when {before:,} was the last"
            self._wrong(version, problem)
        self.chronicle.rolled_back(entry, before, version)

    def _finished(self, entry: Entry) -> None:
        self.status = str(entry["status"])
        if (version := _count(entry, "version")) > self.version:
            problem = (
                f"the run ended at version {version:,} and the commits end at {self.version:,}"
            )
            self._wrong(version, problem)

    def _wrong(self, version: int, problem: str) -> None:
        self._problems.append((version, problem))


def replay(path: Path) -> Replay:
    """The whole journal; an entry that cannot be is named by its line."""
    found = Replay()
    for number, entry in enumerate(entries(path), 1):
        try:
            found.take(entry)
        except (Fault, KeyError, TypeError, ValueError, OverflowError) as error:
            what = f"has no {error}" if isinstance(error, KeyError) else str(error)
            raise DataError(f"{path}, line {number}: {entry['kind']}: {what}") from None
    return found


def _until(parts: list[Part], version: int, left_out: Iterable[Lease] | None) -> Iterable[Part]:
    """What of these was done at `version`.

    Of what was left out at this very version only the caller may know whether it was before the
    cut or after it: then `left_out` is all that was before.
    """
    known = None if left_out is None else {tuple(lease) for lease in left_out}
    for part in parts:
        record = part.record.until(version, part.size)
        if record is None:
            continue
        late = record.left_out and record.last == version
        if not late or known is None or record[:3] in known:
            yield part._replace(record=record)


def _without(pair: tuple[int, int], leases: Iterable[Lease]) -> Intervals:
    rest = Intervals([pair])
    for lease in leases:
        rest.remove(lease.start, lease.stop)
    return rest


def _count(entry: Entry, name: str, least: int = 0) -> int:
    value = entry[name]
    if type(value) is not int or value < least:
        raise Fault(f"{name} is {value!r}, and must be a whole number from {least} on")
    return value

"""Journal → replayed state → exactly-once report.

A journal read from its beginning: what holds after its last line.

begun ─ generation ─ committed … ─ lost ─ generation ─ recovered ─ committed … ─ finished
  └ again after a resume, mostly with `rolled_back`: what came after that version never was
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from echelon.core.errors import DataError
from echelon.core.types import Lease
from echelon.data.intervals import Intervals
from echelon.data.journal import entries
from echelon.data.ledger import Record, counts

Entry = dict[str, Any]


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


# Events beside the updates


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


class Happening(NamedTuple):
    """Something that was no update, and what it cost if that is known."""

    kind: str
    time: float
    version: int
    """The last one on record at that time."""
    member: int | None
    text: str
    seconds: float | None = None
    """Until the next update was made; of a rollback, until all that it undid was made again."""
    lost_steps: int | None = None


# The report


@dataclass(slots=True)
class Account:
    """All that a journal says about one run."""

    run: str
    samples: int
    batch_size: int
    version: int
    status: str | None
    """How it ended; None if it is under way, or was killed."""
    taken_over: int
    """The version up to which there was no journal and a checkpoint was believed."""
    epochs: list[EpochAccount]
    generations: int
    happenings: list[Happening]
    problems: list[str] = field(default_factory=list)

    @property
    def failures(self) -> Sequence[Happening]:
        return [h for h in self.happenings if h.kind in ("lost", "coordinator", "rolled_back")]

    @property
    def members(self) -> dict[int, int]:
        """Samples processed by each in all."""
        total: dict[int, int] = {}
        for epoch in self.epochs:
            for member, count in epoch.members.items():
                total[member] = total.get(member, 0) + count
        return dict(sorted(total.items()))

    def as_data(self) -> dict[str, Any]:
        """As plain JSON data."""
        return {
            "run": self.run,
            "exactly_once": not self.problems,
            "problems": self.problems,
            "status": self.status,
            "samples": self.samples,
            "batch_size": self.batch_size,
            "version": self.version,
            "taken_over": self.taken_over,
            "generations": self.generations,
            "members": {str(member): count for member, count in self.members.items()},
            "epochs": [asdict(epoch) for epoch in self.epochs],
            "happenings": [happening._asdict() for happening in self.happenings],
        }


@dataclass(frozen=True, slots=True)
class EpochAccount:
    """One epoch: `once`, `left_out`, `twice` and `never` add up to `samples`."""

    epoch: int
    samples: int
    once: int
    left_out: int
    """Consumed without an update, because theirs was not finite."""
    twice: int
    never: int
    first: int | None
    last: int | None
    """The versions that consumed something of it; None if nothing but what was left out."""
    finished: bool
    """Nothing is left, or a later epoch has begun."""
    members: dict[int, int]
    """Samples processed by each; members that hold parts of one model count the same ones."""
    twice_at: list[tuple[int, int]]
    never_at: list[tuple[int, int]]

    @property
    def exact(self) -> bool:
        """Nothing twice, and nothing forgotten."""
        return not self.twice and not (self.finished and self.never)


def account(found: Replay) -> Account:
    """What was consumed how often, by whom, and what is wrong with it."""
    by_epoch: dict[int, list[Part]] = {}
    for part in found.parts:
        by_epoch.setdefault(part.record.epoch, []).append(part)
    newest = max(by_epoch, default=0)
    epochs = [_epoch(found, n, by_epoch[n], n < newest) for n in sorted(by_epoch)]
    unknown = {part.generation for part in found.parts} - found.generations.keys() - {None}
    return Account(
        run=found.run,
        samples=found.samples,
        batch_size=found.size,
        version=found.version,
        status=found.status,
        taken_over=found.base,
        epochs=epochs,
        generations=len(found.generations),
        happenings=sorted(found.chronicle.happenings, key=lambda happening: happening.time),
        problems=[
            *_skipped(sorted(by_epoch)),
            *filter(None, map(broken, epochs)),
            *found.problems,
            *(f"generation {number} made updates and is not in the journal" for number in unknown),
        ],
    )


def _skipped(epochs: Sequence[int]) -> Iterator[str]:
    """Epochs of which nothing is known, before others of which something is."""
    for before, epoch in pairwise([-1, *epochs]):
        if epoch > before + 1:
            yield f"epochs {before + 1} to {epoch - 1}: all samples never"


_SHOWN = 3
"""Ranges named in one line; the others are counted."""


def broken(epoch: EpochAccount) -> str | None:
    """One line about an epoch that is not exactly once."""
    if epoch.exact:
        return None
    faults = [_ranges("twice", epoch.twice, epoch.twice_at)] if epoch.twice else []
    if epoch.finished and epoch.never:
        faults.append(_ranges("never", epoch.never, epoch.never_at))
    return f"epoch {epoch.epoch}: {', '.join(faults)}"


def _ranges(what: str, total: int, ranges: Sequence[tuple[int, int]]) -> str:
    named = ", ".join(f"{start:,} to {stop:,}" for start, stop in ranges[:_SHOWN])
    more = f" and {len(ranges) - _SHOWN} more ranges" if len(ranges) > _SHOWN else ""
    return f"{total:,} samples {what} (positions {named}{more})"


def _epoch(found: Replay, number: int, parts: Sequence[Part], followed: bool) -> EpochAccount:
    done, twice, left = Intervals(), Intervals(), Intervals()
    members: dict[int, int] = {}
    for part in parts:
        _, start, stop, *_ = part.record
        for again in done.common(start, stop):
            twice.add(*again)
        done.add(start, stop)
        if part.record.left_out:
            left.add(start, stop)
        for member, count in _processed(found, part):
            members[member] = members.get(member, 0) + count
    left_out = left.total - sum(left.overlap(*pair) for pair in twice)
    made = [part.record for part in parts if not part.record.left_out]
    never = Intervals([(0, found.samples)])
    for pair in done:
        never.remove(*pair)
    return EpochAccount(
        epoch=number,
        samples=found.samples,
        once=done.total - twice.total - left_out,
        left_out=left_out,
        twice=twice.total,
        never=never.total,
        first=min((record.first for record in made), default=None),
        last=max((record.last for record in made), default=None),
        finished=followed or not never,
        members=dict(sorted(members.items())),
        twice_at=list(twice),
        never_at=list(never),
    )


def _processed(found: Replay, part: Part) -> Iterator[tuple[int, int]]:
    """Who worked on how many samples of it: a lease is split as the loader splits it."""
    if part.record.left_out:
        return
    if part.member is not None:
        yield part.member, part.record.samples
        return
    generation = found.generations.get(part.generation) if part.generation is not None else None
    if generation is None:
        return
    members, pieces = generation
    for record, shares in _by_shares(found, part, pieces):
        whole, rest = divmod(record.samples, part.size)
        each = zip(counts(part.size, shares), counts(rest, shares), strict=True)
        made = [whole * full + last for full, last in each]
        for place, member in enumerate(members):
            yield member, made[place * pieces // len(members)]


def _by_shares(found: Replay, part: Part, pieces: int) -> Iterator[tuple[Record, list[float]]]:
    """A record, cut where the generation's shares changed."""
    rest: Record | None = part.record
    shares = [1.0] * pieces
    for version, changed in sorted(found.shares.get(part.generation or 0, [])):
        if rest is None:
            return
        if (before := rest.until(version - 1, part.size)) is not None:
            yield before, shares
        rest, shares = rest.after(version - 1, part.size), changed
    if rest is not None:
        yield rest, shares

"""The proof of exactly-once, computed from a run's journal alone.

    journal.jsonl ── replay() ──▶ Replay (the commits that hold, events) ── account() ──▶ Account

`Replay` takes the entries in order, `Account` is the report. A journal reads

    begun ─ generation ─ committed … ─ lost ─ generation ─ recovered ─ committed … ─ finished
      └ again after a resume, mostly with `rolled_back`, which undoes all commits after its version

Positions that were consumed twice or never, and versions that are missing, become `problems` of the
report. An entry that contradicts the ones before it is an error that names its line.
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
    """Read the whole journal. Raises DataError with the line of the first impossible entry."""
    found = Replay()
    for number, entry in enumerate(entries(path), 1):
        try:
            found.take(entry)
        except (Fault, KeyError, TypeError, ValueError, OverflowError) as error:
            what = f"has no {error}" if isinstance(error, KeyError) else str(error)
            raise DataError(f"{path}, line {number}: {entry['kind']}: {what}") from None
    return found


class Fault(ValueError):
    """An entry that is impossible or contradicts the entries before it."""


class Replay:
    """The state of a run after the entries taken so far."""

    def __init__(self) -> None:
        self.run = ""
        self.samples = 0
        self.size = 0
        """Samples per batch, since the last start."""
        self.version = 0
        self.base = 0
        """The version of the checkpoint that the journal begins with."""
        self.status: str | None = None
        self.parts: list[Part] = []
        """All commits that hold: those that a rollback undid are gone."""
        self.generations: dict[int, Generation] = {}
        self.shares: dict[int, list[tuple[int, list[float]]]] = {}
        """By generation: how a batch is divided from a version on."""
        self.chronicle = Chronicle()
        self._latest: Record | None = None
        self._problems: list[tuple[int, str]] = []
        """Problems, each with the version at which it showed; a rollback before it removes it."""
        self._handlers: dict[str, Callable[[Entry], None]] = {
            "begun": self._begun,
            "taken_over": self._taken_over,
            "generation": self._generation,
            "shares": self._shares,
            "committed": self._committed,
            "rolled_back": self._rolled_back,
            "finished": self._finished,
        }

    def take(self, entry: Entry) -> None:
        """Apply one entry; entries of unknown kinds change nothing."""
        handler = self._handlers.get(entry["kind"])
        if handler is not None:
            handler(entry)
        self.chronicle.take(entry, self.version)

    @property
    def problems(self) -> list[str]:
        return [problem for _, problem in self._problems]

    def positions(self, version: int, left_out: Iterable[Lease]) -> dict[int, Intervals]:
        """Return the positions of each epoch consumed at `version`.

        `left_out` has all leases that had been left out by then.
        """
        done: dict[int, Intervals] = {}
        for part in _until(self.parts, version, left_out):
            epoch, start, stop, *_ = part.record
            done.setdefault(epoch, Intervals()).add(start, stop)
        return done

    def at_odds(self, version: int, left_out: Iterable[Lease]) -> bool:
        """Return whether going on from `version` undoes commits; see `positions` for `left_out`."""
        return len(list(_until(self.parts, version, left_out))) < len(self.parts)

    def _begun(self, entry: Entry) -> None:
        samples = _count(entry, "samples", 1)
        if self.samples not in (0, samples):
            raise Fault(f"the run has {samples:,} samples, and began with {self.samples:,}")
        self.run = str(entry.get("run", ""))
        self.samples, self.size = samples, _count(entry, "batch_size", 1)
        self.status = None

    def _taken_over(self, entry: Entry) -> None:
        """Start from a checkpoint's ledger, because the run had no journal before."""
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
            return  # the writer was interrupted before it knew that its line was written
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
        """Note a problem unless the record begins at the version after the last one."""
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
    """A record and the circumstances in which it was made."""

    record: Record
    generation: int | None
    """None if it is from a checkpoint."""
    size: int
    """Samples of a full lease."""
    member: int | None = None
    """The worker that made the updates alone; None if the generation made them together."""

    def continued_by(self, other: Part) -> bool:
        """Return whether `other` extends this part by full leases made in the same way."""
        mine, its = self.record, other.record
        return (
            self[1:] == other[1:]
            and (mine.epoch, mine.stop, mine.last + 1) == (its.epoch, its.start, its.first)
            and mine.samples % self.size == 0
            and not (mine.left_out or its.left_out)
        )


class Generation(NamedTuple):
    """A fixed set of members that make updates together."""

    members: list[int]
    parts: int
    """How many parts a batch is divided into; members that share one model share a part."""


def _until(parts: list[Part], version: int, left_out: Iterable[Lease] | None) -> Iterable[Part]:
    """Yield what of these parts was done at `version`.

    A lease that was left out at exactly this version may have been left out before or after the
    state of the version was saved. `left_out`, if given, has all leases left out before that.
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
    """Losses, joins, stalls and rollbacks in order, and how long it took to recover from them."""

    def __init__(self) -> None:
        self.happenings: list[Happening] = []
        self._was_begun = self._has_generation = self._over = False
        self._time = 0.0
        self._open: list[int] = []
        """Indices of the losses that no `recovered` entry has followed yet."""
        self._undone: dict[int, int] = {}
        """Index of each rollback that is not made up for yet: the version to reach again."""
        self._handlers: dict[str, Callable[[Entry, int], None]] = {
            "begun": self._begun,
            "generation": self._generation,
            "over": self._ended,
            "finished": self._ended,
            "coordinator": self._coordinator,
            "joined": self._joined,
            "lost": self._lost,
            "recovered": self._recovered,
            "stalled": self._stalled,
        }

    def take(self, entry: Entry, version: int) -> None:
        """Apply one entry; `version` is that of the last commit."""
        handler = self._handlers.get(entry["kind"])
        if handler is not None:
            handler(entry, version)
        self._time = entry["time"]

    def rolled_back(self, entry: Entry, before: int, version: int) -> None:
        """Add a rollback. Its cost is counted from the time of the last entry before it."""
        since = self._time or entry["time"]
        lost = max(0, before - version)
        if lost:
            self._undone[len(self.happenings)] = before
        why = str(entry.get("why", ""))
        self.happenings.append(
            Happening("rolled_back", since, before, None, why, None if lost else 0.0, lost)
        )

    def committed(self, now: float, version: int) -> None:
        """Set the cost of the rollbacks whose undone updates have been made again by now."""
        for place in [place for place, before in self._undone.items() if before <= version]:
            del self._undone[place]
            happening = self.happenings[place]
            seconds = round(now - happening.time, 3)
            self.happenings[place] = happening._replace(seconds=seconds)

    def _begun(self, entry: Entry, version: int) -> None:
        if self._was_begun:
            count = entry.get("workers")
            text = "1 worker" if count == 1 else f"{count} workers"
            self.happenings.append(Happening("resumed", entry["time"], version, None, text))
        self._was_begun, self._has_generation, self._over = True, False, False

    def _generation(self, _entry: Entry, _version: int) -> None:
        self._has_generation = True

    def _ended(self, _entry: Entry, _version: int) -> None:
        self._over = True

    def _coordinator(self, entry: Entry, version: int) -> None:
        if entry.get("again"):
            self._happened(entry, version, f"started again as process {entry.get('pid')}")

    def _joined(self, entry: Entry, version: int) -> None:
        # Workers that join before the first generation belong to the start of the run.
        if self._has_generation:
            host = str(entry.get("host")).partition("/")[0]  # the rest separates equal host names
            self._happened(entry, version, f"process {entry.get('pid')} on {host}")

    def _lost(self, entry: Entry, version: int) -> None:
        if self._over and entry["how"] == "left":
            return  # the run is over, and all workers leave
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
    """An event that is not an update, and its cost if known."""

    kind: str
    time: float
    version: int
    """The version of the last commit at that time."""
    member: int | None
    text: str
    seconds: float | None = None
    """Seconds until the next update; for a rollback, until all undone updates were made again."""
    lost_steps: int | None = None


# The report


@dataclass(slots=True)
class Account:
    """The report on one run."""

    run: str
    samples: int
    batch_size: int
    version: int
    status: str | None
    """How the run ended; None if it is running or was killed."""
    taken_over: int
    """The version of the checkpoint that the journal begins with; 0 if it covers the whole run."""
    epochs: list[EpochAccount]
    generations: int
    happenings: list[Happening]
    problems: list[str] = field(default_factory=list)

    @property
    def failures(self) -> Sequence[Happening]:
        return [h for h in self.happenings if h.kind in ("lost", "coordinator", "rolled_back")]

    @property
    def members(self) -> dict[int, int]:
        """Samples processed by each member in all epochs."""
        total: dict[int, int] = {}
        for epoch in self.epochs:
            for member, count in epoch.members.items():
                total[member] = total.get(member, 0) + count
        return dict(sorted(total.items()))

    def as_data(self) -> dict[str, Any]:
        """Return the report as plain JSON data."""
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
    """The report on one epoch: `once`, `left_out`, `twice` and `never` add up to `samples`."""

    epoch: int
    samples: int
    once: int
    left_out: int
    """Samples consumed without an update, because it was not finite."""
    twice: int
    never: int
    first: int | None
    last: int | None
    """The first and last version that consumed samples; None if all of them were left out."""
    finished: bool
    """Whether no samples remain or a later epoch has begun."""
    members: dict[int, int]
    """Samples processed by each member; members that share one model count the same samples."""
    twice_at: list[tuple[int, int]]
    never_at: list[tuple[int, int]]

    @property
    def exact(self) -> bool:
        """Whether no sample was consumed twice and, once finished, none was missed."""
        return not self.twice and not (self.finished and self.never)


def account(found: Replay) -> Account:
    """Count how often each position was consumed and by whom, and collect all problems."""
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
    """Yield a problem for epochs without any commit that come before an epoch with one."""
    for before, epoch in pairwise([-1, *epochs]):
        if epoch > before + 1:
            yield f"epochs {before + 1} to {epoch - 1}: all samples never"


_SHOWN = 3
"""Ranges named in a problem; the others are counted."""


def broken(epoch: EpochAccount) -> str | None:
    """Return one line about an epoch that is not exact, else None."""
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
    """Yield how many samples of a part each member processed; leases are split as in `Loader`."""
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
    """Cut a part's record where the shares of its generation changed."""
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

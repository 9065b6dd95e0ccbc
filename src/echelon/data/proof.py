"""The proof of exactly-once, computed from a journal alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from echelon.data.account import Account, EpochAccount
from echelon.data.intervals import Intervals
from echelon.data.record import Record
from echelon.data.replay import Part, Replay
from echelon.data.split import counts

_SHOWN = 3
"""Ranges named in one line; the others are counted."""


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


def broken(epoch: EpochAccount) -> str | None:
    """One line about an epoch that is not exactly once."""
    if epoch.exact:
        return None
    faults = [_ranges("twice", epoch.twice, epoch.twice_at)] if epoch.twice else []
    if epoch.finished and epoch.never:
        faults.append(_ranges("never", epoch.never, epoch.never_at))
    return f"epoch {epoch.epoch}: {', '.join(faults)}"


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


def _ranges(what: str, total: int, ranges: Sequence[tuple[int, int]]) -> str:
    named = ", ".join(f"{start:,} to {stop:,}" for start, stop in ranges[:_SHOWN])
    more = f" and {len(ranges) - _SHOWN} more ranges" if len(ranges) > _SHOWN else ""
    return f"{total:,} samples {what} (positions {named}{more})"

"""Run: 12 fields; Progress, Membership, StopRules, Meter, evaluate."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor

from echelon.checkpoint import Shelf, Writer
from echelon.checkpoint import state as randomness
from echelon.core.config import Job
from echelon.core.errors import Left, NonFiniteError, PeerError, TrainingError
from echelon.core.interfaces import Comm, Metric, Observer, RemoteStrategy, Schedule, Strategy
from echelon.core.types import Ask, Lease, Stats, Update
from echelon.data.ledger import Ledger
from echelon.data.loader import Loader, ranges
from echelon.loop.agreement import Fellows
from echelon.optim import EarlyStop

# --- limits ---
# When a run ends.


@dataclass(frozen=True, slots=True)
class Limits:
    """Epochs, steps and seconds; whichever comes first."""

    epochs: int | None
    steps: int | None
    seconds: float | None

    @classmethod
    def of(cls, job: Job) -> Limits:
        return cls(job.epochs, job.steps, None if job.minutes is None else job.minutes * 60)

    def total_steps(self, samples: int, batch_size: int) -> int | None:
        """How many updates there will be at most, if that can be known."""
        per_epoch = -(-samples // batch_size)
        ends = [] if self.epochs is None else [self.epochs * per_epoch]
        ends += [] if self.steps is None else [self.steps]
        return min(ends, default=None)

    def reached(self, version: int) -> str | None:
        """Why to stop at this version, if so."""
        if self.steps is not None and version >= self.steps:
            return f"{self.steps} steps done"
        return None

    def late(self, seconds: float) -> bool:
        """Whether the time is over."""
        return self.seconds is not None and seconds >= self.seconds


# --- meter ---
# Adds up what the updates report.


class Meter:
    """Loss and speed since the last reading, and totals since the start."""

    def __init__(self, samples: int = 0) -> None:
        self.samples = samples
        self._loss_sum = 0.0
        self._weight = 0.0
        self._last_loss = float("nan")
        self.steps = 0
        self._samples = 0
        self._since = time.perf_counter()
        self._rates = (0.0, 0.0)

    def add(self, done: Update, size: int, steps: int = 1) -> None:
        """An update of so many samples; or `steps` like it, of which others made the rest."""
        self._loss_sum += done.loss_sum
        self._weight += done.weight
        self.steps += steps
        self._samples += size * steps
        self.samples += size * steps

    def peek(self) -> dict[str, float]:
        """Loss and rates of the current window, or of the last one while this one is empty."""
        seconds = time.perf_counter() - self._since
        if self.steps and seconds > 0:
            self._rates = (self.steps / seconds, self._samples / seconds)
        if self._weight:
            self._last_loss = self._loss_sum / self._weight
        return {
            "loss": self._last_loss,
            "steps_per_s": self._rates[0],
            "samples_per_s": self._rates[1],
        }

    def read(self) -> dict[str, float]:
        """The current window's figures; a new window begins."""
        values = self.peek()
        self.restart()
        return values

    def restart(self) -> None:
        """Begin a new window."""
        self._loss_sum, self._weight, self.steps, self._samples = 0.0, 0.0, 0, 0
        self._since = time.perf_counter()

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Time spent inside, on an evaluation say, does not count as training."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._since += time.perf_counter() - began


# --- recording ---
# Whoever takes down what is committed.


class Recording(Protocol):
    """Takes down what is committed."""

    def tick(self) -> None:
        """Called often; writes seldom."""
        ...

    def keep(self) -> None:
        """Before what is committed becomes part of a checkpoint."""
        ...


# --- evaluate ---
# Look at the held-out samples, each exactly once.


class Evaluation(NamedTuple):
    """Figures, and the sums they were computed from."""

    values: dict[str, float]
    totals: dict[str, Tensor]
    samples: int


def evaluation_size(job: Job) -> int:
    """Samples looked at together: no gradients are kept, so there is room for more."""
    return job.evaluate.batch_size or max(job.batch_size, 256)


def evaluate(
    strategy: Strategy, loader: Loader, metrics: Mapping[str, Metric], batch_size: int
) -> Evaluation:
    """Loss and metrics over everything the loader has; members look at a part each."""
    loss_sum, weight = 0.0, 0.0
    totals: dict[str, Tensor] = {}
    with closing(loader.stream(ranges(len(loader.source), batch_size))) as stream:
        for _lease, micro in stream:
            stats = strategy.compute(micro, backward=False)
            loss_sum += float(stats.loss_sum)
            weight += stats.weight
            for name, part in stats.metrics.items():
                totals[name] = totals[name] + part if name in totals else part
    seen = strategy.total(Stats(torch.tensor(loss_sum, dtype=torch.float64), weight, totals))
    if seen.weight == 0:
        raise TrainingError("the held-out samples have no weight: there is nothing to evaluate")
    values = {"loss": float(seen.loss_sum) / seen.weight}
    values |= {name: metrics[name].value(total) for name, total in seen.metrics.items()}
    return Evaluation(values, dict(seen.metrics), len(loader.source))


# --- run ---
# One run under way: what the loop works on and what is due between its steps.

TICK = 0.1
"""Seconds between two looks at the clock's work: progress, time limit."""


@dataclass(slots=True)
class Run:
    """Owned by one process; `cut` and `load` are the whole of what a resume needs."""

    job: Job
    comm: Comm
    fellows: Fellows
    strategy: Strategy
    schedule: Schedule
    ledger: Ledger
    loader: Loader
    valid: Loader | None
    metrics: dict[str, Metric]
    shelf: Shelf
    observer: Observer
    pending: list[str]
    """What was noticed before anybody could be told."""
    limits: Limits
    early: EarlyStop
    meter: Meter = field(default_factory=Meter)
    version: int = 0
    epoch: int = 0
    due_at: int = 0
    tick_at: float = 0.0
    evaluation: Evaluation | None = None
    interrupted: str | None = None
    """Why the run ends before its time, once all members know of it."""
    timed_out: str | None = None
    left_out: list[Lease] = field(default_factory=list)
    """Samples without a finite update, where the job says to go on without them."""
    clerk: Recording | None = None
    """Whoever keeps the journal; None if it is not this member's business."""
    writer: Writer = field(init=False)
    _ready: bool = False
    gathering: bool = False
    """Whether the members are to meet before the next update."""
    missed: PeerError | None = None
    """How another member was lost, until the rest has met again."""
    arrivals: bool = False
    """Whether somebody waits to join."""
    secured: bool = False
    """Whether there is a checkpoint to begin from, or no need for one."""
    heard: int = 0
    """What was asked for since members last met, where each makes updates for itself."""
    met_at: int = 0
    """The version at which they last met."""
    opened: bool = False
    """Whether members have met in this generation."""
    newcomer: bool = False
    """Whether this member's state is not worth anything yet."""
    guest: bool = False
    """Whether a signal sends this member away, and does not end the run."""
    lead: Callable[[], None] = lambda: None
    """Called in every new generation: whoever is the first one leads."""
    rebuild: Callable[[], Strategy] = field(init=False)
    """Set up the strategy anew, for the members there are now."""
    share_cores: Callable[[int], None] = lambda _members: None
    """Divide this machine's cores among so many."""
    nodes: dict[str, Any] = field(default_factory=dict)
    """What each trainer and each server did, where there are servers."""
    _logged_at: int = -1
    _wish: str | None = None
    _seconds: float = 0.0
    _started: float = field(default_factory=time.perf_counter)
    _evaluated_at: int = -1
    _best_at: int = -1
    _saved_at: int = -1

    def __post_init__(self) -> None:
        self.writer = Writer(self.shelf, notice=self.pending.append, allowed=self.comm.on_record)

    @property
    def batch_size(self) -> int:
        return self.job.batch_size

    @property
    def seconds(self) -> float:
        """Time spent on this run, earlier sittings included."""
        return self._seconds + time.perf_counter() - self._started

    @property
    def to_meet(self) -> bool:
        """Whether members that go their own ways have to come together now."""
        return self.strategy.apart and (self.heard != 0 or self.ledger.dry)

    @property
    def progress(self) -> list[int]:
        """Compared with other members': who is further than whom."""
        made = self.met_at if self.strategy.apart else self.version
        return [made, self._evaluated_at, self.epoch]

    def attend(self) -> str | None:
        """Do what is due at this version; returns why to stop, if so."""
        self.glance()
        if self._is_due(self.job.evaluate.every):
            self.evaluate()
        if self._is_due(self.job.checkpoint.every):
            self.save()
        self.due_at = next_due(self.job, self.version)
        return self.over()

    def glance(self) -> None:
        """Tell how it goes, or leave: what can be done without the others."""
        if self.guest and self._wish:
            raise Left(self._wish)
        if time.perf_counter() >= self.tick_at:
            if self.limits.late(self.seconds):
                self.comm.asked |= Ask.TIME
            self.observer.progressed(self.version, self._figures(self.meter.peek()))
            if self.clerk is not None:
                self.clerk.tick()
            self._hear_writer()
            self.tick_at = time.perf_counter() + TICK
        if self._is_due(self.job.track.every, self._logged_at) and self._logged_at != self.version:
            self._logged_at = self.version
            self.observer.logged(self.version, self._figures(self.meter.read()))

    def epoch_done(self) -> str | None:
        """The epoch's own evaluation and checkpoint."""
        if sum(lease.size for lease in self.left_out if lease.epoch == self.epoch) == len(
            self.loader.source
        ):
            raise NonFiniteError(f"no sample of epoch {self.epoch} gave a finite update")
        if self.job.evaluate.every == "epoch":
            self.evaluate()
        if self.job.checkpoint.every == "epoch":
            self.save()
        self.epoch += 1
        return self.over()

    def over(self) -> str | None:
        """Why to stop now, if so; all members find the same."""
        limit = self.limits.reached(self.version)
        return self.interrupted or self.early.should_stop or self.timed_out or limit

    def begin(self) -> None:
        """Start the clocks."""
        self.tell()
        self._started = time.perf_counter()
        self.meter.restart()
        self.due_at = next_due(self.job, self.version)

    def finish(self) -> None:
        """The last evaluation and checkpoint, unless they were just made."""
        self.observer.progressed(self.version, self._figures(self.meter.peek()))
        if self.meter.steps:
            self.observer.logged(self.version, self._figures(self.meter.read()))
        if self.job.evaluate.every != "never" and not self.interrupted:
            self.evaluate()
            if self.evaluation and not self.evaluation.totals:  # known from an earlier sitting
                self.evaluation = self._look()
        self.save(last=True)

    def interrupt(self, why: str) -> None:
        """Ask all members to stop after the same update, or leave after this one; safe to call
        from a signal handler."""
        self._wish = f"stopped by {why}"
        if self.guest:
            self.due_at = 0
        else:
            self.comm.asked |= Ask.SIGNAL

    def heed(self, asked: int) -> None:
        """Some member asked all for something: its clock ran out, it got a signal, …"""
        self.heard |= asked  # where members are apart, others may have heard more
        if not self.strategy.apart:
            self.agreed(asked)

    def agreed(self, asked: int) -> None:
        """All members know of these wishes."""
        self.heard = 0
        if Ask.SIGNAL.among(asked):
            self.interrupted = self._wish or "stopped by another member"
        elif Ask.TIME.among(asked):
            self.timed_out = f"{self.job.minutes:g} minutes are over"
        self.arrivals = Ask.REGROUP.among(asked)
        self.gathering = self.arrivals or Ask.BALANCE.among(asked)
        self.due_at = 0

    def evaluate(self) -> None:
        """Look at the held-out samples, unless that was done at this version."""
        if self.valid is None:
            return
        if self._evaluated_at != self.version:
            self.evaluation = self._look()
            self._evaluated_at = self.version
            values = self.evaluation.values
            if self.early.observe(values[self.job.stop.metric]):
                self._best_at = self.version
            self.observer.evaluated(self.version, values)
            self.strategy.observe(values["loss"])  # the last: others may be lost in it
        if self._best_at == self.version and self.job.checkpoint.best:
            self._save_best()

    def _save_best(self) -> None:
        """Also again, if another member was lost before it was done."""
        if self._saved_at != self.version:
            self.save()
            if self.comm.index == 0:
                self.writer.mark_best(self.version)

    def save(self, *, last: bool = False) -> None:
        """Cut, together; the first member copies it and writes while training goes on."""
        first = self.comm.index == 0
        with self.meter.pause():
            if self._saved_at != self.version:
                self.comm.pulse(self.version + 1, "saving")
                cut = self.cut()
                self._saved_at = self.version
                if first and (self.writer.saved != self.version or not self.version):
                    (self.writer.save_now if last else self.writer.save)(self.version, cut)
                if self.strategy.apart:  # whoever goes on pushes: not before the cut is taken
                    self.fellows.barrier()
            elif first and last:
                self.writer.finish(self.version)
        self.tell()

    def take_over(self) -> None:
        """Checkpoints are this member's affair now: what there is, another one has written."""
        self.writer.saved = max(self.shelf.versions(), default=0)

    def met_again(self) -> None:
        """All of a new generation do the same: what each kept to itself is forgotten."""
        self._saved_at, self.opened = -1, False
        self.secured = not self.strategy.alone  # otherwise there is a first checkpoint again
        self.evaluation = self.evaluation and Evaluation(self.evaluation.values, {}, 0)

    def tell(self) -> None:
        """Pass on what was noticed where nobody could be told."""
        while self.pending:
            self.notice(self.pending.pop(0))

    def notice(self, message: str) -> None:
        """Tell the observers, who know the step themselves."""
        step, _, rest = message.partition(": ")
        self.observer.noticed(self.version, rest if step.startswith("step ") else message)

    def cut(self, *, alone: bool = False, healing: bool = False) -> dict[str, Any]:
        """Everything that decides what comes next, at one version; `alone`, without the others.

        `healing`: for one that is behind, without what it gets elsewhere.
        """
        if self.clerk is not None:
            self.clerk.keep()  # what a checkpoint holds is in the journal before it
        draws = {0: randomness.capture()} if alone else self.fellows.draws()
        if self.strategy.remote:
            cast(RemoteStrategy, self.strategy).spool(self.shelf.folder)
        return {
            "strategy": self.strategy.healing() if healing else self.strategy.state_dict(),
            "ledger": self.ledger.state_dict(),
            "random": draws[0],
            "random_of_others": {shard: state for shard, state in draws.items() if shard},
            "loop": {
                "epoch": self.epoch,
                "samples": self.meter.samples,
                "seconds": self.seconds,
                "early": self.early.state_dict(),
                "evaluated_at": self._evaluated_at,
                "best_at": self._best_at,
                "values": self.evaluation.values if self.evaluation else None,
                "stop": self.job.stop.model_dump(mode="json"),
                "left_out": [list(lease) for lease in self.left_out],
            },
        }

    def load(self, cut: dict[str, Any], *, healed: bool = False) -> None:
        """Be as it says; `healed`: it came from another member, and others need none."""
        loop = cut["loop"]
        self.strategy.load_state_dict(cut["strategy"] | {"ledger": cut["ledger"]})
        self.ledger.load_state_dict(cut["ledger"])
        self.early.load_state_dict(loop["early"])
        if loop["stop"] != self.job.stop.model_dump(mode="json"):
            self.early.should_stop = None  # another rule, another judgement
        self.left_out = [Lease(*lease) for lease in loop["left_out"]]
        self.version = self.met_at = self._saved_at = cut["strategy"]["version"]
        self.writer.saved = min(self.writer.saved, self.version) if healed else self.version
        self.epoch = loop["epoch"]
        self.meter = Meter(loop["samples"])
        self._seconds, self._started = loop["seconds"], time.perf_counter()
        self._evaluated_at, self._best_at = loop["evaluated_at"], loop.get("best_at", -1)
        if loop["values"]:
            self.evaluation = Evaluation(loop["values"], {}, 0)
        if not healed:
            self.fellows.check_version(self.version, self.shelf.folder)
        draws = {0: cut["random"], **cut.get("random_of_others", {})}
        self.fellows.go_on(draws, self.version)

    def _hear_writer(self) -> None:
        """Its complaints; and after the first update, let it make ready for states like this."""
        self.tell()
        self.writer.check()
        if not self._ready:
            self._ready = True
            alone = self.strategy.alone and not self.strategy.remote
            saves = saves_on_the_way(self.job, evaluates=self.valid is not None)
            if self.comm.index == 0 and alone and saves:
                self.writer.prepare(self.strategy.state_dict())

    def _figures(self, values: dict[str, float]) -> dict[str, float]:
        return values | {
            "lr": self.strategy.rate(),
            "epoch": self.epoch,
            "samples": self.meter.samples,
            "seconds": self.seconds,
        }

    def _look(self) -> Evaluation:
        assert self.valid is not None
        with self.meter.pause():
            return evaluate(self.strategy, self.valid, self.metrics, evaluation_size(self.job))

    def _is_due(self, every: object, last: int | None = None) -> bool:
        """At this version; where versions are not seen one by one, since the `last` look."""
        since = (self.met_at if last is None else last) if self.strategy.apart else None
        return is_due(every, self.version, since)


# --- due ---
# At which versions something is due.


def is_due(every: object, version: int, since: int | None = None) -> bool:
    """At this version; with `since`, at any after that one. An epoch's own work has its place."""
    if not isinstance(every, int):
        return False
    if since is None:
        return version % every == 0
    return version // every > max(0, since) // every


def next_due(job: Job, version: int) -> int:
    """The next version with work, so that a step in between costs nothing."""
    intervals = (job.track.every, job.evaluate.every, job.checkpoint.every)
    steps = [version - version % n + n for n in intervals if isinstance(n, int)]
    return min(steps if job.steps is None else [*steps, job.steps])


def saves_on_the_way(job: Job, *, evaluates: bool) -> bool:
    """Whether checkpoints are written before the end."""
    looks = evaluates and job.evaluate.every != "never"
    return job.checkpoint.every != "never" or (looks and job.checkpoint.best)

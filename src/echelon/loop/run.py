"""One run in progress: what the loop in `train.py` works on, and what is due between its steps.

`Run` holds the parts of a run (strategy, ledger, loader, checkpoints, observer) and its position
(version, epoch). After an update the loop calls `Run.attend`, which reports progress, logs,
evaluates and saves a checkpoint when they are due. `Run.cut` returns everything that a resume
needs, and `Run.load` restores it.

The parts around it: `Limits` says when a run ends, `Meter` measures loss and speed, `Recording`
writes what was committed, and `evaluate` computes the metrics of the held-out samples.
"""

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


@dataclass(frozen=True, slots=True)
class Limits:
    """When a run ends: after so many epochs, steps or seconds, whichever comes first."""

    epochs: int | None
    steps: int | None
    seconds: float | None

    @classmethod
    def of(cls, job: Job) -> Limits:
        return cls(job.epochs, job.steps, None if job.minutes is None else job.minutes * 60)

    def total_steps(self, samples: int, batch_size: int) -> int | None:
        """Return the largest possible number of updates, or None if only the time is limited."""
        per_epoch = -(-samples // batch_size)
        ends = [] if self.epochs is None else [self.epochs * per_epoch]
        ends += [] if self.steps is None else [self.steps]
        return min(ends, default=None)

    def reached(self, version: int) -> str | None:
        """Return the reason to stop at this version, or None."""
        if self.steps is not None and version >= self.steps:
            return f"{self.steps} steps done"
        return None

    def late(self, seconds: float) -> bool:
        """Return whether the time is over."""
        return self.seconds is not None and seconds >= self.seconds


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
        """Add an update of `size` samples, or `steps` such updates, all but one by other members.

        Loss and weight are those of this member's update.
        """
        self._loss_sum += done.loss_sum
        self._weight += done.weight
        self.steps += steps
        self._samples += size * steps
        self.samples += size * steps

    def peek(self) -> dict[str, float]:
        """Return loss and rates of the current window, or of the last one while this is empty."""
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
        """Return the values of the current window and begin a new one."""
        values = self.peek()
        self.restart()
        return values

    def restart(self) -> None:
        """Begin a new window."""
        self._loss_sum, self._weight, self.steps, self._samples = 0.0, 0.0, 0, 0
        self._since = time.perf_counter()

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Exclude the time spent inside, for example on an evaluation, from the rates."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._since += time.perf_counter() - began


class Recording(Protocol):
    """Writes committed leases to the journal, or reports them to the coordinator that does."""

    def tick(self) -> None:
        """Write if some time has passed since the last time; called often."""
        ...

    def keep(self) -> None:
        """Write now; called before committed leases become part of a checkpoint."""
        ...


TICK = 0.1
"""Seconds between two progress reports, which also check the time limit."""


@dataclass(slots=True)
class Run:
    """One member's run in progress: its parts, its position, and what is due next."""

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
    """Messages for the observers from places that cannot reach them, such as other threads."""
    limits: Limits
    early: EarlyStop

    # Parts that are made here, or set by the driver.
    meter: Meter = field(default_factory=Meter)
    writer: Writer = field(init=False)
    clerk: Recording | None = None
    """Writes committed leases; None for a member that does not record."""
    lead: Callable[[], None] = lambda: None
    """Called in every new generation, in which another member may have become the leader."""
    rebuild: Callable[[], Strategy] = field(init=False)
    """Set up a new strategy for the present members."""
    share_cores: Callable[[int], None] = lambda _members: None
    """Divide this machine's cores among so many members."""

    # Position and results.
    version: int = 0
    epoch: int = 0
    evaluation: Evaluation | None = None
    left_out: list[Lease] = field(default_factory=list)
    """Samples that were skipped because their update was not finite (`health.non_finite`)."""
    nodes: dict[str, Any] = field(default_factory=dict)
    """Metrics of every trainer and every server, if there are servers; set at the end."""
    interrupted: str | None = None
    """Why a signal ends the run early, once all members know it."""
    timed_out: str | None = None

    # What is due next.
    due_at: int = 0
    """The next version at which `attend` has work."""
    tick_at: float = 0.0
    """The next time at which `glance` reports progress."""

    # Membership.
    gathering: bool = False
    """Whether the members have to `gather` before the next update."""
    missed: PeerError | None = None
    """The error by which another member was lost, until the next generation is formed."""
    arrivals: bool = False
    """Whether a process is waiting to join."""
    newcomer: bool = False
    """Whether this member has no usable state yet."""
    guest: bool = False
    """Whether a signal makes only this member leave, instead of ending the run."""
    secured: bool = False
    """Whether there is a first checkpoint to recover from, or no need for one."""

    # Members that update independently.
    heard: int = 0
    """Requests (bits of `Ask`) since the last meeting of members that update independently."""
    met_at: int = 0
    """The version at which they last met or loaded a checkpoint."""
    opened: bool = False
    """Whether the shared ledger was opened in this generation."""

    _ready: bool = False
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
        """Time spent on this run, including the time before it was resumed."""
        return self._seconds + time.perf_counter() - self._started

    def begin(self) -> None:
        """Start the clocks."""
        self.tell()
        self._started = time.perf_counter()
        self.meter.restart()
        self.due_at = next_due(self.job, self.version)

    def attend(self) -> str | None:
        """Do what is due at this version; return the reason to stop, or None."""
        self.glance()
        if self._is_due(self.job.evaluate.every):
            self.evaluate()
        if self._is_due(self.job.checkpoint.every):
            self.save()
        self.due_at = next_due(self.job, self.version)
        return self.over()

    def glance(self) -> None:
        """Report progress and log if due, or leave: all that needs no other member."""
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

    def over(self) -> str | None:
        """Return the reason to stop now, or None. All members get the same answer."""
        limit = self.limits.reached(self.version)
        return self.interrupted or self.early.should_stop or self.timed_out or limit

    def epoch_done(self) -> str | None:
        """Do what is due at the end of an epoch; return the reason to stop, or None."""
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

    def finish(self) -> None:
        """Make the last evaluation and checkpoint, unless this version already has them."""
        self.observer.progressed(self.version, self._figures(self.meter.peek()))
        if self.meter.steps:
            self.observer.logged(self.version, self._figures(self.meter.read()))
        if self.job.evaluate.every != "never" and not self.interrupted:
            self.evaluate()
            # Loaded values have no totals, and the report needs them for the confusion matrix.
            if self.evaluation and not self.evaluation.totals:
                self.evaluation = self._look()
        self.save(last=True)

    def evaluate(self) -> None:
        """Evaluate the held-out samples, unless that is done at this version."""
        if self.valid is None:
            return
        if self._evaluated_at != self.version:
            self.evaluation = self._look()
            self._evaluated_at = self.version
            values = self.evaluation.values
            watched = values[self.job.stop.metric]
            if self.early.observe(watched):
                self._best_at = self.version
            self.observer.evaluated(self.version, values)
            # Last, because it may raise PeerError: after recovery the rest is not repeated.
            # Schedules minimize.
            self.strategy.observe(watched if self.early.mode == "min" else -watched)
        if self._best_at == self.version and self.job.checkpoint.best:
            self._save_best()

    def _look(self) -> Evaluation:
        assert self.valid is not None
        with self.meter.pause():
            return evaluate(self.strategy, self.valid, self.metrics, evaluation_size(self.job))

    def _save_best(self) -> None:
        """Save and mark the best checkpoint, again if a member was lost before that was done."""
        if self._saved_at != self.version:
            self.save()
            if self.comm.index == 0:
                self.writer.mark_best(self.version)

    def save(self, *, last: bool = False) -> None:
        """Take a checkpoint together; the first member writes it in the background.

        With `last` it is on disk when this returns.
        """
        first = self.comm.index == 0
        with self.meter.pause():
            if self._saved_at != self.version:
                self.comm.pulse(self.version + 1, "saving")
                cut = self.cut()
                self._saved_at = self.version
                if first and (self.writer.saved != self.version or not self.version):
                    (self.writer.save_now if last else self.writer.save)(self.version, cut)
                if self.strategy.apart:  # a member that goes on would push into the others' cut
                    self.fellows.barrier()
            elif first and last:
                self.writer.finish(self.version)
        self.tell()

    def _hear_writer(self) -> None:
        """Pass on the writer's messages and errors; after the first update, let it allocate."""
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

    def _is_due(self, every: object, last: int | None = None) -> bool:
        """Return whether something is due at this version.

        Members that update independently do not see every version: for them, whether a due version
        was passed since `last`, or since the last meeting.
        """
        since = (self.met_at if last is None else last) if self.strategy.apart else None
        return is_due(every, self.version, since)

    def interrupt(self, why: str) -> None:
        """Ask all members to stop after the same update; a guest leaves after the current one.

        Safe to call from a signal handler.
        """
        self._wish = f"stopped by {why}"
        if self.guest:
            self.due_at = 0
        else:
            self.comm.asked |= Ask.SIGNAL

    def heed(self, asked: int) -> None:
        """Note what some member asks of all: its time is over, it got a signal, …"""
        # Members that update independently may have received different requests: `meet` sums them.
        self.heard |= asked
        if not self.strategy.apart:
            self.agreed(asked)

    def agreed(self, asked: int) -> None:
        """Act on requests that all members know."""
        self.heard = 0
        if Ask.SIGNAL.among(asked):
            self.interrupted = self._wish or "stopped by another member"
        elif Ask.TIME.among(asked):
            self.timed_out = f"{self.job.minutes:g} minutes are over"
        self.arrivals = Ask.REGROUP.among(asked)
        self.gathering = self.arrivals or Ask.BALANCE.among(asked)
        self.due_at = 0

    @property
    def to_meet(self) -> bool:
        """Whether members that update independently have to `meet` now."""
        return self.strategy.apart and (self.heard != 0 or self.ledger.dry)

    @property
    def progress(self) -> list[int]:
        """This member's position; the coordinator compares it to find the most advanced member."""
        made = self.met_at if self.strategy.apart else self.version
        return [made, self._evaluated_at, self.epoch]

    def met_again(self) -> None:
        """Forget what only some members of the new generation know, so that all do the same."""
        self._saved_at, self.opened = -1, False
        self.secured = False  # the first checkpoint may be missing: `secure` decides again
        self.evaluation = self.evaluation and Evaluation(self.evaluation.values, {}, 0)

    def take_over(self) -> None:
        """Become the member that writes checkpoints; the present ones are another member's."""
        self.writer.saved = max(self.shelf.versions(), default=0)

    def notice(self, message: str) -> None:
        """Pass a message to the observers, without a leading "step N: ": they know the step."""
        step, _, rest = message.partition(": ")
        self.observer.noticed(self.version, rest if step.startswith("step ") else message)

    def tell(self) -> None:
        """Pass the pending messages to the observers."""
        while self.pending:
            self.notice(self.pending.pop(0))

    def cut(self, *, alone: bool = False, healing: bool = False) -> dict[str, Any]:
        """Return everything that decides how the run continues, at one version.

        With `alone`, no other member takes part. With `healing`, it is meant for a member that is
        behind, and lacks what that member gets elsewhere.
        """
        if self.clerk is not None:
            self.clerk.keep()  # the journal must have every update that a checkpoint contains
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
        """Restore what `cut` returned.

        With `healed`, this is part of a recovery: members do not compare their versions here,
        because perhaps not all of them load.
        """
        loop = cut["loop"]
        self.strategy.load_state_dict(cut["strategy"] | {"ledger": cut["ledger"]})
        self.ledger.load_state_dict(cut["ledger"])
        self.early.load_state_dict(loop["early"])
        if loop["stop"] != self.job.stop.model_dump(mode="json"):
            self.early.should_stop = None  # it was decided by a rule that the job no longer has
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


class Evaluation(NamedTuple):
    """Loss and metrics, and the sums they were computed from."""

    values: dict[str, float]
    totals: dict[str, Tensor]
    samples: int


def evaluate(
    strategy: Strategy, loader: Loader, metrics: Mapping[str, Metric], batch_size: int
) -> Evaluation:
    """Compute loss and metrics over all samples of the loader, each member over its own part."""
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


def evaluation_size(job: Job) -> int:
    """Return the batch size of an evaluation: without gradients there is room for more samples."""
    return job.evaluate.batch_size or max(job.batch_size, 256)


def is_due(every: object, version: int, since: int | None = None) -> bool:
    """Return whether `version`, or any version after `since`, is a multiple of `every`.

    Work that is due every epoch, or never, is not due at a version.
    """
    if not isinstance(every, int):
        return False
    if since is None:
        return version % every == 0
    return version // every > max(0, since) // every


def next_due(job: Job, version: int) -> int:
    """Return the next version at which something is due, so that steps in between cost nothing."""
    intervals = (job.track.every, job.evaluate.every, job.checkpoint.every)
    steps = [version - version % n + n for n in intervals if isinstance(n, int)]
    return min(steps if job.steps is None else [*steps, job.steps])


def saves_on_the_way(job: Job, *, evaluates: bool) -> bool:
    """Return whether checkpoints are written before the end of the run."""
    looks = evaluates and job.evaluate.every != "never"
    return job.checkpoint.every != "never" or (looks and job.checkpoint.best)

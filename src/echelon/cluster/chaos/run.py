"""A job under faults: the run without faults first, then one trial per seed, and the report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from echelon import strategy
from echelon.cluster.chaos.measure import (
    ALIKE,
    Difference,
    Figures,
    difference,
    in_any_order,
    kinds,
    losses,
)
from echelon.cluster.chaos.plan import Fault, random_plan
from echelon.cluster.chaos.trial import Trial, attempt
from echelon.cluster.chaos.view import Deed
from echelon.core.config import Job
from echelon.core.errors import UserError
from echelon.core.format import to_json
from echelon.loop.run import Limits

_NAME = 50
"""Characters of the job's name that the names of the runs keep."""
Told = Callable[[Trial, Trial | None, Difference | None], None]
"""Called after each trial, with the run without faults and the difference to it."""


def endure(
    job: Job,
    arguments: Sequence[str],
    *,
    plan: Sequence[Fault] = (),
    chance: int = 0,
    seeds: Sequence[int] = (0,),
    reference: bool = True,
    patience: float = 120.0,
    tolerance: float = ALIKE,
    told: Told = lambda _trial, _reference, _difference: None,
) -> Report:
    """Run `job` under `plan`, or once per seed under `chance` random faults.

    `arguments` are the arguments with which `echelon train` runs the job. `tolerance` is how far a
    weight may be from that of the run without faults, which is the `reference`. `patience`: seconds
    without an update that count as a hang.
    """
    check(job)
    if chance:
        check_length(job)
    report, name = Report(), (job.name or "job")[:_NAME]
    if reference:
        report.reference = attempt(job, arguments, _none, name=f"{name}-calm", patience=patience)
        if report.problems:
            return report
    for seed in seeds:
        make = partial(_chosen, job, plan, chance, seed)
        trial = attempt(job, arguments, make, name=f"{name}-chaos", seed=seed, patience=patience)
        found = _compared(job, trial, report.reference, tolerance)
        trial.problems += unlike(job, trial, report.reference, found)
        report.add(trial, found)
        told(trial, report.reference, found)
    return report


def check(job: Job) -> None:
    """Refuse a job that cannot survive the loss of a member."""
    if job.workers < 2:
        raise UserError(f"workers = {job.workers}: chaos needs at least 2, so that one can be lost")
    if not strategy.can_do_without(job):
        raise UserError(
            f"members of strategy {job.strategy!r} cannot do without each other here; "
            "use strategy=all_reduce, and leave elastic.enabled as it is"
        )


def check_length(job: Job) -> None:
    """Refuse random faults for a job of unknown length: they are spread over all its steps."""
    if Limits.of(job).total_steps(1, 1) is None:
        raise UserError("random faults need a job that says how long it is: set epochs or steps")


def _none(_steps: int | None) -> Sequence[Fault]:
    return ()


def _chosen(
    job: Job, plan: Sequence[Fault], chance: int, seed: int, steps: int | None
) -> Sequence[Fault]:
    if not chance:
        return plan
    assert steps is not None, "checked before"
    return random_plan(chance, seed, workers=job.workers, steps=steps, servers=mortal(job))


def mortal(job: Job) -> int:
    """Return how many servers the run can lose: all, if it has replicas or writes checkpoints."""
    section = job.parameter_server
    saved = section.replicas or job.checkpoint.every != "never"
    return section.servers if strategy.has_servers(job) and saved else 0


def _compared(
    job: Job, trial: Trial, reference: Trial | None, tolerance: float
) -> Difference | None:
    if reference is None or not trial.finished or trial.folder is None:
        return None
    assert reference.folder is not None
    return difference(job, trial.folder, reference.folder, tolerance)


def unlike(job: Job, trial: Trial, reference: Trial | None, found: Difference | None) -> list[str]:
    """Return the differences from the run without faults that are problems."""
    if reference is None or found is None:
        return []
    problems = [] if found.problem is None else [found.problem]
    made, due = trial.summary["steps"], reference.summary["steps"]
    open_end = job.minutes is not None or not (job.stop.patience is job.stop.target is None)
    if made != due and not (open_end or in_any_order(job)):
        problems.append(f"it made {made:,} updates, and {due:,} without faults")
    return problems


# The report.


_NOTHING = "–"


@dataclass(slots=True)
class Report:
    """All trials of one job."""

    reference: Trial | None = None
    trials: list[Trial] = field(default_factory=list)
    differences: list[Difference | None] = field(default_factory=list)

    @property
    def problems(self) -> list[str]:
        known = [self.reference] if self.reference is not None else []
        return [f"{t.run or 'run'}: {p}" for t in (*known, *self.trials) for p in t.problems]

    @property
    def deeds(self) -> list[Deed]:
        return [deed for trial in self.trials for deed in trial.deeds if deed.skipped is None]

    def add(self, trial: Trial, difference: Difference | None) -> None:
        self.trials.append(trial)
        self.differences.append(difference)

    @property
    def largest(self) -> float | None:
        """The largest difference of a weight from the run without faults."""
        known = [found.largest for found in self.differences if found is not None]
        return max(known) if known else None

    def totals(self) -> dict[str, Any]:
        """Return the sums over all trials as plain JSON data."""
        found = losses(self.deeds)
        return {
            "ok": not self.problems,
            "runs": len(self.trials),
            "faults": len(self.deeds),
            "skipped": sum(len(trial.deeds) for trial in self.trials) - len(self.deeds),
            "finished": sum(trial.finished for trial in self.trials),
            "exactly_once": sum(trial.exactly_once for trial in self.trials),
            "left_behind": sum(len(trial.left_behind) for trial in self.trials),
            "median_detection_s": found.detected.median,
            "worst_detection_s": found.detected.worst,
            "median_recovery_s": found.recovered.median,
            "worst_recovery_s": found.recovered.worst,
            "weight_difference": self.largest,
        }

    def as_data(self) -> dict[str, Any]:
        """Return everything as plain JSON data, with every run and every fault."""
        return self.totals() | {
            "problems": self.problems,
            "reference": self.reference and self.reference.as_data(),
            "trials": [
                trial.as_data() | {"weight_difference": d and d.largest, "unlike": d and d.unlike}
                for trial, d in zip(self.trials, self.differences, strict=True)
            ],
        }


def show(out: Console, trial: Trial, reference: Trial | None, found: Difference | None) -> None:
    """Print one trial: a row per fault, the verdict, and a comparison with the reference."""
    out.print(Text.assemble((trial.run or "no run", "bold"), f"  seed {trial.seed}"))
    out.print(_table(trial.deeds))
    out.print()
    for line in _verdict(trial):
        out.print(line)
    if reference is not None:
        out.print(Text(_metrics(trial, reference)))
    if found is not None:
        out.print(_weights(found))
    out.print()


def _table(deeds: Sequence[Deed]) -> Table:
    table = _columns(("FAULT", "HIT", "STEP", "DETECTED", "RECOVERED", "LOST", ""))
    for deed in deeds:
        table.add_row(*map(Text, _row(deed)))
    return table


def _row(deed: Deed) -> tuple[str, ...]:
    if deed.skipped is not None:
        return (str(deed.fault), "", "", "", "", "", f"skipped: {deed.skipped}")
    return (
        str(deed.fault),
        deed.who,
        f"{deed.version:,}",
        _seconds(deed.detected),
        _seconds(deed.recovered),
        f"{deed.lost_steps}",
        deed.problem or deed.note,
    )


def _seconds(value: float | None) -> str:
    return _NOTHING if value is None else f"{value:.2f} s"


def _verdict(trial: Trial) -> list[Text]:
    lines = [Text(problem, "red") for problem in trial.problems]
    if trial.exactly_once:
        lines.insert(0, Text(f"exactly once: {trial.epochs} epochs finished", "green"))
    if trial.finished and not trial.left_behind:
        lines.append(Text("no process, shared memory or file is left behind", "green"))
    return lines


def _metrics(trial: Trial, reference: Trial) -> str:
    names = [name for name in trial.metrics if name in reference.metrics]
    pairs = (f"{n} {trial.metrics[n]:.4f} ({reference.metrics[n]:.4f})" for n in names)
    took = f"{trial.seconds:.1f} s ({reference.seconds:.1f} s)"
    return f"held-out (without faults): {', '.join(pairs) or _NOTHING}; {took}"


def _weights(found: Difference) -> Text:
    words = f"largest difference of a weight: {found.largest:.1e}"
    if found.unlike is not None:
        return Text(f"{words}; {found.unlike}")
    if found.is_alike:
        return Text(f"{words} (up to {found.tolerance:g} is rounding)", "green")
    return Text(f"{words}, more than {found.tolerance:g}", "red")


def show_all(out: Console, report: Report) -> None:
    """Print the sums over all trials; the last line is JSON, for programs."""
    if len(report.trials) > 1:
        out.print(_by_kind(report.deeds))
        out.print()
    for problem in report.problems:
        out.print(Text(problem, "red"))
    out.print(Text(_sum(report), "red" if report.problems else "green"))
    out.print(Text(to_json(report.totals())), soft_wrap=True)


def _by_kind(deeds: Sequence[Deed]) -> Table:
    table = _columns(("KIND", "COUNT", "DETECTED", "RECOVERED"))
    for kind in kinds(deeds):
        figures = (_both(kind.detected), _both(kind.recovered))
        table.add_row(kind.name, str(kind.happened), *figures)
    return table


def _sum(report: Report) -> str:
    data, found = report.totals(), losses(report.deeds)
    return (
        f"{data['faults']} faults ({data['skipped']} skipped) in {data['runs']} runs: "
        f"{data['finished']} finished, {data['exactly_once']} exactly once; losses detected after "
        f"{_both(found.detected)}, recovered after {_both(found.recovered)}"
    )


def _both(figures: Figures) -> str:
    if figures.median is None or figures.worst is None:
        return _NOTHING
    return f"{figures.median:.2f} s (worst {figures.worst:.2f} s)"


def _columns(names: Sequence[str]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for name in names:
        number = name in ("STEP", "COUNT", "DETECTED", "RECOVERED", "LOST")
        table.add_column(name, justify="right" if number else "left", no_wrap=number)
    return table

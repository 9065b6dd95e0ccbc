"""A job under faults: the fault-free run first, then one for every seed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from echelon import strategy
from echelon.cluster.chaos.chance import random_plan
from echelon.cluster.chaos.plan import Fault
from echelon.cluster.chaos.report import Report
from echelon.cluster.chaos.trial import Trial, attempt
from echelon.cluster.chaos.weights import ALIKE, Difference, difference, in_any_order
from echelon.core.config import Job
from echelon.core.errors import UserError
from echelon.loop.limits import Limits

_NAME = 50
"""Characters of a run's name that are kept."""
Told = Callable[[Trial, Trial | None, Difference | None], None]


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
    """Run `job` under `plan`, or once for every seed under `chance` faults made from it.

    `arguments` are what `echelon train` has to be given to run it. `told` hears of every trial.
    `tolerance` is by how much a weight may differ from the fault-free run's.
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
    """Refuse a job whose members cannot do without each other."""
    if job.workers < 2:
        raise UserError(f"workers = {job.workers}: chaos needs at least 2, so that one can be lost")
    if not strategy.can_do_without(job):
        raise UserError(
            f"members of strategy {job.strategy!r} cannot do without each other here; "
            "use strategy=all_reduce, and leave elastic.enabled as it is"
        )


def check_length(job: Job) -> None:
    """Random faults are spread over a run whose length is known."""
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
    """Servers that the run can lose: each has a twin, or there are checkpoints to go back to."""
    section = job.parameter_server
    saved = section.replicas or job.checkpoint.every != "never"
    return section.servers if strategy.has_servers(job) and saved else 0


def unlike(job: Job, trial: Trial, reference: Trial | None, found: Difference | None) -> list[str]:
    """What differs from the fault-free run, and should not."""
    if reference is None or found is None:
        return []
    problems = [] if found.problem is None else [found.problem]
    made, due = trial.summary["steps"], reference.summary["steps"]
    open_end = job.minutes is not None or not (job.stop.patience is job.stop.target is None)
    if made != due and not (open_end or in_any_order(job)):
        problems.append(f"it made {made:,} updates, and {due:,} without faults")
    return problems


def _compared(
    job: Job, trial: Trial, reference: Trial | None, tolerance: float
) -> Difference | None:
    if reference is None or not trial.finished or trial.folder is None:
        return None
    assert reference.folder is not None
    return difference(job, trial.folder, reference.folder, tolerance)

"""What a person is told of trials."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from echelon.cluster.chaos.deeds import Deed
from echelon.cluster.chaos.figures import Figures, kinds, losses
from echelon.cluster.chaos.trial import Trial
from echelon.cluster.chaos.weights import Difference
from echelon.core.format import to_json

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
        """The largest difference of a weight from the fault-free run's."""
        known = [found.largest for found in self.differences if found is not None]
        return max(known) if known else None

    def totals(self) -> dict[str, Any]:
        """All in all, as plain JSON data."""
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
        """With every run and every fault."""
        return self.totals() | {
            "problems": self.problems,
            "reference": self.reference and self.reference.as_data(),
            "trials": [
                trial.as_data() | {"weight_difference": d and d.largest, "unlike": d and d.unlike}
                for trial, d in zip(self.trials, self.differences, strict=True)
            ],
        }


def show(out: Console, trial: Trial, reference: Trial | None, found: Difference | None) -> None:
    """One trial: a row per fault, the verdict, and how it ended beside the fault-free run."""
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


def show_all(out: Console, report: Report) -> None:
    """The sum of all trials; its last line is for machines."""
    if len(report.trials) > 1:
        out.print(_by_kind(report.deeds))
        out.print()
    for problem in report.problems:
        out.print(Text(problem, "red"))
    out.print(Text(_sum(report), "red" if report.problems else "green"))
    out.print(Text(to_json(report.totals())), soft_wrap=True)


def _sum(report: Report) -> str:
    data, found = report.totals(), losses(report.deeds)
    return (
        f"{data['faults']} faults ({data['skipped']} skipped) in {data['runs']} runs: "
        f"{data['finished']} finished, {data['exactly_once']} exactly once; losses detected after "
        f"{_both(found.detected)}, recovered after {_both(found.recovered)}"
    )


def _by_kind(deeds: Sequence[Deed]) -> Table:
    table = _columns(("KIND", "COUNT", "DETECTED", "RECOVERED"))
    for kind in kinds(deeds):
        figures = (_both(kind.detected), _both(kind.recovered))
        table.add_row(kind.name, str(kind.happened), *figures)
    return table


def _both(figures: Figures) -> str:
    if figures.median is None or figures.worst is None:
        return _NOTHING
    return f"{figures.median:.2f} s (worst {figures.worst:.2f} s)"


def _table(deeds: Sequence[Deed]) -> Table:
    table = _columns(("FAULT", "HIT", "STEP", "DETECTED", "RECOVERED", "LOST", ""))
    for deed in deeds:
        table.add_row(*map(Text, _row(deed)))
    return table


def _columns(names: Sequence[str]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for name in names:
        number = name in ("STEP", "COUNT", "DETECTED", "RECOVERED", "LOST")
        table.add_column(name, justify="right" if number else "left", no_wrap=number)
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

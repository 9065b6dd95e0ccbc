"""What a person is told of trials."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from echelon.cluster.chaos.deeds import Deed, worst
from echelon.cluster.chaos.trial import Trial
from echelon.cluster.chaos.weights import ALIKE, Difference

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

    def as_data(self) -> dict[str, Any]:
        """As plain JSON data."""
        return {
            "ok": not self.problems,
            "runs": len(self.trials),
            "faults": len(self.deeds),
            "skipped": sum(len(trial.deeds) for trial in self.trials) - len(self.deeds),
            "finished": sum(trial.finished for trial in self.trials),
            "exactly_once": sum(trial.exactly_once for trial in self.trials),
            "worst_detection_s": worst([deed.detected for deed in _losses(self.deeds)]),
            "worst_recovery_s": worst([deed.recovered for deed in _losses(self.deeds)]),
            "weight_difference": worst([d.largest for d in self.differences if d is not None]),
            "problems": self.problems,
            "reference": self.reference and self.reference.as_data(),
            "trials": [
                trial.as_data() | {"weight_difference": d and d.largest, "unlike": d and d.unlike}
                for trial, d in zip(self.trials, self.differences, strict=True)
            ],
        }


def _losses(deeds: Sequence[Deed]) -> list[Deed]:
    """Faults that cost somebody; how long a newcomer takes to start is another matter."""
    return [deed for deed in deeds if deed.fault.verb in ("kill", "freeze", "partition")]


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
    """The sum of several trials."""
    data = report.as_data()
    worst_s = (data["worst_detection_s"], data["worst_recovery_s"])
    detection, recovery = (_NOTHING if s is None else f"{s:.2f} s" for s in worst_s)
    out.print(
        Text(
            f"{data['faults']} faults ({data['skipped']} skipped) in {data['runs']} runs: "
            f"{data['finished']} finished, {data['exactly_once']} exactly once; "
            f"worst detection {detection}, worst recovery {recovery}",
            "red" if report.problems else "green",
        )
    )
    for problem in report.problems:
        out.print(Text(f"  {problem}", "red"))


def _table(deeds: Sequence[Deed]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for place, name in enumerate(("FAULT", "HIT", "STEP", "DETECTED", "RECOVERED", "LOST", "")):
        number = 1 < place < 6
        table.add_column(name, justify="right" if number else "left", no_wrap=number)
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
        return Text(f"{words} (at most {ALIKE:g} is rounding)", "green")
    return Text(f"{words}: more than rounding makes ({ALIKE:g})", "yellow")

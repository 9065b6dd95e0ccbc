"""Progress of a run on stderr: a live bar in a terminal, plain lines in a pipe or log file.

stdout belongs to results.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any, TextIO

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.text import Text

from echelon.core.format import clock, duration, figure, short
from echelon.core.interfaces import Observer


def progress(*, quiet: bool = False) -> Observer:
    """Return a live bar in a terminal, plain lines elsewhere; if `quiet`, notices only."""
    if quiet:
        return Notices()
    if sys.stderr.isatty():
        console = Console(stderr=True)
        if not console.is_dumb_terminal:
            return TerminalProgress(console)
    return PlainProgress()


class Notices:
    """Prints notices and nothing else."""

    def __init__(self, out: TextIO | None = None) -> None:
        self._out = out

    def started(self, run: str, facts: Mapping[str, Any]) -> None: ...

    def progressed(self, step: int, values: Mapping[str, float]) -> None: ...

    def logged(self, step: int, values: Mapping[str, float]) -> None: ...

    def evaluated(self, step: int, values: Mapping[str, float]) -> None: ...

    def noticed(self, step: int, message: str) -> None:
        self._say(f"step {step:,}: {message}")

    def finished(self, status: str, summary: Mapping[str, Any]) -> None: ...

    def _say(self, line: str) -> None:
        print(line, file=self._out or sys.stderr, flush=True)


class PlainProgress(Notices):
    """Prints a line every few seconds, and one for every evaluation and notice."""

    def __init__(self, out: TextIO | None = None, *, every: float = 5.0) -> None:
        super().__init__(out)
        self._every = every
        self._next = -math.inf
        self._pace = Pace({})

    def started(self, run: str, facts: Mapping[str, Any]) -> None:
        self._pace = Pace(facts)
        self._next = time.monotonic() + self._every
        self._say(f"{run}: {' · '.join(described(facts))}")

    def progressed(self, step: int, values: Mapping[str, float]) -> None:
        self._pace.note(step, values)
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + self._every
        self._say("  ".join((*self._pace.place(), *rates(values), *self._pace.time_left())))

    def evaluated(self, step: int, values: Mapping[str, float]) -> None:
        self._say("  ".join((f"step {step:,}", "evaluated", *figures(values))))

    def finished(self, status: str, summary: Mapping[str, Any]) -> None:
        self._say(ending(status, summary))


class TerminalProgress:
    """A live bar; rich's thread redraws the latest values a few times a second."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._view = _View(Pace({}))
        self._live: Live | None = None

    def started(self, run: str, facts: Mapping[str, Any]) -> None:
        self._view = _View(Pace(facts))
        what = " · ".join(described(facts))
        self._print(Text.assemble((run, "bold"), "  ", (what, "dim")))
        self._live = Live(
            self._view,
            console=self._console,
            refresh_per_second=_REFRESHES_PER_SECOND,
            transient=True,
            # Show the task's own output above the bar, unless stdout is piped somewhere else.
            redirect_stdout=sys.stdout.isatty(),
        )
        self._live.start()

    def progressed(self, step: int, values: Mapping[str, float]) -> None:
        self._view.note(step, values)

    def logged(self, step: int, values: Mapping[str, float]) -> None:
        """Skip: `progressed` has drawn these values already."""

    def evaluated(self, step: int, values: Mapping[str, float]) -> None:
        self._view.evaluation = figures(values)
        row = Text.assemble(("  ✓ ", "green"), (f"step {step:,}", "dim"))
        for name, value in zip(values, figures(values), strict=True):
            row.append(_GAP).append(name, "dim").append(value.removeprefix(name), "bold")
        self._print(row)

    def noticed(self, step: int, message: str) -> None:
        self._print(Text.assemble(("  ! ", "bold yellow"), (f"step {step:,} ", "dim"), message))

    def finished(self, status: str, summary: Mapping[str, Any]) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
        colour = "green" if status == "done" else "yellow" if status == "stopped" else "red"
        self._print(Text(ending(status, summary), colour))

    def _print(self, text: Text) -> None:
        self._console.print(text, soft_wrap=True)


_REFRESHES_PER_SECOND = 4


class _View:
    """Two lines: the bar with the position, and below it as many values as fit."""

    def __init__(self, pace: Pace) -> None:
        self.evaluation: list[str] = []
        self._pace = pace
        self._values: Mapping[str, float] = {}

    def note(self, step: int, values: Mapping[str, float]) -> None:
        self._pace.note(step, values)
        self._values = values

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from self._bar(options)
        words = rates(self._values)
        if self.evaluation:
            words.append("valid " + " ".join(self.evaluation))
        yield Text("  " + _fitted(words, options.max_width - 2), "dim", no_wrap=True, end="")

    def _bar(self, options: ConsoleOptions) -> Iterator[Any]:
        pace = self._pace
        words = [*pace.place(), *pace.time_left()]
        if pace.total:
            words.insert(0, f"{100 * pace.step // pace.total:3d} %")
        place = _fitted(words, options.max_width - 14)
        width = max(8, min(40, options.max_width - len(place) - 6))
        bar = ProgressBar(
            pace.total, pace.step, width=width, pulse=not pace.total, complete_style="cyan"
        )
        yield Text("  ", end="")
        yield bar
        yield Text("  " + place, no_wrap=True)


def _fitted(words: list[str], width: int) -> str:
    """Join as many of the words as fit, dropping from the end."""
    while words and len(_GAP.join(words)) > width:
        words = words[:-1]
    return _GAP.join(words)


_GAP = "   "


# What a line says


class Pace:
    """Position of a run and the estimated time left."""

    def __init__(self, facts: Mapping[str, Any]) -> None:
        self.total: int | None = facts.get("total_steps")
        self.step = 0
        self._epochs: int | None = facts.get("epochs")
        self._epoch: float | None = None
        self._begun: tuple[int, float] | None = None
        self._seconds = 0.0

    def note(self, step: int, values: Mapping[str, float]) -> None:
        self.step = step
        self._epoch = values.get("epoch")
        self._seconds = values.get("seconds", self._seconds)
        if self._begun is None:  # a resumed run does not start at step 0
            self._begun = (step, self._seconds)

    @property
    def left(self) -> float | None:
        """Estimated seconds left at the speed so far, including evaluations."""
        if self.total is None or self._begun is None:
            return None
        steps, seconds = self.step - self._begun[0], self._seconds - self._begun[1]
        return (self.total - self.step) * seconds / steps if steps > 0 else None

    def place(self) -> list[str]:
        of = f"/{self.total:,}" if self.total is not None else ""
        words = [f"step {self.step:,}{of}"]
        if self._epoch is not None:
            number = int(self._epoch) + 1  # epochs are counted from 0
            if self._epochs is not None:
                number = min(number, self._epochs)
            words.insert(0, f"epoch {number}" + (f"/{self._epochs}" if self._epochs else ""))
        return words

    def time_left(self) -> list[str]:
        return [f"{clock(self.left)} left"] if self.left is not None else []


def described(facts: Mapping[str, Any]) -> list[str]:
    """Describe in a few words what is trained."""
    words = [str(facts[key]) for key in ("task", "model") if facts.get(key)]
    words += [f"{short(facts['parameters'])} parameters"] if facts.get("parameters") else []
    words += [f"{facts['samples']:,} samples"] if facts.get("samples") else []
    words += [f"batch {facts['batch_size']}"] if facts.get("batch_size") else []
    words += [str(facts["strategy"])] if facts.get("strategy") else []
    words += [f"{facts['workers']} workers"] if (facts.get("workers") or 1) > 1 else []
    words.append(" ".join(str(facts[key]) for key in ("device", "precision") if facts.get(key)))
    return [word for word in words if word]


def rates(values: Mapping[str, float]) -> list[str]:
    words = [f"{name} {figure(values[name])}" for name in ("loss", "lr") if name in values]
    for name, unit in (("steps_per_s", "step/s"), ("samples_per_s", "samples/s")):
        if name in values:
            words.append(f"{short(values[name])} {unit}")
    return words


def figures(values: Mapping[str, float]) -> list[str]:
    return [f"{name} {figure(value)}" for name, value in values.items()]


def ending(status: str, summary: Mapping[str, Any]) -> str:
    """Return one line about how the run ended."""
    words = [status + (f" in {duration(summary['seconds'])}" if "seconds" in summary else "")]
    words += [f"{summary[key]:,} {key}" for key in ("steps", "samples") if key in summary]
    return " · ".join(words)

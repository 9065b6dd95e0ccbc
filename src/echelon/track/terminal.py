"""Progress in a terminal: a live bar, with evaluations scrolling by above it."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.text import Text

from echelon.track.progress import Pace, described, ending, figures, rates

_REFRESHES_PER_SECOND = 4
_GAP = "   "


class TerminalProgress:
    """Keeps the latest figures; rich's own thread draws them a few times a second."""

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
            # What the task prints goes above the bar, unless stdout is piped somewhere else.
            redirect_stdout=sys.stdout.isatty(),
        )
        self._live.start()

    def progressed(self, step: int, values: Mapping[str, float]) -> None:
        self._view.note(step, values)

    def logged(self, step: int, values: Mapping[str, float]) -> None:
        """Nothing to draw: `progressed` has it already."""

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


class _View:
    """Two lines: the bar and where the run is; the figures below, as many as fit."""

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
    """As many of the words as the line holds, the first ones first."""
    while words and len(_GAP.join(words)) > width:
        words = words[:-1]
    return _GAP.join(words)

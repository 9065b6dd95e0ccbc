"""How far preparing data is, told on stderr: stdout belongs to results."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

from echelon.data.prepare.watch import Unwatched, Watch

if TYPE_CHECKING:
    from rich.console import Console

_SECONDS = 5.0
"""Between two lines of a log."""


def watch(*, quiet: bool = False) -> Watch:
    """A live bar in a terminal, plain lines elsewhere, or nothing."""
    if quiet:
        return Unwatched()
    if sys.stderr.isatty():
        from rich.console import Console

        console = Console(stderr=True)
        if not console.is_dumb_terminal:
            return Bar(console)
    return Lines()


class Lines:
    """For a log file: a line per part of the work, and one every few seconds."""

    def __init__(self) -> None:
        self._what, self._total = "", ""
        self._said = 0.0

    def began(self, what: str, total: int | None) -> None:
        self._what, self._total = what, f"/{total:,}" if total else ""
        self._said = time.monotonic()
        print(what, file=sys.stderr, flush=True)

    def advanced(self, done: int) -> None:
        if time.monotonic() - self._said >= _SECONDS:
            self._said = time.monotonic()
            print(f"{self._what}  {done:,}{self._total}", file=sys.stderr, flush=True)

    def ended(self) -> None:
        """Nothing is left to say."""


class Bar:
    """One bar per part of the work; rich's own thread draws it."""

    def __init__(self, console: Console) -> None:
        from rich import progress

        self._bars = progress.Progress(
            progress.TextColumn("  {task.description:<24}"),
            progress.BarColumn(complete_style="cyan"),
            progress.MofNCompleteColumn(),
            progress.TimeElapsedColumn(),
            console=console,
            refresh_per_second=4,
        )
        self._task: progress.TaskID | None = None
        self._done = 0
        self._bars.start()

    def began(self, what: str, total: int | None) -> None:
        self._finish()
        self._task, self._done = self._bars.add_task(what, total=total), 0

    def advanced(self, done: int) -> None:
        self._done = done
        if self._task is not None:
            self._bars.update(self._task, completed=done)

    def ended(self) -> None:
        self._finish(over=True)
        self._bars.stop()

    def _finish(self, *, over: bool = False) -> None:
        """A part whose length was not known is as long as it was."""
        if self._task is not None and not over:
            self._bars.update(self._task, total=max(1, self._done), completed=max(1, self._done))

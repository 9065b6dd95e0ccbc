"""`echelon runs`: list, show and compare runs, write a report again, prove exactly-once.

All data comes from the run store (track), except for `runs ledger`, which reads the journal: it
shows for each epoch which samples counted once, twice or never, then every failure and its cost,
then a verdict.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from echelon.core.format import duration

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from echelon.data.proof import Account, EpochAccount, Happening
    from echelon.track import Store


app = typer.Typer(help="List, show, compare and prove runs.", no_args_is_help=True)
Folder = Annotated[
    Path, typer.Option("--folder", "-f", help="Where the runs are kept.", metavar="FOLDER")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead.")]
RunName = Annotated[
    str, typer.Argument(metavar="RUN", help="Its id, the beginning of it, or `last`.")
]
_DEFAULT = Path("runs")


@app.command("list")
def list_runs(
    folder: Folder = _DEFAULT,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, help="How many at most.")] = 50,
    as_json: AsJson = False,
) -> None:
    """Every run, the latest first."""
    runs = _store(folder).runs()
    from echelon.core import format
    from echelon.track import views

    if as_json:
        print(format.to_json([views.as_data(run) for run in runs[:limit]]))
    elif not runs:
        print(f"no runs in {folder} yet: echelon train makes one")
    else:
        views.console().print(views.run_table(runs[:limit]))
        if len(runs) > limit:
            print(f"… {len(runs) - limit} older ones (--limit {len(runs)} shows all)")


@app.command("show")
def show(run: RunName, folder: Folder = _DEFAULT, as_json: AsJson = False) -> None:
    """One run: result, curves, events, config and files."""
    store = _store(folder)
    found = store.run(run)
    series = {name: store.series(found.id, name) for name in store.names(found.id)}
    events = store.events(found.id)
    from echelon.core import format
    from echelon.track import views

    if not as_json:
        views.show(views.console(), found, series, events)
        return
    data = views.as_data(found) | {
        "config": found.config,
        "facts": found.facts,
        "nodes": found.summary.get("nodes", {}),
        "series": {name: {"steps": s.steps, "values": s.values} for name, s in series.items()},
        "events": [event._asdict() for event in events],
    }
    print(format.to_json(data))


@app.command("compare")
def compare_runs(
    runs: Annotated[list[str], typer.Argument(metavar="RUN RUN...", help="Two or more runs.")],
    folder: Folder = _DEFAULT,
    as_json: AsJson = False,
) -> None:
    """Runs side by side: results, and the settings in which they differ."""
    store = _store(folder)
    found = [store.run(run) for run in runs]
    from echelon.core import format
    from echelon.track import views

    if as_json:
        data = {
            "runs": [views.as_data(run) for run in found],
            "metrics": views.metric_rows(found),
            "config": views.config_differences(found),
        }
        print(format.to_json(data))
    else:
        views.console().print(views.comparison(found))


@app.command("report")
def report(run: RunName, folder: Folder = _DEFAULT) -> None:
    """Write a run's HTML report again, and say where it is."""
    from echelon.track import write_report

    print(write_report(_store(folder), run))


@app.command("ledger")
def ledger(
    run: RunName,
    folder: Folder = _DEFAULT,
    verify: Annotated[
        bool, typer.Option("--verify", help="Fail if a sample did not count exactly once.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """The proof: per epoch what was consumed once, twice or never, by whom, and every failure."""
    found = _store(folder).run(run)
    from echelon.core import format
    from echelon.loop.journal import audit, require_exact
    from echelon.track import views

    proof = audit(found.folder, checkpoint=verify)
    if as_json:
        print(format.to_json(proof.as_data()))
    else:
        show_ledger(views.console(), proof)
    if verify:
        require_exact(proof)


def _store(folder: Path) -> Store:
    from echelon.track import Store

    return Store(folder)


# The proof of exactly-once as tables

_SHORT = 20
"""Up to this many epochs get a row each; if there are more, equal neighbors share one."""
_LINES = 60
"""Number of events shown, the latest ones."""
_RIGHT = 6
"""Columns 1 to 5 are numbers, aligned to the right."""


def show_ledger(out: Console, proof: Account) -> None:
    """Print the proof: a table of epochs, the events of the run, and the verdict."""
    from rich.text import Text

    status = proof.status or "not finished"
    facts = f"{proof.samples:,} samples · batches of {proof.batch_size:,}"
    out.print(Text.assemble((proof.run, "bold"), f"  {status}  version {proof.version:,}"))
    out.print(Text(f"{facts} · {_plural(proof.generations, 'generation')}", "dim"))
    if proof.taken_over:
        word = "there was no journal up to version {:,}: a checkpoint is believed"
        out.print(Text(word.format(proof.taken_over), "yellow"))
    out.print()
    out.print(_epochs(proof))
    if proof.happenings:
        out.print(Text("\nwhat happened", "bold"))
        out.print(_happenings(proof.happenings))
    out.print()
    out.print(verdict(proof))


def verdict(proof: Account) -> Text:
    from rich.text import Text

    if proof.problems:
        lines = "\n".join(f"  {problem}" for problem in proof.problems)
        return Text(f"not exactly once:\n{lines}", "red")
    finished = sum(epoch.finished for epoch in proof.epochs)
    words = [f"exactly once: {_plural(finished, 'epoch')} finished"]
    words += [f"epoch {epoch.epoch} under way" for epoch in proof.epochs if not epoch.finished]
    if left := sum(epoch.left_out for epoch in proof.epochs):
        words.append(f"left out: {left:,} (their updates were not finite)")
    return Text(" · ".join(words), "green")


def _epochs(proof: Account) -> Table:
    from rich.table import Table
    from rich.text import Text

    names = ("EPOCH", "SAMPLES", "ONCE", "TWICE", "NEVER", "LEFT OUT", "VERSIONS", "BY MEMBER", "")
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for place, name in enumerate(names):
        number = 0 < place < _RIGHT
        table.add_column(Text(name), no_wrap=True, justify="right" if number else "left")
    for first, last in _rows(proof.epochs):
        table.add_row(*_row(first, last))
    return table


def _rows(epochs: Sequence[EpochAccount]) -> Iterator[tuple[EpochAccount, EpochAccount]]:
    """Yield the first and the last epoch of each row of the table."""
    begin = 0
    for place, epoch in enumerate(epochs):
        end = place + 1 == len(epochs)
        if end or len(epochs) <= _SHORT or _counts(epoch) != _counts(epochs[place + 1]):
            yield epochs[begin], epoch
            begin = place + 1


def _counts(epoch: EpochAccount) -> tuple[object, ...]:
    return (epoch.once, epoch.twice, epoch.never, epoch.left_out, epoch.finished, epoch.members)


def _row(first: EpochAccount, last: EpochAccount) -> list[Text]:
    from rich.text import Text

    same = first.epoch == last.epoch
    counts = (first.samples, first.once, first.twice, first.never, first.left_out)
    versions = "–" if first.first is None else f"{first.first:,} – {last.last:,}"
    members = " · ".join(f"{member}: {count:,}" for member, count in first.members.items())
    words = [
        f"{first.epoch}" if same else f"{first.epoch} – {last.epoch}",
        *(f"{count:,}" for count in counts),
        versions,
        members,
        "" if first.finished else "under way",
    ]
    return [Text(word, "" if first.exact else "red") for word in words]


def _happenings(happenings: Sequence[Happening]) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    if hidden := max(0, len(happenings) - _LINES):
        table.add_row(Text(f"… {hidden:,} before"))
    for happening in happenings[hidden:]:
        when = time.strftime("%H:%M:%S", time.localtime(happening.time))
        table.add_row(*map(Text, (when, f"version {happening.version:,}", *_described(happening))))
    return table


def _described(happening: Happening) -> tuple[str, str, str]:
    who = {"coordinator": "coordinator", "rolled_back": "rolled back"}.get(happening.kind)
    if who is None:
        member = "" if happening.member is None else f"member {happening.member} "
        who = f"{member}{happening.kind}"
    return who, happening.text, _cost(happening)


def _cost(happening: Happening) -> str:
    words = []
    if happening.lost_steps:
        words.append(f"{_plural(happening.lost_steps, 'update')} made again")
    if happening.seconds:
        words.append(f"{duration(happening.seconds)} lost")
    elif happening.kind in ("lost", "rolled_back") and happening.seconds is None:
        words.append("not made good yet")
    return ", ".join(words)


def _plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"

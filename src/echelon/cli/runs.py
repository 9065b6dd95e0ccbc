"""`echelon runs`: what was trained, how it went, and what made the difference."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
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
    from echelon.track import compare, text, views

    if as_json:
        print(text.to_json([compare.as_data(run) for run in runs[:limit]]))
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
    from echelon.track import compare, text, views

    if not as_json:
        views.show(views.console(), found, series, events)
        return
    data = compare.as_data(found) | {
        "config": found.config,
        "facts": found.facts,
        "nodes": found.summary.get("nodes", {}),
        "series": {name: {"steps": s.steps, "values": s.values} for name, s in series.items()},
        "events": [event._asdict() for event in events],
    }
    print(text.to_json(data))


@app.command("compare")
def compare_runs(
    runs: Annotated[list[str], typer.Argument(metavar="RUN RUN...", help="Two or more runs.")],
    folder: Folder = _DEFAULT,
    as_json: AsJson = False,
) -> None:
    """Runs side by side: results, and the settings in which they differ."""
    store = _store(folder)
    found = [store.run(run) for run in runs]
    from echelon.track import compare, text, views

    if as_json:
        data = {
            "runs": [compare.as_data(run) for run in found],
            "metrics": compare.metric_rows(found),
            "config": compare.config_differences(found),
        }
        print(text.to_json(data))
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
    from echelon.cli import ledger_view
    from echelon.loop.audit import audit, require_exact
    from echelon.track import text, views

    proof = audit(found.folder, checkpoint=verify)
    if as_json:
        print(text.to_json(proof.as_data()))
    else:
        ledger_view.show(views.console(), proof)
    if verify:
        require_exact(proof)


def _store(folder: Path) -> Store:
    from echelon.track import Store

    return Store(folder)

"""How a run ended, in one sentence and a few figures."""

from __future__ import annotations

from echelon.core.figures import figure, short
from echelon.core.html import Html, el, join
from echelon.core.page import tile
from echelon.track.records import Best, Run
from echelon.track.text import duration

_OPENING = {
    "done": "Trained",
    "stopped": "Stopped after",
    "failed": "Failed after",
    "lost": "Lost its process after",
    "running": "Still running, after",
}


def verdict(run: Run) -> str:
    """`Trained 10 epochs in 12 s; best accuracy 0.9722 at step 405.`"""
    amount = _amount(run)
    time = f" in {duration(run.seconds)}" if run.seconds else ""
    words = f"{_OPENING.get(run.status, run.status.capitalize())} {amount}{time}"
    if run.status == "failed" and run.summary.get("error"):
        return f"{words}: {str(run.summary['error']).rstrip('.')}."
    if run.best is None:  # the result is told when a run ends
        return f"{words}; it was never evaluated." if run.status == "done" else f"{words}."
    return f"{words}; {_result(run.best, run.headline or run.best)}."


def tiles(run: Run) -> Html:
    """The figures to see first."""
    named = {f"held-out {_words(name)}": value for name, value in run.metrics.items()}
    if run.best is not None:
        named.pop(f"held-out {_words(run.best.metric)}", None)
        named[f"best {_words(run.best.metric)}"] = run.best.value
    order = sorted(named, key=lambda name: ("loss" in name, not name.startswith("best")))
    parts = [
        tile(name, figure(named[name]), "result" if name == order[0] else None)
        for name in order[:3]
    ]
    samples = run.summary.get("samples")
    if samples and run.seconds:
        parts.append(tile("samples/s", short(samples / run.seconds)))
    parts += [tile("steps", f"{run.steps:,}"), tile("time", duration(run.seconds))]
    return el("div", join(parts), class_="tiles")


def _result(best: Best, headline: Best) -> str:
    at = f" at step {best.step:,}" if best.step is not None else ""
    words = f"best {_spoken(best)}{at}"
    return words if headline == best else f"held-out {_spoken(headline)}, {words}"


def _spoken(best: Best) -> str:
    return f"{_words(best.metric)} {figure(best.value)}"


def _amount(run: Run) -> str:
    epochs, total = run.facts.get("epochs"), run.facts.get("total_steps")
    if run.status == "done" and epochs and total and run.steps >= total:
        return f"{epochs} epoch" + ("s" if epochs != 1 else "")
    return f"{run.steps:,} step" + ("s" if run.steps != 1 else "")


def _words(metric: str) -> str:
    return metric.replace("_", " ")

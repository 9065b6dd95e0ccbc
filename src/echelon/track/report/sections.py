"""The parts of a report beside curves and confusion."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import yaml

from echelon.core.figures import figure, short, size
from echelon.core.html import Html, el, join
from echelon.track.records import Event, Run
from echelon.track.text import duration, plain

_YAML_LINE = re.compile(r"^(\s*(?:- )*)([^\s:#][^:]*:)(.*)$")
_EVENTS = 200
_SAMPLES = 60
_RUN_FACTS = {
    "task": "Task",
    "model": "Model",
    "parameters": "Parameters",
    "samples": "Training samples",
    "held_out": "Held-out samples",
    "batch_size": "Batch size",
    "strategy": "Strategy",
    "workers": "Workers",
    "device": "Device",
    "precision": "Precision",
    "threads": "Threads",
}
_MACHINE_FACTS = {
    "cpu": "Processor",
    "cores": "Cores",
    "memory": "Memory",
    "disk_free": "Free disk",
    "os": "System",
    "host": "Host",
    "python": "Python",
    "torch": "PyTorch",
    "echelon": "Echelon",
}
_BYTES = ("memory", "disk_free")


def facts(run: Run) -> Iterator[tuple[str, Html]]:
    """What was run and on what, as far as it is known."""
    machine = run.facts.get("environment", {})
    for title, values, names in (
        ("Run", run.facts, _RUN_FACTS),
        ("Machine", machine, _MACHINE_FACTS),
    ):
        known = [key for key in names if values.get(key) not in (None, "")]
        rows = [el("div", el("dt", names[key]), el("dd", _fact(key, values[key]))) for key in known]
        if rows:
            yield title, el("dl", join(rows), class_="facts")


def config(values: Mapping[str, Any]) -> Html:
    """The resolved job as YAML, keys set apart."""
    text = yaml.safe_dump(plain(values), sort_keys=False, allow_unicode=True, width=90)
    return el("pre", el("code", join([_yaml_line(line) for line in text.splitlines()])))


def events(found: Iterable[Event], started: float) -> Html:
    every = list(found)
    rows = [
        el(
            "li",
            el("b", f"step {event.step:,}"),
            el("span", event.message),
            el("small", f"+{duration(max(0.0, event.time - started))}"),
        )
        for event in every[:_EVENTS]
    ]
    more = len(every) - _EVENTS
    rest = el("p", f"and {more:,} more", class_="quiet") if more > 0 else None
    return join((el("ol", join(rows), class_="events"), rest))


def samples(found: Iterable[Mapping[str, str]], labels: Sequence[str]) -> Html:
    every = list(found)
    cards = [_sample(sample, sample["target"] in labels) for sample in every[:_SAMPLES]]
    long = any(len(text) > 160 for sample in every for text in sample.values())
    return el("div", join(cards), class_="samples long" if long else "samples")


def _sample(sample: Mapping[str, str], is_class: bool) -> Html:
    """Only a class is right or wrong; an estimate or a text is more or less so."""
    right = sample["output"] == sample["target"]
    verdict = ("right" if right else "wrong") if is_class else None
    parts = [
        el("div", el("dt", key), el("dd", sample[key]), class_=key)
        for key in ("input", "output", "target")
        if sample[key]
    ]
    return el("dl", join(parts), class_=verdict)


def _fact(key: str, value: Any) -> str:
    if key in _BYTES:
        return size(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}" if value < 10_000_000 else short(value)
    return figure(value) if isinstance(value, float) else str(value)


def _yaml_line(line: str) -> Html:
    found = _YAML_LINE.match(line)
    if found is None:
        return join((line, Html("\n")))
    indent, key, rest = found.groups()
    return join((indent, el("b", key), rest, Html("\n")))

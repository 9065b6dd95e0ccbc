"""The report: whole, safe, self-contained, and true to the store."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from echelon.core.errors import RunError
from echelon.track import Event, Point, Store, report, try_report, write_report

_VOID = {"meta", "br", "hr"}
_NASTY = "</script><img src=x onerror=alert(1)>\"'&<b>"
WriteEvaluation = Callable[[Path, dict[str, Any]], None]


class Page(HTMLParser):
    """Checks that tags are balanced, and keeps elements and texts."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == [], f"never closed: {self._open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in _VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open, f"</{tag}> closes nothing"
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open:
            self.texts.setdefault(self._open[-1], []).append(data)

    def every(self, tag: str, kind: str = "") -> list[dict[str, str | None]]:
        return [
            attrs
            for name, attrs in self.elements
            if name == tag and (not kind or kind in (attrs.get("class") or "").split())
        ]

    def said(self, tag: str) -> str:
        return "".join(self.texts.get(tag, []))


def _page(store: Store, run: str) -> Page:
    return Page(write_report(store, run).read_text(encoding="utf-8"))


def _points(path: dict[str, str | None]) -> int:
    return len(re.findall(r"[ML]", path["d"] or ""))


def test_the_report_tells_the_run(trained: Callable[..., str], store: Store) -> None:
    run = trained()
    page = _page(store, run)
    assert page.said("h1") == "digits"
    assert "Trained 4 epochs in 4.0 s; best accuracy 0.9817 at step 200." in page.said("p")
    assert {"Loss", "Accuracy", "Learning rate", "Samples per second"} <= set(page.texts["h3"])
    assert "layer fc1: the gradient vanishes" in page.said("span")
    assert "adamw" in page.said("code")
    facts = dict(zip(page.texts["dt"], page.texts["dd"], strict=True))
    assert facts["Parameters"] == "4,810"
    assert facts["PyTorch"].startswith("2.")
    assert facts["Processor"]


def test_every_curve_has_all_its_points(trained: Callable[..., str], store: Store) -> None:
    page = _page(store, trained())
    curves = {path["class"]: _points(path) for path in page.every("path")[:3]}
    assert curves == {"train raw": 100, "train": 100, "valid": 4}
    assert len(page.every("circle", "best")) == 2


def test_the_data_under_the_pointer_is_that_of_the_store(
    trained: Callable[..., str], store: Store
) -> None:
    run = trained()
    data = json.loads(_script(_page(store, run), "data"))
    lines = {line["name"]: line for line in data["charts"][0]["lines"]}
    assert lines["train"]["x"] == store.series(run, "train/loss").steps
    assert lines["valid"]["y"] == pytest.approx(store.series(run, "valid/loss").values, rel=1e-4)
    assert data["charts"][0]["x"] == [0, 200]
    assert data["epochs"] == [[2, 0], [52, 1], [102, 2], [152, 3]]


def test_long_series_are_thinned_and_keep_their_extremes(store: Store) -> None:
    run = store.create("digits", {}, {})
    values = [1.0 + 0.1 * math.sin(i) for i in range(20_000)]
    values[777] = 9.0
    store.add_points(run, [Point(i, "train/loss", v, 0.0) for i, v in enumerate(values)])
    page = _page(store, run)
    assert all(_points(path) <= 1000 for path in page.every("path"))
    drawn = json.loads(_script(page, "data"))["charts"][0]["lines"][0]
    assert max(drawn["y"]) == 9.0
    assert len(write_report(store, run).read_bytes()) < 200_000


def test_nothing_is_loaded_from_elsewhere(trained: Callable[..., str], store: Store) -> None:
    text = write_report(store, trained()).read_text(encoding="utf-8")
    assert re.findall(r"(?:https?:)?//[\w.-]+\.\w+", text) == ["http://www.w3.org"]
    page = Page(text)
    assert not any(key in attrs for _, attrs in page.elements for key in ("src", "href"))
    assert not page.every("link")
    assert "@import" not in text
    assert "url(" not in text
    policies = [m["content"] for m in page.every("meta") if "http-equiv" in m]
    assert len(policies) == 1
    assert (policies[0] or "").startswith("default-src 'none'")


def test_whatever_the_user_wrote_is_text(store: Store, write_evaluation: WriteEvaluation) -> None:
    run = store.create("digits", {"note": _NASTY, _NASTY: 1}, {"task": _NASTY, "model": _NASTY})
    store.add_points(run, [Point(1, f"valid/{_NASTY}", 1.0, 0.0)])
    store.add_event(run, 1, _NASTY)
    sample = {"input": _NASTY, "output": _NASTY, "target": _NASTY}
    write_evaluation(
        store.folder / run,
        {"labels": [_NASTY, "b"], "confusion": [[1, 2], [0, 3]], "samples": [sample]},
    )
    metrics = {_NASTY: 1.0}
    store.finish(run, "failed", {"error": _NASTY, "metrics": metrics})
    text = write_report(store, run).read_text(encoding="utf-8")
    page = Page(text)
    assert not page.every("img")
    assert text.count("</script>") == 2
    assert page.said("dd").count(_NASTY) == 5
    for _, attributes in page.elements:
        assert not any(name.startswith("on") for name in attributes)


def test_the_script_parses_and_its_hash_is_allowed(
    trained: Callable[..., str], store: Store, tmp_path: Path
) -> None:
    import base64
    import hashlib

    page = _page(store, trained())
    script = _script(page, "")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert any(f"'sha256-{digest}'" in (meta.get("content") or "") for meta in page.every("meta"))
    assert "'use strict'" in script or '"use strict"' in script
    node = shutil.which("node")
    if node is not None:  # the browser check runs it; this only spares a look
        (tmp_path / "script.js").write_text(script)
        subprocess.run([node, "--check", str(tmp_path / "script.js")], check=True, timeout=100)


def test_a_run_without_figures_says_so(store: Store) -> None:
    run = store.create("digits", {}, {})
    store.finish(run, "failed", {"steps": 0, "error": "out of memory."})
    page = _page(store, run)
    assert "No figures were recorded." in page.said("p")
    assert "Failed after 0 steps" in page.said("p")
    assert ": out of memory." in page.said("p")
    assert json.loads(_script(page, "data")) == {"charts": [], "epochs": []}


def test_a_single_point_is_a_dot(store: Store) -> None:
    run = store.create("digits", {}, {})
    store.add_points(run, [Point(1, "train/loss", 2.3, 0.0)])
    page = _page(store, run)
    assert len(page.every("circle")) == 1
    assert "Still running, after 1 step" in page.said("p")


def test_a_curve_breaks_where_it_is_not_finite(store: Store) -> None:
    run = store.create("digits", {}, {})
    values = [3.0, 2.0, math.nan, math.inf, 1.0]
    store.add_points(run, [Point(i, "train/loss", v, 0.0) for i, v in enumerate(values)])
    page = _page(store, run)
    assert (page.every("path")[0]["d"] or "").count("M") == 2
    assert len(page.every("text", "broken")) == 1
    drawn = json.loads(_script(page, "data"))["charts"][0]["lines"][0]
    assert drawn["y"] == [3.0, 2.0, None, None, 1.0]


def test_a_series_without_any_finite_value_is_drawn_empty(store: Store) -> None:
    run = store.create("digits", {}, {})
    store.add_points(run, [Point(1, "train/loss", math.nan, 0.0)])
    page = _page(store, run)
    assert page.every("path")[0]["d"] == ""


def test_samples_of_classes_are_judged_and_estimates_are_not(
    trained: Callable[..., str], store: Store, write_evaluation: WriteEvaluation
) -> None:
    run = trained()
    samples = [
        {"input": "a", "output": "cat", "target": "cat"},
        {"input": "b", "output": "dog", "target": "cat"},
        {"input": "c", "output": "2.5", "target": "2.6"},
        {"output": "once upon a time"},
    ]
    write_evaluation(store.folder / run, {"labels": ["cat", "dog"], "samples": samples})
    page = _page(store, run)
    assert [len(page.every("dl", kind)) for kind in ("right", "wrong")] == [1, 1]
    assert "once upon a time" in page.said("dd")


@pytest.mark.parametrize(
    "text", ["{", "[1]", '{"confusion": [[1, 2]]}', '{"confusion": [["a"]]}', '{"samples": [3]}']
)
def test_an_evaluation_that_makes_no_sense_is_told(
    trained: Callable[..., str], store: Store, text: str
) -> None:
    run = trained()
    (store.folder / run / "evaluation.json").write_text(text)
    assert "evaluation.json cannot be shown" in _page(store, run).said("p")


def test_many_events_are_cut_and_counted(store: Store) -> None:
    run = store.create("digits", {}, {})
    store.record(run, [], [Event(step, 0.0, f"event {step}") for step in range(205)])
    page = _page(store, run)
    assert "and 5 more" in page.said("p")


def test_a_report_is_written_again_in_place(trained: Callable[..., str], store: Store) -> None:
    run = trained()
    first = write_report(store, run)
    store.add_event(run, 1, "something new")
    assert write_report(store, "last") == first
    assert "something new" in first.read_text(encoding="utf-8")
    assert [entry.name for entry in first.parent.iterdir()] == ["report.html"]


def test_a_report_that_cannot_be_written_is_one_line(
    trained: Callable[..., str], store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    run = trained()
    (store.folder / run).rmdir()
    with pytest.raises(RunError, match="the report cannot be written"):
        write_report(store, run)
    assert try_report(store, run) is None
    assert f"run {run} has no report" in capsys.readouterr().err


def test_a_fault_of_ours_does_not_end_a_run(
    trained: Callable[..., str],
    store: Store,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(report, "page", lambda _contents: 1 / 0)
    assert try_report(store, trained()) is None
    assert "division by zero" in capsys.readouterr().err


def test_a_value_too_large_to_draw_breaks_the_curve(store: Store) -> None:
    run = store.create("digits", {}, {})
    values = [1.0, 1e300, 2.0]
    store.add_points(run, [Point(i, "train/loss", v, 0.0) for i, v in enumerate(values)])
    assert (_page(store, run).every("path")[0]["d"] or "").count("M") == 2


def test_trying_a_report_gives_its_path(trained: Callable[..., str], store: Store) -> None:
    run = trained()
    assert try_report(store, run) == store.folder / run / report.REPORT


def _script(page: Page, identity: str) -> str:
    scripts = [attrs.get("id") or "" for attrs in page.every("script")]
    return page.texts["script"][scripts.index(identity)]

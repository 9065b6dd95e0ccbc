"""Reports and profiles in a real browser: python tests/browser/check_report.py [folder for shots]

Needs the Python package `playwright` and a Chromium of the system (it downloads nothing), so it
is a script beside the test suite. Ends with exit code 1 and the first thing that is wrong.
"""

from __future__ import annotations

import json
import math
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from echelon.data.inspect import inspect, write_html
from echelon.track import Point, Store, write_report

_NAMES = ("chromium", "chromium-browser", "google-chrome")
_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
_ANIMALS = "ant bee cat dog eel fox gnu hen ibis jay koi lynx mole newt owl pig quail ray seal tit"
_SIZES = {"desk": (1280, 900), "phone": (390, 844)}


def main(shots: Path | None) -> None:
    with tempfile.TemporaryDirectory() as folder:
        store = Store(Path(folder) / "runs")
        reports = {
            "full": _full(store, 10),
            "many": _full(store, 30),
            "single": _single(store),
            "empty": _empty(store),
            "profile": _profile(Path(folder)),
            "images": _images(Path(folder)),
        }
        with _browser() as browser:
            for name, path in reports.items():
                for theme in ("light", "dark"):
                    for size in _SIZES:
                        _look(browser, path, f"{name}-{theme}-{size}", theme, size, shots)
            _use(browser, reports["full"])
    print("report and profile are fine in the browser")


def _look(browser: Any, path: Path, name: str, theme: str, size: str, shots: Path | None) -> None:
    """It opens without a complaint, asks for nothing, and fits the screen."""
    with _page(browser, path, theme, size) as page:
        width = page.evaluate("document.documentElement.scrollWidth")
        assert width == _SIZES[size][0], f"{name}: {width} pixels wide"
        ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (ground == "rgb(14, 16, 20)") == (theme == "dark"), f"{name}: ground {ground}"
        for plot in page.query_selector_all(".plot"):
            box = plot.bounding_box()
            assert box["height"] > 100, f"{name}: a plot is {box['height']} pixels high"
        for text in page.query_selector_all(".plot text"):
            box = text.bounding_box()
            inside = box["x"] >= 0 and box["x"] + box["width"] <= _SIZES[size][0]
            assert inside, f"{name}: {text.inner_html()!r} is cut off"
        if shots is not None:
            shots.mkdir(parents=True, exist_ok=True)
            page.screenshot(path=str(shots / f"{name}.png"), full_page=True)


def _use(browser: Any, path: Path) -> None:
    """Pointer, keyboard, theme and copy do what they promise."""
    with _page(browser, path, "light", "desk") as page:
        plot, tip = page.locator(".plot").first, page.locator(".tip").first
        assert tip.is_hidden()
        box = plot.bounding_box()
        page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
        said = tip.inner_text().split()
        assert said[:5] == ["step", "200", "·", "epoch", "4"], said
        assert said[said.index("train") + 1] == f"{_loss(200):.4g}", said
        page.mouse.move(5, 5)
        assert tip.is_hidden()

        card = page.locator(".chart").first
        card.focus()
        page.keyboard.press("ArrowLeft")
        assert "step 198" in tip.inner_text(), tip.inner_text()
        card.blur()
        assert tip.is_hidden()

        page.click("#theme")
        ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert ground == "rgb(14, 16, 20)", ground
        page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        page.click("#copy")
        page.get_by_text("Copied").wait_for(timeout=5000)
        copied = page.evaluate("navigator.clipboard.readText()")
        assert copied.startswith("name: full"), copied


@contextmanager
def _browser() -> Iterator[Any]:
    found = next((path for path in map(shutil.which, _NAMES) if path), None)
    assert found is not None, f"no browser: install one of {', '.join(_NAMES)}"
    playwright: Any = import_module("playwright.sync_api")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=found, args=list(_FLAGS))
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def _page(browser: Any, path: Path, theme: str, size: str) -> Iterator[Any]:
    width, height = _SIZES[size]
    context = browser.new_context(
        viewport={"width": width, "height": height}, color_scheme=theme, offline=True
    )
    complaints: list[str] = []
    try:
        page = context.new_page()
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("console", lambda message: complaints.append(message.text))
        page.on("request", lambda request: complaints.append(request.url[:200]))
        page.goto(path.as_uri())
        complaints.remove(path.as_uri())
        complaints = [url for url in complaints if not url.startswith("data:image/png")]
        yield page
        assert complaints == [], complaints
    finally:
        context.close()


def _loss(step: int) -> float:
    return 0.05 + 2.3 * math.exp(-step / 70)


def _full(store: Store, classes: int) -> Path:
    run = store.create("full", {"name": "full", "epochs": 8}, {"epochs": 8, "total_steps": 400})
    train: dict[str, Callable[[int], float]] = {
        "loss": _loss,
        "lr": lambda step: 1e-3 * (1 - step / 400),
        "samples_per_s": lambda step: 1600.0 + step % 7,
        "epoch": lambda step: float((step - 1) // 50),
    }
    points = [
        Point(step, f"train/{name}", value(step), 0.0)
        for step in range(2, 401, 2)
        for name, value in train.items()
    ]
    for step in range(50, 401, 50):
        points.append(Point(step, "valid/loss", _loss(step) + 0.1, 0.0))
        points.append(Point(step, "valid/accuracy", 1 - _loss(step) / 2.5, 0.0))
    store.add_points(run, points)
    store.add_event(run, 120, "layer fc1.weight: the gradient vanishes")
    best = {"metric": "accuracy", "value": 0.97, "step": 400}
    store.finish(run, "done", {"steps": 400, "samples": 12800, "seconds": 8.0, "best": best})
    labels = (_ANIMALS.split() + [f"a rather long name {i}" for i in range(20)])[:classes]
    matrix = [
        [30 if i == j else 2 if j == (i + 1) % classes else 0 for j in range(classes)]
        for i in range(classes)
    ]
    sample = {"input": "a word " * 60, "output": "cat", "target": "cat"}
    found = {"labels": labels, "confusion": matrix, "samples": [sample] * 3}
    (store.folder / run / "evaluation.json").write_text(json.dumps(found), encoding="utf-8")
    return write_report(store, run).resolve()


def _profile(folder: Path) -> Path:
    """Of a table with all there is to draw, and names as unkind as they come."""
    random = np.random.default_rng(0)
    evil = "</td><script>alert(1)</script>" + "long" * 30
    (folder / "profile").mkdir()
    for part, rows in (("train", 5000), ("test", 500)):
        with (folder / "profile" / f"{part}.jsonl").open("w", encoding="utf-8") as file:
            for n in range(rows):
                record = {
                    "amount": random.lognormal(5, 2),
                    evil: n,
                    "text": "many words in a row " * int(random.integers(1, 9)),
                    "tokens": list(range(n % 40)),
                    "nothing": None,
                    "label": (evil, "b", "c")[min(2, n % 5)],
                }
                file.write(json.dumps(record) + "\n")
    return write_html(inspect(folder / "profile"), folder / "profile.html").resolve()


def _images(folder: Path) -> Path:
    x = np.random.default_rng(0).integers(0, 256, (60, 3, 32, 32), np.uint8)
    np.savez(folder / "images.npz", x=x, y=np.arange(60) % 30, v=np.zeros(60))
    profile = inspect(folder / "images.npz", examples=12)
    return write_html(profile, folder / "images.html").resolve()


def _single(store: Store) -> Path:
    run = store.create("single", {}, {})
    store.add_points(run, [Point(1, "train/loss", 2.3, 0.0)])
    return write_report(store, run).resolve()


def _empty(store: Store) -> Path:
    run = store.create("empty", {}, {})
    store.finish(run, "failed", {"steps": 0, "error": "the data is not there: " + "x/" * 80})
    return write_report(store, run).resolve()


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else None)

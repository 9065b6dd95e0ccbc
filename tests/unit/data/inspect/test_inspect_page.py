"""The profile page needs no other file, and any data is shown as text, never run."""

from __future__ import annotations

import base64
import io
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from rich.console import Console

from echelon.cli.data import show
from echelon.core.errors import UserError
from echelon.data.inspect import inspect, write_html
from echelon.data.inspect.html import between

EVIL = '</style><script>alert("1")</script><img src=x onerror=alert(1)>&amp;\x1b[31m'


class Elements(HTMLParser):
    """Every element of a page and the text in it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data

    def all(self, name: str) -> list[dict[str, str | None]]:
        return [attributes for tag, attributes in self.found if tag == name]


def page(path: Path, examples: int = 5) -> Elements:
    written = write_html(inspect(path, examples=examples), path.with_suffix(".html"))
    return Elements(written.read_text(encoding="utf-8"))


def test_a_page_needs_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text(
        "a,t,label\n" + "".join(f"{n},w{n},{n % 2}\n" for n in range(99))
    )
    found = page(tmp_path / "x.csv")
    assert not found.all("script")
    assert not found.all("link")
    (policy,) = (meta["content"] for meta in found.all("meta") if "http-equiv" in meta)
    assert policy == "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
    assert len(found.all("figure")) == 3
    assert found.all("rect")
    assert "99 records of 3 columns, csv; the label is label: 2 classes, 1.02 to 1." in found.text
    assert "prefers-color-scheme: dark" in found.text


def test_whatever_the_data_holds_is_text(tmp_path: Path) -> None:
    records = [{EVIL: n, "label": EVIL, "t": f"{EVIL} {n}", "o": {EVIL: [EVIL]}} for n in range(60)]
    (tmp_path / "x.jsonl").write_text("\n".join(map(json.dumps, records)))
    found = page(tmp_path / "x.jsonl")
    tags = {tag for tag, _ in found.found}
    assert not tags & {"script", "img", "iframe", "object"}
    assert len(found.all("style")) == 1
    for _, attributes in found.found:
        assert not [name for name in attributes if name.startswith("on")]
    assert '<script>alert("1")</script>' in found.text


def test_images_are_shown_as_they_are(tmp_path: Path) -> None:
    grey = np.arange(100 * 16, dtype=np.uint8).reshape(100, 1, 4, 4)
    coloured = np.arange(100 * 48, dtype=np.uint8).reshape(100, 3, 4, 4)
    np.savez(tmp_path / "x.npz", a=grey, b=coloured, c=coloured[:, :2].copy())
    profile = inspect(tmp_path / "x.npz", examples=2)
    found = page(tmp_path / "x.npz", examples=2)
    sources = [str(image["src"]) for image in found.all("img")]
    assert len(sources) == 4
    shown = [
        np.asarray(Image.open(io.BytesIO(base64.b64decode(source.partition(",")[2]))))
        for source in sources
    ]
    (part,) = profile.parts
    for number, example in enumerate(part.examples):
        assert (shown[2 * number] == grey[example.record, 0]).all()
        assert (shown[2 * number + 1] == coloured[example.record].transpose(1, 2, 0)).all()


def test_bars_stay_within_their_plot_and_say_their_numbers(tmp_path: Path) -> None:
    values = np.concatenate([np.random.default_rng(0).normal(size=500), [1e6]])
    np.savez(tmp_path / "x.npz", x=values)
    found = page(tmp_path / "x.npz")
    for bar in found.all("rect"):
        x, width, y, height = (
            float(str(bar[name]).removesuffix("%")) for name in ("x", "width", "y", "height")
        )
        assert x >= 0
        assert x + width <= 100.01
        assert y + height == pytest.approx(100, abs=0.02)
    figures = inspect(tmp_path / "x.npz").parts[0].columns[0].numbers
    assert figures is not None
    counts = re.findall(r"to [-.\d]+: (\d+) \(", found.text)
    assert list(map(int, counts)) == [count for count in figures.histogram.counts if count]
    assert f"{figures.histogram.above} above these" in found.text


def test_every_part_and_columns_without_a_value_have_their_place(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"a": null, "target": 1.5}\n' * 3)
    lines = [json.dumps({"a": None, "target": n / 7}) for n in range(9000)]
    (tmp_path / "test.jsonl").write_text("\n".join(lines))
    profile = inspect(tmp_path)
    text = Elements(write_html(profile, tmp_path / "x.html").read_text(encoding="utf-8")).text
    assert text.index("train.jsonl") < text.index("test.jsonl")
    assert "9,000 different values: too many to be classes." in text
    assert "3 (100 %)" in text


def test_many_columns_are_cut_short_and_that_is_said(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", **{f"c{n}": np.zeros(2) for n in range(305)})  # type: ignore[arg-type]
    found = page(tmp_path / "x.npz")
    assert len(found.all("figure")) == 300
    assert "and 5 more" in found.text


def test_a_page_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("a\n1\n")
    profile = inspect(tmp_path / "x.csv")
    with pytest.raises(UserError, match="is a folder, give the name of a file"):
        write_html(profile, tmp_path)
    with pytest.raises(UserError, match="the profile cannot be written: No such file"):
        write_html(profile, tmp_path / "no" / "x.html")
    assert [path.name for path in tmp_path.iterdir()] == ["x.csv"]


def test_the_numbers_of_a_bar_are_said_as_they_are() -> None:
    assert between(-0.5, 0.5) == "0"
    assert between(9.5, 12.5) == "10–12"
    assert between(0.1, 0.25) == "0.1 to 0.25"


@pytest.mark.parametrize(("width", "heads"), [(80, 7), (200, 9)])
def test_a_terminal_of_any_width_shows_whole_words(width: int, heads: int, tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("amount,city\n" + "12345.5,a rather long name\n1.5,x\n" * 99)
    out = Console(width=width, record=True, file=io.StringIO())
    show(out, inspect(tmp_path / "x.csv"))
    lines = out.export_text().splitlines()
    assert max(map(len, lines)) <= width
    head = next(line for line in lines if line.startswith("COLUMN")).split()
    assert len(head) == heads
    assert not [word for word in head if "…" in word]


def test_texts_that_say_nothing_are_missing_on_the_page_as_in_the_terminal(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("a,b\n" + "1,x\n" * 3 + "2,?\n")
    (column,) = [one for one in inspect(path).parts[0].columns if one.name == "b"]
    assert column.nothing == 1
    assert "12.5 %" in page(path).text, "1 of 8 cells"

"""Interrupted preparations: started again, they end with the same bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from echelon.core.errors import DataError
from echelon.data import prepare as preparing
from echelon.data.formats.files import sources
from echelon.data.prepare import engine, prepare, recipe_from, write
from echelon.data.prepare.workdir import Claim

from .test_engine import files

LINES = 120


class Ending:
    """A watch that ends the work after so many steps."""

    def __init__(self, after: int) -> None:
        self.left = after

    def began(self, _what: str, _total: int | None) -> None:
        self.advanced(0)

    def advanced(self, _done: int) -> None:
        if self.left == 0:
            raise KeyboardInterrupt
        self.left -= 1

    def ended(self) -> None: ...


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "SIZE", 256)
    monkeypatch.setattr(write, "WINDOW", 1024)


@pytest.fixture
def values(tmp_path: Path) -> dict[str, Any]:
    """A recipe with every kind of pass: a look, a comparison, and dependent features."""
    path = tmp_path / "raw.csv"
    rows = [f"{at % 3},{at % 7 if at % 5 else ''},{at * 7919 % 90}" for at in range(LINES)]
    path.write_text("label,age,n\n" + "\n".join(rows) + "\nbad\n", encoding="utf-8")
    return {
        "read": str(path),
        "clean": [
            {"kind": "missing", "column": "age", "how": "mean"},
            {"kind": "duplicates", "columns": ["label", "age", "n"]},
            {"kind": "range", "column": "n", "min": 1, "how": "drop"},
        ],
        "split": {"train": 0.75, "test": 0.25},
        "features": [
            {"kind": "standardise", "from": ["age", "n"], "to": "x"},
            {"kind": "pca", "from": "x", "to": "p", "components": 1},
            {"kind": "classes", "from": "label", "to": "y"},
        ],
        "write": {"folder": "whole", "shards": 2},
    }


def test_work_interrupted_anywhere_is_resumed(values: dict[str, Any]) -> None:
    whole = prepare(values, workers=1)
    assert whole.counts["read"] == LINES + 1
    assert set(whole.counts["out"]) >= {"read", "clean.1 duplicates", "clean.2 range"}
    expected = files(Path("whole"))
    again = {"write": {"folder": "again", "shards": 2}}
    for steps in range(0, 400, 2):  # each start gets a little further
        try:
            prepare(values | again, workers=1, watch=Ending(steps))
            break
        except KeyboardInterrupt:
            assert Path(".again.work").exists()
    assert steps > 12
    assert files(Path("again")) == expected
    assert not Path(".again.work").exists()


def test_leftovers_of_an_interruption_after_the_rename_are_removed(values: dict[str, Any]) -> None:
    prepare(values, workers=1)
    Path(".whole.work/out").mkdir(parents=True)
    assert not prepare(values, workers=1).fresh
    assert not Path(".whole.work").exists()


def test_other_inputs_or_another_recipe_start_over(values: dict[str, Any]) -> None:
    with pytest.raises(KeyboardInterrupt):
        prepare(values, workers=1, watch=Ending(9))
    path = Path(values["read"])
    path.write_text(path.read_text(encoding="utf-8").replace("bad", "1,1,55"), encoding="utf-8")
    done = prepare(values, workers=1)
    assert "read" not in done.counts["out"]
    prepare(values | {"write": {"folder": "fresh", "shards": 2}}, workers=1)
    assert files(Path("whole")) == files(Path("fresh"))


def test_work_from_before_a_reboot_starts_over(values: dict[str, Any]) -> None:
    with pytest.raises(KeyboardInterrupt):
        prepare(values, workers=1, watch=Ending(9))
    state = Path(".whole.work/state.json")
    known = json.loads(state.read_text())
    state.write_text(json.dumps(known | {"boot": "another"}))
    claim = Claim(Path(".whole.work"), known["digest"])
    claim.close(remove=False)
    assert not claim.resumed
    assert sorted(path.name for path in Path(".whole.work").iterdir()) == ["lock", "state.json"]


def test_two_do_not_prepare_the_same_folder(values: dict[str, Any]) -> None:
    recipe = recipe_from(values)
    digest = preparing._digest(recipe, sources(recipe.read))
    claim = Claim(Path(".whole.work"), digest)
    try:
        with pytest.raises(DataError, match="another process is preparing this folder now"):
            prepare(values, workers=1)
    finally:
        claim.close(remove=True)


def test_a_folder_that_cannot_be_made_is_one_line(values: dict[str, Any]) -> None:
    write = {"write": {"folder": f"{values['read']}/x/y"}}
    with pytest.raises(DataError, match=r"raw\.csv/x/\.y\.work: Not a directory"):
        prepare(values | write, workers=1)


def test_another_model_in_the_same_folder_starts_over(values: dict[str, Any]) -> None:
    Path("model").mkdir()
    weights = Path("model/model.safetensors")
    feature = {"kind": "sentences", "from": "label", "to": "x", "model": "model"}
    recipe = recipe_from(values | {"features": [feature]})
    digests = []
    for content in (b"one", b"another"):
        weights.write_bytes(content)
        digests.append(preparing._digest(recipe, sources(recipe.read)))
    assert digests[0] != digests[1]


def test_the_output_may_lie_in_the_folder_that_is_read(values: dict[str, Any]) -> None:
    Path("data").mkdir()
    Path(values["read"]).rename("data/raw.csv")
    inside = values | {"read": "data", "write": {"folder": "data/out", "shards": 2}}
    with pytest.raises(KeyboardInterrupt):
        prepare(inside, workers=1, watch=Ending(9))
    assert Path("data/.out.work").exists()
    first = prepare(inside, workers=1)
    assert first.counts["out"]["read"] == 1, "so there is a quarantine.jsonl"
    assert not prepare(inside, workers=1).fresh

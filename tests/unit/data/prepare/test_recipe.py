"""Reading recipes: one-line errors with file and line, and paths beside the recipe."""

from __future__ import annotations

from pathlib import Path

import pytest

from echelon.core.errors import ConfigError
from echelon.data.prepare import load_recipe

BASE = "read: raw.csv\nkeep: [a]\nwrite: {folder: out}\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("keep: [a]\nwrite: {folder: out}\n", "r.yaml:1: key 'read' is missing"),
        ("# nothing yet\n", "r.yaml:1: key 'read' is missing"),
        (BASE + "sed: 1\n", "r.yaml:4: key 'sed' is unknown; did you mean 'seed'"),
        (BASE + "features:\n- {kind: clases}\n", "r.yaml:5: features.0: kind of feature 'clases'"),
        (BASE + "clean:\n- {kind: txt}\n", "r.yaml:5: clean.0: kind of cleaning 'txt' is unknown"),
        (BASE + "clean:\n- {column: t}\n", "r.yaml:5: clean.0: it must say its kind"),
        (
            BASE + "features:\n- kind: classes\n  form: label\n",
            "key 'features.0.from' is missing",
        ),
        (BASE + "split: {by: time}\n", "r.yaml:4: split.by = 'time' needs a column"),
        (BASE + "split: {column: a}\n", "split.by = 'ratio' takes no column"),
        (BASE + "split: {train: 0.5}\n", "r.yaml:4: shares of train, valid and test are 0.5, 0, 0"),
        (BASE + "split: {folds: 5}\n", "r.yaml:4: cross-validation needs both: split.folds says"),
        (BASE + "split: {fold: 1}\n", "r.yaml:4: cross-validation needs both: split.folds says"),
        (
            BASE + "split:\n  folds: 5\n  fold: 5\n",
            "r.yaml:6: split.fold = 5: 5 folds are counted from 0 to 4",
        ),
        (
            BASE + "split: {by: time, column: a, folds: 5, fold: 0}\n",
            "r.yaml:4: split.folds does not go with by: time",
        ),
        (
            BASE + "split:\n  folds: 5\n  fold: 0\n  train: 0.8\n",
            "r.yaml:7: split.folds says how many are for training and test: take out split.train",
        ),
        (
            BASE + "split: {folds: 2, fold: 0, valid: 0.5}\n",
            "r.yaml:4: split.valid = 0.5 and a fold of 1/2 leave nothing to train on",
        ),
        (BASE + "split: {folds: 1, fold: 0}\n", "r.yaml:4: split.folds"),
        (
            "read: [a, {path: b, split: test}]\nkeep: [a]\nwrite: {folder: out}\n"
            "split: {folds: 5, fold: 0}\n",
            "r.yaml:1: read.1: with split.folds the test is a fold, and no input can be for it",
        ),
        (BASE + "balance: {column: a, at_most: 2}\n", "balance.at_most is for how: resample"),
        (
            "read: [{path: a, split: tain}]\nkeep: [a]\nwrite: {folder: out}\n",
            "r.yaml:1: read.0: split 'tain' is unknown; did you mean 'train'",
        ),
        ("read: []\nkeep: [a]\nwrite: {folder: out}\n", "reads at least one input"),
        ("read: a\nwrite: {folder: out}\n", "nothing would be written"),
        ("read: a\nkeep: [a]\nwrite: {folder: o, rows: 1, shards: 1}\n", "not both"),
        ("read: a\nkeep: [a]\nwrite: {folder: .}\n", ":3: write.folder = '.': it must end with"),
        ("read: a\nkeep: [a]\nwrite: {folder: /}\n", "write.folder = '/': it must end with"),
        ("read: a\nkeep: [a]\nwrite: {folder: b/..}\n", "the name of a folder of its own"),
        ('read: a\nkeep: [a]\nwrite: {folder: "a\\0b"}\n', "and hold no NUL"),
    ],
)
def test_a_bad_recipe_is_one_line_with_its_place(text: str, message: str) -> None:
    Path("r.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as raised:
        load_recipe(Path("r.yaml"))
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_inputs_lie_beside_their_recipe() -> None:
    Path("there").mkdir()
    Path("there/raw.csv").write_text("a\n1\n")
    Path("there/r.yaml").write_text(BASE, encoding="utf-8")
    found = load_recipe(Path("there/r.yaml"), ["seed=7"]).recipe
    assert found.read[0].path == "there/raw.csv"
    assert found.seed == 7

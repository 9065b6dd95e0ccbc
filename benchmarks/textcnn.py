"""Claim: TextCNN learns from raw texts as well as the published and measured references.

`echelon data prepare` turns raw files into token numbers, by the recipes of examples/prepared_text,
and `echelon train` trains textcnn.yaml of the same folder on them. The number of epochs is fixed
beforehand, and nothing is chosen by the test: it is looked at after the last one. Two sets differ
from the job in what `SETS` says. MR and Subj have no test of their own: they are cross-validated.

    python benchmarks/textcnn.py [--data FOLDER] [--only trec sst2] [--folds 3]

References: Kim 2014 (MR) and its re-implementation by harvardnlp (Subj), with random word vectors;
elsewhere a small torch network on the same files (128-wide vectors, windows of 3, 4, 5), one run.

What is done is kept in --work, and not done again. The last line is JSON: {"accuracy": {set: …},
"reference": {…}, "reached": …}, in percent; goal: all reached.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import mean
from typing import NamedTuple

from peers.raw_texts import DATA, EXAMPLES, FOLDS, folds_of, prepared, trained

ENGLISH, CHINESE = EXAMPLES / "recipe-english.yaml", EXAMPLES / "recipe-chinese.yaml"
JOB = EXAMPLES / "textcnn.yaml"


class Set(NamedTuple):
    """How a set is prepared, and what is to be reached on it."""

    recipe: Path
    reference: float
    settings: tuple[str, ...] = ()
    """What differs from the job as it is."""


SETS = {
    # a question is about ten words: each one matters
    "trec": Set(ENGLISH, 89.6, ("epochs=8", "model.word_dropout=0")),
    "sst2": Set(ENGLISH, 76.8),
    "thucnews": Set(CHINESE, 81.0, ("epochs=8",)),
    "ag-news": Set(ENGLISH, 83.9),
    "chnsenticorp": Set(CHINESE, 89.0),
    "tnews": Set(CHINESE, 52.2),
    "mr": Set(ENGLISH, 76.1),
    "subj": Set(ENGLISH, 89.2),
}


def main() -> None:
    options = _options()
    options.work.mkdir(parents=True, exist_ok=True)
    accuracy: dict[str, float] = {}
    print(f"{'set':>14} {'reference':>10} {'reached':>8}")
    for name in options.only:
        accuracy[name] = round(reached(name, options), 2)
        print(f"{name:>14} {SETS[name].reference:10.1f} {accuracy[name]:8.2f}", flush=True)
    reference = {name: SETS[name].reference for name in options.only}
    all_reached = all(accuracy[name] >= reference[name] for name in accuracy)
    print(json.dumps({"accuracy": accuracy, "reference": reference, "reached": all_reached}))


def reached(name: str, options: argparse.Namespace) -> float:
    """Accuracy in percent: of the test, or the mean over the folds."""
    return 100 * mean(_of_fold(name, fold, options) for fold in folds_of(name, options.folds))


def _of_fold(name: str, fold: int | None, options: argparse.Namespace) -> float:
    recipe, _, settings = SETS[name]
    folder = prepared(name, fold, recipe, (), options.data, options.work)
    kept = options.work / f"{folder.name}.json"
    return trained(folder, JOB, (f"seed={options.seed}", *settings), kept)


def _options() -> argparse.Namespace:
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--data", type=Path, default=DATA)
    options.add_argument("--work", type=Path, default=Path("textcnn"))
    options.add_argument("--only", nargs="+", choices=SETS, default=list(SETS), metavar="SET")
    options.add_argument("--folds", type=int, choices=range(1, FOLDS + 1), default=FOLDS)
    options.add_argument("--seed", type=int, default=0)
    return options.parse_args()


if __name__ == "__main__":
    main()

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
import os
import subprocess
import sys
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples" / "prepared_text"
ENGLISH, CHINESE = EXAMPLES / "recipe-english.yaml", EXAMPLES / "recipe-chinese.yaml"
JOB = EXAMPLES / "textcnn.yaml"
FOLDS = 10
QUIET = ("checkpoint.every=never", "checkpoint.best=false", "track.report=false")
AT_THE_END = "evaluate.every=1000000"


class Set(NamedTuple):
    """Files below the data folder; one file alone is cross-validated."""

    recipe: Path
    reference: float
    files: tuple[str, ...]
    settings: tuple[str, ...] = ()
    """What differs from the job as it is."""


SETS = {
    "trec": Set(
        ENGLISH,
        89.6,
        ("textcnn-en/trec-train.tsv.gz", "textcnn-en/trec-test.tsv.gz"),
        ("epochs=8", "model.word_dropout=0"),  # a question is about ten words: each one matters
    ),
    "sst2": Set(ENGLISH, 76.8, ("textcnn-en/sst2-train.tsv.gz", "textcnn-en/sst2-test.tsv.gz")),
    "thucnews": Set(
        CHINESE,
        81.0,
        ("thucnews-zh-20k/train.tsv.gz", "thucnews-zh-20k/test.tsv.gz"),
        ("epochs=8",),
    ),
    "ag-news": Set(ENGLISH, 83.9, ("ag-news-10k/train.tsv.gz", "ag-news-10k/test.tsv.gz")),
    "chnsenticorp": Set(
        CHINESE, 89.0, ("chnsenticorp-zh/train.tsv.gz", "chnsenticorp-zh/test.tsv.gz")
    ),
    "tnews": Set(CHINESE, 52.2, ("tnews-zh/train.tsv.gz", "tnews-zh/dev.tsv.gz")),
    "mr": Set(ENGLISH, 76.1, ("textcnn-en/mr.tsv.gz",)),
    "subj": Set(ENGLISH, 89.2, ("textcnn-en/subj.tsv.gz",)),
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
    folds = range(options.folds) if _is_cross_validated(name) else [None]
    return 100 * mean(trained(name, prepared(name, fold, options), options) for fold in folds)


def _is_cross_validated(name: str) -> bool:
    return len(SETS[name].files) == 1


def prepared(name: str, fold: int | None, options: argparse.Namespace) -> Path:
    """The folder of its shards, made now unless it is there."""
    folder: Path = options.work / (name if fold is None else f"{name}-{fold}")
    if (folder / "prepared.json").exists():
        return folder
    paths = [str(options.data / file) for file in SETS[name].files]
    if fold is None:
        settings = [f"read.{at}.path={path}" for at, path in enumerate(paths)]
    else:
        folds = f"{{by: stratified, column: label, folds: {FOLDS}, fold: {fold}}}"
        settings = [f"read={paths[0]}", f"split={folds}"]
    recipe = str(SETS[name].recipe)
    _echelon("data", "prepare", recipe, f"write.folder={folder}", *settings, "--workers", "1")
    return folder


def trained(name: str, folder: Path, options: argparse.Namespace) -> float:
    """The accuracy after the last epoch, by a run of now or of before."""
    kept: Path = options.work / f"{folder.name}.json"
    if not kept.exists():
        settings = [f"data.path={folder}", f"seed={options.seed}", *SETS[name].settings]
        runs = f"track.folder={options.work / 'runs'}"
        out = _echelon("train", str(JOB), *settings, runs, AT_THE_END, *QUIET, "--json", "--quiet")
        kept.write_text(out.strip().splitlines()[-1] + "\n", encoding="utf-8")
    summary: dict[str, Any] = json.loads(kept.read_text(encoding="utf-8"))
    return float(summary["metrics"]["accuracy"])


def _echelon(*arguments: str) -> str:
    """What `echelon …` prints; if it fails, so does the benchmark."""
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    done = subprocess.run(
        [sys.executable, "-m", "echelon", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(f"echelon {' '.join(arguments)}\n{done.stderr}")
    return done.stdout


def _options() -> argparse.Namespace:
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data")
    options.add_argument("--work", type=Path, default=Path("textcnn"))
    options.add_argument("--only", nargs="+", choices=SETS, default=list(SETS), metavar="SET")
    options.add_argument("--folds", type=int, choices=range(1, FOLDS + 1), default=FOLDS)
    options.add_argument("--seed", type=int, default=0)
    return options.parse_args()


if __name__ == "__main__":
    main()

"""Claim: linear models and an mlp on sparse tf-idf shards reach logistic regression on every set.

The floors are scikit-learn's LogisticRegression (C = 10, tnews 3) on its own TfidfVectorizer of the
same texts. Here `echelon data prepare` makes shards of sparse rows, by the recipes of
examples/prepared_text, and `echelon train` trains on them as they are, with linear.yaml and
mlp.yaml of the same folder, and what the `settings` of a set say beside them. Nothing is chosen by
the test: it is looked at after the last epoch. MR and Subj have no test of their own, so they are
cross-validated.

    python benchmarks/text_floors.py [--data FOLDER] [--only trec imdb] [--models mlp] [--seeds 3]

What is done is kept in --work, and not done again. The last line is JSON: {"linear": {set:
accuracy, …}, "mlp": {…}, "floors": {…}, "reached": …}, in percent; goal: all reached.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples" / "prepared_text"
ENGLISH, CHINESE = EXAMPLES / "recipe-tfidf.yaml", EXAMPLES / "recipe-tfidf-chinese.yaml"
MODELS = ("linear", "mlp")
FOLDS = 10
QUIET = ("checkpoint.every=never", "checkpoint.best=false", "track.report=false")
AT_THE_END = "evaluate.every=1000000"


class Set(NamedTuple):
    """Files below the data folder; one file alone is cross-validated."""

    recipe: Path
    floor: float
    files: tuple[str, ...]
    settings: Mapping[str, tuple[str, ...]] = {}
    """What the recipe or a model is told beside its file. See docs/results.md for why."""


LONG = {"recipe": ("features.1.ngrams=3",), "mlp": ("epochs=2",)}
QUESTIONS = {"linear": ("optimizer.lr=10", "epochs=20")}
HEADLINES = {"linear": ("optimizer={name: adagrad, lr: 0.3}",)}
SETS = {
    "imdb": Set(ENGLISH, 90.94, ("imdb/train.tsv.xz", "imdb/test.tsv.xz"), LONG),
    "ag-news": Set(ENGLISH, 87.89, ("ag-news-10k/train.tsv.gz", "ag-news-10k/test.tsv.gz")),
    "mr": Set(ENGLISH, 78.18, ("textcnn-en/mr.tsv.gz",)),
    "subj": Set(ENGLISH, 91.69, ("textcnn-en/subj.tsv.gz",)),
    "sst2": Set(ENGLISH, 81.93, ("textcnn-en/sst2-train.tsv.gz", "textcnn-en/sst2-test.tsv.gz")),
    "trec": Set(
        ENGLISH, 91.00, ("textcnn-en/trec-train.tsv.gz", "textcnn-en/trec-test.tsv.gz"), QUESTIONS
    ),
    "tnews": Set(CHINESE, 55.98, ("tnews-zh/train.tsv.gz", "tnews-zh/dev.tsv.gz"), HEADLINES),
    "thucnews": Set(
        CHINESE,
        87.19,
        ("thucnews-zh-20k/train.tsv.gz", "thucnews-zh-20k/test.tsv.gz"),
        HEADLINES,
    ),
    "chnsenticorp": Set(
        CHINESE, 92.58, ("chnsenticorp-zh/train.tsv.gz", "chnsenticorp-zh/test.tsv.gz")
    ),
}


def main() -> None:
    options = _options()
    options.work.mkdir(parents=True, exist_ok=True)
    found: dict[str, dict[str, float]] = {model: {} for model in options.models}
    print(f"{'set':>14} {'model':>7} {'floor':>7} {'reached':>8} {'seeds':>20}")
    for name in options.only:
        for model, seeds in results(name, options):
            found[model][name] = round(mean(seeds), 2)
            told = " ".join(f"{one:.2f}" for one in seeds)
            floor = SETS[name].floor
            print(f"{name:>14} {model:>7} {floor:7.2f} {mean(seeds):8.2f} {told:>20}", flush=True)
    floors = {name: SETS[name].floor for name in options.only}
    reached = all(one[name] >= floors[name] for one in found.values() for name in one)
    print(json.dumps({**found, "floors": floors, "reached": reached}))


def results(name: str, options: argparse.Namespace) -> Iterator[tuple[str, list[float]]]:
    """Accuracy in percent by model and seed: of the test, or the mean over all folds."""
    folders = [prepared(name, fold, options) for fold in _folds(name)]
    for model in options.models:
        yield (
            model,
            [
                100 * mean(trained(name, folder, model, seed, options) for folder in folders)
                for seed in range(options.seeds)
            ],
        )


def _folds(name: str) -> list[int | None]:
    return list(range(FOLDS)) if len(SETS[name].files) == 1 else [None]


def prepared(name: str, fold: int | None, options: argparse.Namespace) -> Path:
    """The folder of its shards, made now unless it is there."""
    recipe, files = SETS[name].recipe, SETS[name].files
    folder: Path = options.work / (name if fold is None else f"{name}-{fold}")
    if (folder / "prepared.json").exists():
        return folder
    paths = [str(options.data / file) for file in files]
    if fold is None:
        settings = [f"read.{at}.path={path}" for at, path in enumerate(paths)]
    else:
        folds = f"{{by: stratified, column: label, folds: {FOLDS}, fold: {fold}}}"
        settings = [f"read={paths[0]}", f"split={folds}"]
    settings += [f"write.folder={folder}", *SETS[name].settings.get("recipe", ())]
    _echelon("data", "prepare", str(recipe), *settings, "--workers", "1")
    return folder


def trained(name: str, folder: Path, model: str, seed: int, options: argparse.Namespace) -> float:
    """The accuracy after the last epoch, by a run of now or of before."""
    kept: Path = options.work / f"{folder.name}-{model}-{seed}.json"
    if not kept.exists():
        settings = [f"data.path={folder}", f"seed={seed}", f"track.folder={options.work / 'runs'}"]
        settings += SETS[name].settings.get(model, ())
        job = str(EXAMPLES / f"{model}.yaml")
        out = _echelon("train", job, *settings, AT_THE_END, *QUIET, "--json", "--quiet")
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
    options.add_argument("--work", type=Path, default=Path("text-floors"))
    options.add_argument("--only", nargs="+", choices=SETS, default=list(SETS), metavar="SET")
    options.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    options.add_argument("--seeds", type=int, default=1)
    return options.parse_args()


if __name__ == "__main__":
    main()

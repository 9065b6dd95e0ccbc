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
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import mean
from typing import NamedTuple

from peers.raw_texts import DATA, EXAMPLES, folds_of, prepared, trained

ENGLISH, CHINESE = EXAMPLES / "recipe-tfidf.yaml", EXAMPLES / "recipe-tfidf-chinese.yaml"
LONG = EXAMPLES / "recipe-tfidf-long.yaml"
MODELS = ("linear", "mlp")


class Set(NamedTuple):
    """How a set is prepared, and what is to be reached on it."""

    recipe: Path
    floor: float
    settings: Mapping[str, tuple[str, ...]] = {}
    """What the recipe or a model is told beside its file. See docs/results.md for why."""


REVIEWS = {
    "linear": ("optimizer.lr=20", "optimizer.l2=4e-6"),
    "mlp": ("model.hidden=[16]", "epochs=2"),
}
QUESTIONS = {
    "recipe": ("features.0.lower=false", "features.1.lower=false"),
    "linear": ("optimizer.lr=10", "epochs=20"),
}
TITLES = {"linear": ("optimizer.lr=10", "optimizer.l2=6.25e-6"), "mlp": ("epochs=3",)}
"""l2 is what logistic regression with C = 3 has on 53,360 texts."""
HEADLINES = {"recipe": ("features.0.ngrams=2",), "linear": ("optimizer.lr=20", "epochs=20")}
SETS = {
    "imdb": Set(LONG, 90.94, REVIEWS),
    "ag-news": Set(ENGLISH, 87.89),
    "mr": Set(ENGLISH, 78.18),
    "subj": Set(ENGLISH, 91.69),
    "sst2": Set(ENGLISH, 81.93),
    "trec": Set(ENGLISH, 91.00, QUESTIONS),
    "tnews": Set(CHINESE, 55.98, TITLES),
    "thucnews": Set(CHINESE, 87.19, HEADLINES),
    "chnsenticorp": Set(CHINESE, 92.58),
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
    recipe, _, settings = SETS[name]
    told = settings.get("recipe", ())
    folders = [
        prepared(name, fold, recipe, told, options.data, options.work) for fold in folds_of(name)
    ]
    for model in options.models:
        job, told = EXAMPLES / f"{model}.yaml", settings.get(model, ())
        yield (
            model,
            [
                100 * mean(_of_seed(folder, job, told, seed, options.work) for folder in folders)
                for seed in range(options.seeds)
            ],
        )


def _of_seed(folder: Path, job: Path, told: tuple[str, ...], seed: int, work: Path) -> float:
    kept = work / f"{folder.name}-{job.stem}-{seed}.json"
    return trained(folder, job, (f"seed={seed}", *told), kept)


def _options() -> argparse.Namespace:
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--data", type=Path, default=DATA)
    options.add_argument("--work", type=Path, default=Path("text-floors"))
    options.add_argument("--only", nargs="+", choices=SETS, default=list(SETS), metavar="SET")
    options.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    options.add_argument("--seeds", type=int, default=1)
    return options.parse_args()


if __name__ == "__main__":
    main()

"""Raw texts → shards → a trained model, by commands: what is done is kept, and not done again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT.parent / "shared" / "data"
EXAMPLES = ROOT / "examples" / "prepared_text"
FOLDS = 10
FILES: dict[str, tuple[str, ...]] = {
    "imdb": ("imdb/train.tsv.xz", "imdb/test.tsv.xz"),
    "ag-news": ("ag-news-10k/train.tsv.gz", "ag-news-10k/test.tsv.gz"),
    "mr": ("textcnn-en/mr.tsv.gz",),
    "subj": ("textcnn-en/subj.tsv.gz",),
    "sst2": ("textcnn-en/sst2-train.tsv.gz", "textcnn-en/sst2-test.tsv.gz"),
    "trec": ("textcnn-en/trec-train.tsv.gz", "textcnn-en/trec-test.tsv.gz"),
    "tnews": ("tnews-zh/train.tsv.gz", "tnews-zh/dev.tsv.gz"),
    "thucnews": ("thucnews-zh-20k/train.tsv.gz", "thucnews-zh-20k/test.tsv.gz"),
    "chnsenticorp": ("chnsenticorp-zh/train.tsv.gz", "chnsenticorp-zh/test.tsv.gz"),
}
"""Below the data folder: for training and for the test; one file alone is cross-validated."""
_QUIET = ("checkpoint.every=never", "checkpoint.best=false", "track.report=false")
_AT_THE_END = "evaluate.every=1000000"


def folds_of(name: str, most: int = FOLDS) -> list[int | None]:
    """The folds of a set; None for one that has a test of its own."""
    return list(range(most)) if len(FILES[name]) == 1 else [None]


def prepared(
    name: str, fold: int | None, recipe: Path, settings: Sequence[str], data: Path, work: Path
) -> Path:
    """The folder of its shards, made now unless it is there."""
    folder = work / (name if fold is None else f"{name}-{fold}")
    if (folder / "prepared.json").exists():
        return folder
    paths = [str(data / file) for file in FILES[name]]
    if fold is None:
        read = [f"read.{at}.path={path}" for at, path in enumerate(paths)]
    else:
        folds = f"{{by: stratified, column: label, folds: {FOLDS}, fold: {fold}}}"
        read = [f"read={paths[0]}", f"split={folds}"]
    into = f"write.folder={folder}"
    _echelon("data", "prepare", str(recipe), *read, into, *settings, "--workers", "1")
    return folder


def trained(folder: Path, job: Path, settings: Sequence[str], kept: Path) -> float:
    """The accuracy after the last epoch, by a run of now or of before."""
    if not kept.exists():
        where = (f"data.path={folder}", f"track.folder={kept.parent / 'runs'}")
        given = (*where, *settings, _AT_THE_END, *_QUIET)
        out = _echelon("train", str(job), *given, "--json", "--quiet")
        kept.write_text(out.strip().splitlines()[-1] + "\n", encoding="utf-8")
    summary: dict[str, Any] = json.loads(kept.read_text(encoding="utf-8"))
    return float(summary["metrics"]["accuracy"])


def _echelon(*arguments: str) -> str:
    """What `echelon …` prints; if it fails, so does the benchmark."""
    done = subprocess.run(
        [sys.executable, "-m", "echelon", *arguments],
        env={"OMP_NUM_THREADS": "1", **os.environ},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(f"echelon {' '.join(arguments)}\n{done.stderr}")
    return done.stdout

"""Record the golden files: `python -m tests.golden.record`."""

from __future__ import annotations

import contextlib
import json
import tempfile
from pathlib import Path
from typing import Any

import torch

from tests.contract import serving

from . import folders, weights
from .numerics import arithmetic

HERE = Path(__file__).parent


def main() -> None:
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for strategy in weights.STRATEGIES:
        with _empty_folder():
            found[strategy] = weights.train(strategy)
            serving.close_all()
            serving.end_all()
    _write("weights.json", {"arithmetic": arithmetic(), "weights": found})
    folders.use_small_blocks(setattr)
    prepared: dict[str, Any] = {}
    for recipe in folders.RECIPES:
        with _empty_folder() as folder:
            prepared[recipe] = folders.made(recipe, folder)
    _write("folders.json", {"arithmetic": arithmetic(), "folders": prepared})


def _write(name: str, golden: dict[str, Any]) -> None:
    (HERE / name).write_text(json.dumps(golden, indent=1) + "\n", encoding="utf-8")
    print(f"recorded {HERE / name}")


@contextlib.contextmanager
def _empty_folder() -> Any:
    with tempfile.TemporaryDirectory() as name, contextlib.chdir(name):
        yield Path(name)


if __name__ == "__main__":
    main()

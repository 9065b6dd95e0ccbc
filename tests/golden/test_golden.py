"""A change that is not meant to change results leaves the golden files as they are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from . import folders, weights
from .numerics import arithmetic

HERE = Path(__file__).parent
pytestmark = pytest.mark.timeout(300)


def recorded(name: str) -> dict[str, Any]:
    return json.loads((HERE / name).read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def same_arithmetic(golden: dict[str, Any]) -> bool:
    return bool(golden["arithmetic"] == arithmetic())


@pytest.fixture
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Little data in several blocks, as much data would be."""
    folders.use_small_blocks(monkeypatch.setattr)


@pytest.mark.parametrize("strategy", weights.STRATEGIES)
def test_weights_after_20_steps_are_the_recorded_ones(strategy: str) -> None:
    golden = recorded("weights.json")
    expected = golden["weights"][strategy]
    found = weights.train(strategy)
    assert found.keys() == expected.keys()
    for case, description in found.items():
        assert weights.agree(description, expected[case]), case
        if same_arithmetic(golden):
            assert description["sha256"] == expected[case]["sha256"], case


@pytest.mark.usefixtures("_small_blocks")
@pytest.mark.parametrize("recipe", folders.RECIPES)
def test_prepared_folders_are_the_recorded_ones(recipe: str, tmp_path: Path) -> None:
    golden = recorded("folders.json")
    expected = golden["folders"][recipe]
    found = folders.made(recipe, tmp_path)
    assert found["counts"] == expected["counts"]
    assert found["quarantined"] == expected["quarantined"]
    assert found["files"].keys() == expected["files"].keys()
    if same_arithmetic(golden):
        assert found["records"] == expected["records"]
        assert found["files"] == expected["files"]

"""A feature is fitted as the engine does it: pass after pass, what it learns packed on the way."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from echelon.core.config.loading import checked
from echelon.data.prepare.recipe import feature_kind
from echelon.data.prepare.steps import Feature
from echelon.data.prepare.workdir import Learnt, load, pack, save, unpack

Block = Mapping[str, Any]
Fitted = tuple[Feature, Learnt]
Fit = Callable[..., Fitted]


@pytest.fixture
def fit(tmp_path: Path) -> Fit:
    """`fit(blocks, kind=…, …)`: the feature and what it has learnt, as it is found on disk."""

    def fit(blocks: Sequence[Block], **settings: Any) -> Fitted:
        feature = checked(feature_kind(settings["kind"]), {"from": "text", "to": "x"} | settings)
        learnt: Learnt = {}
        for at in range(feature.looks):
            partials = (unpack(pack(feature.look(at, block, learnt))) for block in blocks)
            learnt = feature.learn(at, partials, learnt, tmp_path / f"scratch-{at}")
        save(tmp_path / "learnt", learnt)
        return feature, load(tmp_path / "learnt")

    return fit


@pytest.fixture
def reviews() -> Block:
    """Texts of two classes with enough in common."""
    good = "A good film, with good actors and a fine story. Don't miss it!"
    bad = "A bad film: bad actors, a dull story (1.5 hours too long)."
    texts = [f"{word} {text}" for word in ("Well", "So", "this IS") for text in (good, bad)]
    texts += ["Good, good and again good…", "", "dull and bad", "Ein gutes Stück; très bien"]
    labels = ["up", "down"] * 3 + ["up", "down", "down", "up"]
    return {"text": pa.array(texts, pa.large_utf8()), "label": pa.array(labels)}


def halves(block: Block, at: int) -> list[Block]:
    """The same rows in two blocks."""
    return [{k: v[:at] for k, v in block.items()}, {k: v[at:] for k, v in block.items()}]

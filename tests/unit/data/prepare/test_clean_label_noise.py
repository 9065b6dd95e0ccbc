"""Labels that look wrong by the text of their record."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from echelon.data.prepare.clean.label_noise import Noise
from echelon.data.prepare.workdir import pack, unpack

WORDS = [f"{a}{b}{c}" for a in "bdfglmprst" for b in "aeiou" for c in ("n", "rk", "ssel", "th")]


def noisy(rows: int) -> tuple[Any, set[int]]:
    """Return texts whose words depend on their class, some with wrong labels, and those rows."""
    lots = random.Random(6)
    own = {"a": WORDS[:60], "b": WORDS[60:120], "c": WORDS[120:180]}
    labels = [lots.choice("abc") for _ in range(rows)]
    texts = [" ".join(lots.choices(own[label], k=8)) for label in labels]
    wrong = set(lots.sample(range(rows), rows // 40))
    other = {"a": "b", "b": "c", "c": "a"}
    given = [other[one] if at in wrong else one for at, one in enumerate(labels)]
    return pa.record_batch({"t": pa.array(texts, pa.large_utf8()), "y": pa.array(given)}), wrong


def test_labels_that_do_not_fit_the_text_are_noted_and_nothing_is_dropped(tmp_path: Path) -> None:
    whole, wrong = noisy(800)
    blocks = [whole.slice(start, 200) for start in range(0, 800, 200)]
    step = Noise(label="y", column="t", sure=0.8)
    partials = (unpack(pack(step.look(0, block, {}))) for block in blocks)
    learnt = unpack(pack(step.learn(0, partials, {}, tmp_path)))
    noted: set[int] = set()
    for at, block in enumerate(blocks):
        done = step.clean(block, learnt)
        assert done.block is block
        assert not done.dropped
        assert done.counts == {"suspected": len(done.noted)}
        noted |= {200 * at + row for row, _ in done.noted}
    assert len(noted & wrong) >= 0.9 * len(wrong)
    assert len(noted - wrong) <= 3
    assert learnt["agreement"] == pytest.approx(1 - 1 / 40, abs=0.02)
    assert sum(pair["records"] for pair in learnt["mixed_up"]) >= len(noted & wrong)
    reason = step.clean(blocks[0], learnt).noted[0][1]
    assert "but by its text" in reason


def test_labels_are_judged_by_all_of_a_large_block_however_it_is_cut(tmp_path: Path) -> None:
    whole, _ = noisy(6000)
    step = Noise(label="y", column="t")
    at_once = step.learn(0, [step.look(0, whole, {})], {}, tmp_path)
    halves = [step.look(0, whole.slice(start, 3000), {}) for start in (3000, 0)]
    in_parts = step.learn(0, halves, {}, tmp_path)
    assert at_once["records"] == 6000
    assert pack(at_once) == pack(in_parts)


def test_too_few_records_tell_nothing_of_labels(tmp_path: Path) -> None:
    whole, _ = noisy(40)
    step = Noise(label="y", column="t")
    learnt = step.learn(0, [step.look(0, whole, {})], {}, tmp_path)
    assert learnt == {"classes": [], "records": 40}
    assert step.clean(whole, learnt).noted == []


def test_a_class_that_is_in_one_fold_alone_does_no_harm(tmp_path: Path) -> None:
    whole, _ = noisy(200)
    labels = pa.array(["rare", *whole.column("y").to_pylist()[1:]])
    block = whole.set_column(1, "y", labels)
    step = Noise(label="y", column="t")
    learnt = step.learn(0, [step.look(0, block, {})], {}, tmp_path)
    assert "rare" in learnt["classes"]
    assert step.clean(block, learnt).block is block


def test_a_block_without_rows_is_judged_like_others(tmp_path: Path) -> None:
    whole, wrong = noisy(200)
    none = whole.slice(0, 0)
    step = Noise(label="y", column="t", sure=0.7)
    learnt = step.learn(0, [step.look(0, one, {}) for one in (none, whole, none)], {}, tmp_path)
    assert step.clean(none, learnt).block.num_rows == 0
    assert {row for row, _ in step.clean(whole, learnt).noted} & wrong

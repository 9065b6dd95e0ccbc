"""Where a chain of layers is cut into stages."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echelon.core.config import PipelineSection
from echelon.core.errors import ConfigError
from echelon.strategy.pipeline.partition import Cost, balanced, by_names, stage_count

LAYERS = ["embed", "body.0", "body.1.a", "body.1.b", "head"]


def costs(*seconds: float) -> list[Cost]:
    return [Cost(each, 0.0) for each in seconds]


def slowest(seconds: list[float], starts: list[int]) -> float:
    ends = [*starts[1:], len(seconds)]
    return max(sum(seconds[a:b]) for a, b in zip(starts, ends, strict=True))


def every_cut(layers: int, stages: int, start: int = 0) -> list[list[int]]:
    if stages == 1:
        return [[start]]
    return [
        [start, *rest]
        for nxt in range(start + 1, layers - stages + 2)
        for rest in every_cut(layers, stages - 1, nxt)
    ]


@given(st.lists(st.floats(0, 10), min_size=1, max_size=8), st.integers(1, 8))
def test_no_other_cut_has_a_faster_slowest_stage(seconds: list[float], stages: int) -> None:
    stages = min(stages, len(seconds))
    starts = balanced(costs(*seconds), stages)
    assert starts in every_cut(len(seconds), stages)
    best = min(slowest(seconds, cut) for cut in every_cut(len(seconds), stages))
    assert slowest(seconds, starts) == pytest.approx(best)


def test_stages_take_about_the_same_time() -> None:
    assert balanced(costs(1, 1, 1, 1), 2) == [0, 2]
    assert balanced(costs(3, 1, 1, 1), 2) == [0, 1]
    assert balanced(costs(9, 1, 1, 1, 1, 1), 3) == [0, 1, 3]  # the rest is even as well


def test_a_cut_is_made_where_little_has_to_pass() -> None:
    much, little = Cost(1.0, 0.3), Cost(1.0, 0.01)
    assert balanced([much, much, little, much], 2) == [0, 2]
    assert balanced([Cost(1, 0.3), Cost(0, 0.01), Cost(1, 0)], 2) == [0, 2]


def test_a_model_without_enough_places_to_cut_is_refused() -> None:
    never = Cost(1.0, math.inf)
    assert balanced([never, Cost(1.0, 0.0), never], 2) == [0, 2]
    with pytest.raises(ConfigError, match=r"cannot be cut into 3 stages: .* than one tensor"):
        balanced([never, Cost(1.0, 0.0), never], 3)


def test_the_users_cut_is_taken_by_layer_or_by_the_chain_it_begins() -> None:
    assert by_names(LAYERS, ["body.0", "head"]) == [0, 1, 4]
    assert by_names(LAYERS, ["body.1"]) == [0, 2]


def test_a_cut_at_an_unknown_layer_or_out_of_order_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"layer 'bodi.0' is unknown; did you mean 'body.0'\?"):
        by_names(LAYERS, ["bodi.0"])
    with pytest.raises(ConfigError, match=r"layer 'body.0' does not come after 'head'"):
        by_names(LAYERS, ["head", "body"])
    with pytest.raises(ConfigError, match=r"layer 'embed' does not come after 'embed'"):
        by_names(LAYERS, ["embed"])


def test_schedule_and_members_say_how_many_stages() -> None:
    assert stage_count(PipelineSection(), 3) == 3
    assert stage_count(PipelineSection(schedule="interleaved_1f1b"), 3) == 6
    three = PipelineSection(schedule="interleaved_1f1b", split=("a", "b", "c", "d", "e"))
    assert stage_count(three, 2) == 6
    with pytest.raises(ConfigError, match=r"names 1 layers, which makes 2 stages; .* needs 3 st"):
        stage_count(PipelineSection(split=("a",)), 3)
    with pytest.raises(ConfigError, match=r"needs a multiple of 4 stages"):
        stage_count(three, 4)

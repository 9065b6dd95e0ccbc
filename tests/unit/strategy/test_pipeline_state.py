"""An optimizer's saved state without the parameters of other members."""

from __future__ import annotations

from echelon.strategy.pipeline.state import options_of, without_elsewhere


def test_what_others_keep_is_left_out_of_an_optimizers_state_and_the_unknown_is_not() -> None:
    saved = {"state": {"a": {}, "b": {}, "z": {}}, "groups": [{"lr": 2, "names": ["a", "b", "z"]}]}
    mine = without_elsewhere(saved, {"a"}, {"a", "b"})
    assert mine == {"state": {"a": {}, "z": {}}, "groups": [{"lr": 2, "names": ["a", "z"]}]}
    assert without_elsewhere({"groups": [{}]}, {"a"}, {"a"}) == {"groups": [{}]}
    assert options_of(saved, ["b"]) == {"lr": 2}
    assert options_of(saved, ["c"]) == {}

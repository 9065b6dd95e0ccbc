"""A shard's part of the state: divided by name and joined again, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from echelon.comm.ps.state import BadPart, Gathering, blank, divide, join
from echelon.core.config import OptimizerSection
from echelon.core.errors import CheckpointError
from tests.unit.server.odd_model import OneProcess, flats_of, gradients, partition_of

ADAM = OptimizerSection(name="adam", weight_decay=0.1)


def saved() -> dict[str, Any]:
    one = OneProcess(ADAM)
    one.step(gradients(one.model, 1), 1.0)
    return {"model": dict(one.model.state_dict()), "optimizer": one.stepper.state_dict()}


def test_parts_travel_as_plain_data_and_tensors() -> None:
    partition = partition_of(OneProcess(ADAM).model, ADAM, 3)
    parts = divide(partition, saved())
    gathering = Gathering(partition)
    places = [gathering.blank(shard, part.head()) for shard, part in enumerate(parts)]
    for place, part in zip(places, parts, strict=True):
        for mine, theirs in zip(place.body(), part.body(), strict=True):
            mine.copy_(theirs)
    state = gathering.state(places)
    joined = join(partition, parts)
    torch.testing.assert_close(state["model"], joined["model"])
    torch.testing.assert_close(state["optimizer"]["state"], joined["optimizer"]["state"])
    assert state["optimizer"]["groups"] == joined["optimizer"]["groups"]
    for name, values in state["model"].items():
        assert torch.equal(values, saved()["model"][name])


def test_without_an_optimizer_all_begin_anew() -> None:
    one = OneProcess(ADAM)
    partition = partition_of(one.model, ADAM, 2)
    flats = flats_of(partition, ADAM)
    for mine, part in zip(flats, divide(partition, {"model": one.model.state_dict()}), strict=True):
        mine.load(part)
    state = join(partition, [mine.part() for mine in flats])
    assert state["optimizer"]["state"] == {}
    assert state["optimizer"]["groups"] == one.stepper.state_dict()["groups"]


def test_parameters_with_other_counts_keep_them() -> None:
    one = OneProcess(ADAM)
    one.step(gradients(one.model, 1), 1.0)
    some = {n: g for n, g in gradients(one.model, 2).items() if n in ("wide.weight", "scale")}
    one.step(some, 1.0)
    state = {"model": dict(one.model.state_dict()), "optimizer": one.stepper.state_dict()}
    del state["optimizer"]["state"]["conv.bias"]
    partition = partition_of(one.model, ADAM, 2)
    flats = flats_of(partition, ADAM)
    for mine, part in zip(flats, divide(partition, state), strict=True):
        mine.load(part)
    again = join(partition, [mine.part() for mine in flats])["optimizer"]["state"]
    counts = {name: float(values["step"]) for name, values in again.items()}
    assert counts == {"conv.weight": 1, "wide.weight": 2, "wide.bias": 1, "scale": 2}


def broken(change: str) -> dict[str, Any]:
    state = saved()
    optimizer = state["optimizer"]
    match change:
        case "no weights":
            del state["model"]["wide.bias"]
        case "other shape":
            state["model"]["wide.bias"] = torch.zeros(3)
        case "other state":
            optimizer["state"]["wide.bias"]["exp_avg"] = torch.zeros(3)
        case "no key":
            del optimizer["state"]["wide.bias"]["exp_avg"]
        case "stranger":
            optimizer["state"]["other"] = optimizer["state"]["wide.bias"]
        case "no groups":
            del optimizer["groups"]
        case "other groups":
            optimizer["groups"][0]["names"].remove("wide.weight")
        case "lacking":
            optimizer["groups"] = optimizer["groups"][:1]
    return state


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ("no weights", "does not fit the model: it lacks 'wide.bias'"),
        ("other shape", r"weights of 'wide.bias' are \(3,\), but the parameter is \(53,\)"),
        ("other state", r"exp_avg of 'wide.bias' are \(3,\)"),
        ("no key", "optimizer state of 'wide.bias' lacks exp_avg"),
        ("stranger", "optimizer state has 'other', which is not trained here"),
        ("no groups", "must have the keys 'state' and 'groups'"),
        ("other groups", "groups 'conv.weight' apart from 'wide.weight'"),
        ("lacking", "lacks 'conv.bias' of this model"),
    ],
)
def test_a_state_that_does_not_fit_is_refused(change: str, why: str) -> None:
    partition = partition_of(OneProcess(ADAM).model, ADAM, 2)
    with pytest.raises(CheckpointError, match=why):
        divide(partition, broken(change))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"keys": ["a"] * 2}, "keys, steps and groups"),
        ({"keys": [3]}, "keys, steps and groups"),
        ({"keys": [""]}, "keys, steps and groups"),
        ({"keys": [str(n) for n in range(9)]}, "keys, steps and groups"),
        ({"groups": {"other": {}}}, "keys, steps and groups"),
        ({"groups": {"plain": 3}}, "keys, steps and groups"),
        ({"steps": [[]] * 5}, "counts steps of 5 ranges, not 2"),
        ({"steps": [None, None]}, "of other values than it has"),
        ({"steps": [[[0, 10, 1.0]], [[0, 10, 1.0]]]}, "of other values than it has"),
        ({"steps": [[[0, 1 << 40, 1.0]], []]}, "of other values than it has"),
        ({"steps": [[[0, 5, "many"]], []]}, "of other values than it has"),
    ],
)
def test_a_head_that_makes_no_sense_is_refused(change: dict[str, Any], why: str) -> None:
    partition = partition_of(OneProcess(ADAM).model, ADAM, 1)
    head = divide(partition, saved())[0].head()
    with pytest.raises(BadPart, match=why):
        blank(partition, 0, {**head, **change})
    with pytest.raises(BadPart):
        blank(partition, 0, None)

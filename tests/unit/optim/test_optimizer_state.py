"""Optimizer state is saved by parameter name, comes back bit by bit, and must fit."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from echelon.core.config import OptimizerSection
from echelon.core.errors import CheckpointError
from echelon.optim import Stepper, build_optimizer

NAMES = ["sgd", "momentum", "nesterov", "adagrad", "rmsprop", "adam", "adamw"]


def net() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten(), nn.Linear(12, 2))


def make(name: str, model: nn.Module, **values: Any) -> Stepper:
    section = OptimizerSection.model_validate({"name": name, "lr": 0.1, **values})
    return Stepper(build_optimizer(section, model), model.named_parameters())


def advance(model: nn.Module, stepper: Stepper, seeds: range) -> None:
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=generator).to(memory_format=_format(p))
        stepper.step(1 / (1 + seed))


def _format(p: Tensor) -> torch.memory_format:
    is_image = p.ndim == 4 and p.is_contiguous(memory_format=torch.channels_last)
    return torch.channels_last if is_image else torch.contiguous_format


@pytest.mark.parametrize("penalties", [{}, {"weight_decay": 0.1, "l1": 0.1}], ids=["", "penalties"])
@pytest.mark.parametrize("name", NAMES)
def test_saving_and_loading_changes_nothing(name: str, penalties: dict[str, float]) -> None:
    straight, halted, resumed = net(), net(), net()
    advance(straight, make(name, straight, **penalties), range(7))
    first = make(name, halted, **penalties)
    advance(halted, first, range(3))
    saved = copy.deepcopy(first.state_dict())
    resumed.load_state_dict(halted.state_dict())
    second = make(name, resumed, **penalties)
    second.load_state_dict(saved)
    advance(resumed, second, range(3, 7))
    for mine, reference in zip(resumed.parameters(), straight.parameters(), strict=True):
        assert torch.equal(mine, reference)


def test_loading_into_a_stepper_at_work_takes_effect_at_once() -> None:
    model, other = net(), net()
    ahead, behind = make("adam", model), make("adam", other)
    advance(model, ahead, range(4))
    advance(other, behind, range(2))
    other.load_state_dict(model.state_dict())
    behind.load_state_dict(ahead.state_dict())
    for stepper, target in ((ahead, model), (behind, other)):
        advance(target, stepper, range(4, 6))
    for mine, reference in zip(other.parameters(), model.parameters(), strict=True):
        assert torch.equal(mine, reference)


def test_state_is_keyed_by_name_and_survives_json_for_its_options() -> None:
    model = net()
    stepper = make("adam", model, weight_decay=0.1)
    advance(model, stepper, range(2))
    state = stepper.state_dict()
    assert state["state"].keys() == {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert state["state"]["0.weight"].keys() == {"step", "exp_avg", "exp_avg_sq"}
    assert float(state["state"]["2.bias"]["step"]) == 2
    assert [group["names"] for group in state["groups"]] == [
        ["0.weight", "2.weight"],
        ["0.bias", "2.bias"],
    ]
    assert "params" not in state["groups"][0]
    assert "fused" not in state["groups"][0]
    state["groups"] = json.loads(json.dumps(state["groups"]))
    fresh = make("adam", net(), weight_decay=0.1)
    fresh.load_state_dict(state)
    assert fresh.optimizer.param_groups[0]["betas"] == (0.9, 0.999)


def test_a_saved_step_count_does_not_move_on() -> None:
    model = net()
    stepper = make("adam", model)
    advance(model, stepper, range(2))
    count = stepper.state_dict()["state"]["0.bias"]["step"]
    advance(model, stepper, range(2))
    assert float(count) == 2
    assert count.untyped_storage().nbytes() == count.element_size()


def test_step_counts_may_be_plain_numbers() -> None:
    model = net()
    stepper = make("adam", model)
    advance(model, stepper, range(2))
    state = stepper.state_dict()
    for values in state["state"].values():
        values["step"] = values["step"].item()
    stepper.load_state_dict(state)
    advance(model, stepper, range(1))
    assert float(stepper.state_dict()["state"]["0.bias"]["step"]) == 3


def test_the_order_of_parameters_and_groups_does_not_matter() -> None:
    model, other = net(), net()
    saved = make("adam", model, weight_decay=0.1)
    advance(model, saved, range(3))
    other.load_state_dict(model.state_dict())
    turned = make("adam", other, weight_decay=0.1)
    for group in turned.optimizer.param_groups:
        group["params"].reverse()
    turned.optimizer.param_groups.reverse()
    turned.load_state_dict(saved.state_dict())
    for stepper, target in ((saved, model), (turned, other)):
        advance(target, stepper, range(3, 5))
    for mine, reference in zip(other.parameters(), model.parameters(), strict=True):
        assert torch.equal(mine, reference)


@pytest.mark.parametrize("name", ["momentum", "adam", "adagrad"])
def test_state_takes_the_memory_layout_of_its_parameter(name: str) -> None:
    model, straight = net(), net()
    stepper = make(name, model)
    advance(model, stepper, range(2))
    advance(straight, make(name, straight), range(4))
    other = net().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    other.load_state_dict(model.state_dict())
    resumed = make(name, other)
    resumed.load_state_dict(stepper.state_dict())
    advance(other, resumed, range(2, 4))
    for mine, reference in zip(other.parameters(), straight.parameters(), strict=True):
        torch.testing.assert_close(mine, reference)


def test_a_state_from_before_the_first_step_fits() -> None:
    model = net()
    stepper = make("adam", model)
    empty = copy.deepcopy(stepper.state_dict())
    advance(model, stepper, range(2))
    stepper.load_state_dict(empty)
    assert stepper.state_dict()["state"] == {}


def test_the_state_of_an_unknown_optimizer_comes_back_too() -> None:
    straight, halted, resumed = net(), net(), net()

    def adamax(model: nn.Module) -> Stepper:
        return Stepper(torch.optim.Adamax(model.parameters(), 0.1), model.named_parameters())

    advance(straight, adamax(straight), range(5))
    first, second = adamax(halted), adamax(resumed)
    advance(halted, first, range(3))
    resumed.load_state_dict(halted.state_dict())
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    advance(resumed, second, range(3, 5))
    for mine, reference in zip(resumed.parameters(), straight.parameters(), strict=True):
        assert torch.equal(mine, reference)


def test_what_is_not_a_tensor_and_factored_state_come_back_as_they_are() -> None:
    model = nn.Linear(6, 4)

    def adafactor() -> Stepper:
        return Stepper(torch.optim.Adafactor(model.parameters()), model.named_parameters())

    stepper, other = adafactor(), adafactor()
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    stepper.step(1.0)
    state = stepper.state_dict()
    state["state"]["bias"]["note"] = 3
    other.load_state_dict(state)
    again = other.state_dict()["state"]
    assert again["bias"]["note"] == 3
    rows = state["state"]["weight"]["row_var"]
    assert torch.equal(again["weight"]["row_var"], rows)
    assert again["weight"]["row_var"].data_ptr() != rows.data_ptr()


def test_a_rate_kept_in_a_tensor_comes_back_in_place() -> None:
    model = nn.Linear(2, 2)
    rate = torch.tensor(0.5)
    stepper = Stepper(
        torch.optim.Adam(model.parameters(), rate, fused=True), model.named_parameters()
    )
    state = stepper.state_dict()
    rate.fill_(0.1)
    stepper.load_state_dict(state)
    assert float(rate) == 0.5
    assert stepper.optimizer.param_groups[0]["lr"] is rate


def test_a_group_without_parameters_keeps_its_options() -> None:
    model = nn.Linear(2, 2)
    groups: list[dict[str, Any]] = [
        {"params": list(model.parameters())},
        {"params": [], "lr": 0.25},
    ]
    stepper = Stepper(torch.optim.SGD(groups, 0.5), model.named_parameters())
    stepper.load_state_dict(stepper.state_dict())
    assert stepper.optimizer.param_groups[1]["lr"] == 0.25


def without(*path: Any) -> Callable[[dict[str, Any]], None]:
    def change(state: dict[str, Any]) -> None:
        at: Any = state
        for part in path[:-1]:
            at = at[part]
        del at[path[-1]]

    return change


def renamed(state: dict[str, Any]) -> None:
    state["state"]["head"] = state["state"].pop("2.bias")


def reshaped(state: dict[str, Any]) -> None:
    state["state"]["2.bias"]["exp_avg"] = torch.zeros(7)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (without("groups"), "must have the keys 'state' and 'groups'"),
        (without("groups", 0, "names"), "a group without 'names'"),
        (without("groups", 1), r"lacks '0.bias' \(and 1 more\) of this model"),
        (without("groups", 0, "betas"), "another optimizer: they differ in 'betas'"),
        (renamed, "has 'head', which is not trained here"),
        (reshaped, r"'2.bias': exp_avg is \(7,\), but the parameter is \(2,\)"),
        (
            without("state", "0.weight", "step"),
            "'0.weight' holds exp_avg, exp_avg_sq; it should hold exp_avg, exp_avg_sq, step",
        ),
    ],
)
def test_a_state_that_does_not_fit_is_refused_whole(
    spoil: Callable[[dict[str, Any]], None], message: str
) -> None:
    model = net()
    stepper = make("adam", model, weight_decay=0.1)
    advance(model, stepper, range(2))
    state = copy.deepcopy(stepper.state_dict())
    spoil(state)
    state.get("groups", [{}])[0]["lr"] = 77.0
    with pytest.raises(CheckpointError, match=message):
        stepper.load_state_dict(state)
    assert stepper.optimizer.param_groups[0]["lr"] != 77.0
    assert float(stepper.state_dict()["state"]["0.bias"]["step"]) == 2


def test_the_state_of_another_optimizer_is_refused() -> None:
    with pytest.raises(CheckpointError, match="of another optimizer"):
        make("adam", net()).load_state_dict(make("sgd", net()).state_dict())


def test_adagrad_without_its_sums_is_refused() -> None:
    state = make("adagrad", net()).state_dict()
    del state["state"]["0.bias"]
    with pytest.raises(CheckpointError, match=r"'0.bias' holds nothing; it should hold step, sum"):
        make("adagrad", net()).load_state_dict(state)


def test_groups_cut_in_another_way_are_refused() -> None:
    penalised = make("adam", net(), weight_decay=0.1).state_dict()
    with pytest.raises(CheckpointError, match=r"apart from .* other penalties"):
        make("adam", net()).load_state_dict(penalised)

"""What goes wrong among members that hold a part each, and what cannot be divided."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from echelon.comm.group import Group
from echelon.core.errors import CheckpointError, NonFiniteError, TaskError
from echelon.core.interfaces import Task

from . import members, networks
from .levels import LEVELS, apart, arranged, built
from .trained import CASE, go, weights

pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize("name", ["mlp", "cnn"])
def test_an_update_that_is_not_finite_in_one_member_is_refused_by_all(name: str) -> None:
    def work(group: Group) -> list[str]:
        found = []
        for level in LEVELS:
            trained = built(networks.task(name), "plain", group, arranged(level))
            batch = dict(networks.part(networks.batches(name)[0], group.index, group.count)[0])
            if group.index == 1:
                batch["x"] = torch.full_like(batch["x"], float("nan"))  # type: ignore[arg-type]
            before = weights(trained)
            trained.compute([batch])
            with pytest.raises(NonFiniteError) as caught:
                trained.update()
            assert apart(weights(trained), before, group) == 0
            go(trained, name, "plain", slice(1, 2))
            found.append(str(caught.value))
        return found

    for message in members.run(2, work):
        assert "step 1: the loss is nan: input column 'x' is not finite (member 1)" in message


def test_a_layer_whose_gradient_is_not_finite_is_named() -> None:
    def root(output: Tensor, _batch: object) -> tuple[Tensor, float]:
        return (output - output.detach()).abs().sqrt().sum(), 1.0  # finite, its slope is not

    def work(group: Group) -> list[str]:
        found = []
        for level in LEVELS:
            trained = built(Task(networks.MODELS["mlp"], root), "plain", group, arranged(level))
            trained.compute(networks.part(networks.batches("mlp")[0], group.index, group.count))
            with pytest.raises(NonFiniteError) as caught:
                trained.update()
            found.append(str(caught.value))
        return found

    for message in members.run(2, work):
        assert "the gradient of layer '0.0.weight' is not finite" in message


def test_what_cannot_be_divided_or_does_not_fit_is_refused() -> None:
    task = networks.task("mlp")
    task.optimizer = lambda parameters: torch.optim.Adafactor(parameters)

    def work(group: Group) -> list[str]:
        found = []
        for level in LEVELS:
            with pytest.raises(TaskError, match="Adafactor cannot be divided among members"):
                built(task, "plain", group, arranged(level))
            trained = built(networks.task("mlp"), "plain", group, arranged(level))
            go(trained, "mlp", "plain", slice(1))
            state = trained.state_dict()
            model = {name: torch.zeros(9, 9) for name in networks.MODELS["mlp"]().state_dict()}
            for wrong in (model, {"other": torch.zeros(1)}):
                with pytest.raises(CheckpointError, match="does not fit the model"):
                    trained.load_state_dict({**state, "model": wrong})
            bad = {name: {"momentum_buffer": torch.zeros(9, 9)} for name in trained._names}
            whole = {"state": bad, "groups": state["optimizer"]["groups"]}
            with pytest.raises(CheckpointError, match=r"is \(9, 9\), but the parameter is"):
                trained._load_optimizer_state(whole)
            found.append(level)
        return found

    assert members.run(2, work) == list(LEVELS)


def test_a_parameter_of_one_number_is_trained_or_refused() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.inner, self.scale = nn.Linear(6, 3), nn.Parameter(torch.ones(()))

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x) * self.scale  # type: ignore[no-any-return]

    task = Task(Scaled, networks.task("mlp").loss)
    single = built(task, CASE)
    go(single, "mlp", CASE, slice(3))
    state = copy.deepcopy(single.state_dict())
    go(single, "mlp", CASE, slice(3, 6))
    expected = weights(single)

    def work(group: Group) -> list[float]:
        found = []
        for level in LEVELS[:2]:
            trained = built(task, CASE, group, arranged(level))
            trained.load_state_dict(state)
            go(trained, "mlp", CASE, slice(3, 6))
            kept = trained.state_dict()["optimizer"]["state"]["scale"]
            assert group.index or kept["exp_avg"].shape == ()
            found.append(apart(weights(trained), expected, group))
        with pytest.raises(TaskError, match="parameter 'scale' is a single number"):
            built(task, CASE, group, arranged("parameters"))
        return found

    assert max(members.run(2, work)) <= 1e-5

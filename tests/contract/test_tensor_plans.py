"""Which layers a team computes together: as the user says, and what is refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from echelon.comm.group import Group
from echelon.core.config import TensorSection
from echelon.core.errors import CheckpointError, ConfigError, TaskError
from echelon.core.interfaces import Task
from echelon.core.types import Parallel
from echelon.models.gpt import GPT, GPTOptions
from echelon.models.mlp import MLP, MLPOptions

from . import members, networks
from .jobs import difference
from .test_tensor import built
from .trained import CASE, go, weights

pytestmark = pytest.mark.timeout(300)


def two_layers() -> nn.Module:
    torch.manual_seed(1)
    middle = [nn.Linear(6, 7), nn.Linear(6, 7)]  # 7 does not divide evenly

    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.up = middle
            self.down = nn.Linear(7, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.down(torch.sigmoid(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]

    return Gated()


PLAN = TensorSection(plan={"[gu]*": "columns", "down": "rows"})


def test_a_plan_of_the_users_own_is_followed_also_where_parts_are_uneven() -> None:
    def noisy(model: nn.Module, batch: Any) -> Any:
        """A plan is tried on samples: they have to be the same ones."""
        return model(batch["x"] if model.training else torch.randn_like(batch["x"]))

    task = networks.task("mlp")
    task.model, task.forward = two_layers, noisy
    single = built(task, CASE)
    go(single, "mlp", CASE, slice(8))
    expected = weights(single)

    def work(group: Group) -> list[float]:
        trained = built(task, CASE, group, Parallel(tensor=PLAN))
        rows = trained.model.get_parameter("gate.weight").shape[0]
        go(trained, "mlp", CASE, slice(8))
        return [difference(weights(trained), expected), rows]

    apart, rows = members.run(3, work)
    assert apart <= 1e-5
    assert rows == 2


@pytest.mark.parametrize("between", [nn.Softmax(1), nn.LayerNorm(8)], ids=str)
def test_a_plan_that_would_train_something_else_is_refused(between: nn.Module) -> None:
    task = networks.task("mlp")
    task.model = lambda: nn.Sequential(nn.Linear(6, 8), between, nn.Linear(8, 3))
    plan = TensorSection(plan={"0": "columns", "2": "rows"})

    def work(group: Group) -> str:
        with pytest.raises(ConfigError) as caught:
            built(task, CASE, group, Parallel(tensor=plan))
        return str(caught.value)

    assert "tensor.plan does not fit the model: " in members.run(2, work)


def thin() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 2), nn.Linear(2, 3))


def test_what_cannot_be_cut_is_refused() -> None:
    loss = networks.task("mlp").loss
    free, gpt = Task(two_layers, loss), networks.task("gpt")
    lone = Task(lambda: MLP((6,), 3, MLPOptions(norm="layer")), loss)
    odd = Task(lambda: GPT(9, 8, GPTOptions(layers=1, heads=4, width=8)), loss)
    cases: list[tuple[Task, dict[str, Any], str]] = [
        (free, {}, "does not know how to cut this model: say it in tensor.plan"),
        (lone, {}, "does not know how to cut this model"),
        (odd, {}, "model.heads = 4: must be a multiple of the 3 members"),
        (free, {"nope": "rows"}, "tensor.plan: linear layer 'nope' is unknown"),
        (free, {"gate": "columns"}, "'gate' is cut by columns, but no layer after it by rows"),
        (free, {"down": "rows"}, "'down' is cut by rows, but no layer before it by columns"),
        (gpt, {"1.mlp.up": "columns", "5.scores": "rows"}, "'5.scores' shares a parameter"),
        (Task(thin, loss), {"0": "columns", "1": "rows"}, "'0' cannot be cut by columns into 3"),
    ]

    def work(group: Group) -> int:
        for task, plan, words in cases:
            with pytest.raises(ConfigError, match=words):
                built(task, CASE, group, Parallel(tensor=TensorSection(plan=plan)))
        free.optimizer = lambda parameters: torch.optim.Adafactor(parameters)
        with pytest.raises(TaskError, match="Adafactor cannot be divided among members"):
            built(free, CASE, group, Parallel(tensor=PLAN))
        trained = built(networks.task("mlp"), CASE, group)
        trained._numerics = dataclasses.replace(trained._numerics, compile=True)
        with pytest.raises(ConfigError, match="compile: true"):
            trained._cut()
        state = trained.state_dict()
        wrong = {name: torch.zeros(9, 9) for name in state["model"]}
        with pytest.raises(CheckpointError, match=r"is \(9, 9\), but the parameter is"):
            trained.load_state_dict({**state, "model": wrong})
        return len(cases)

    assert members.run(3, work) == len(cases)

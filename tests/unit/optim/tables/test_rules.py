"""Row-wise update rules, against the same formulas written by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from echelon.core.config import OptimizerSection
from echelon.core.errors import ConfigError
from echelon.core.types import RowRule, RowSpec
from echelon.optim.tables import Rows

WIDTH = 5
IDS = torch.tensor([-7, 3, 1 << 50])


def rows(rule: RowRule) -> Rows:
    return Rows(RowSpec(name="t", width=WIDTH, seed=4, rule=rule))


def gradients(count: int = 6) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(len(IDS), WIDTH, generator=generator) for _ in range(count)]


def trained(rule: RowRule, factor: float = 1.0) -> tuple[Tensor, Tensor]:
    """First and last values after a few updates of all three rows."""
    store = rows(rule)
    first = store.pull(IDS)
    for grad in gradients():
        store.push(IDS, grad.clone(), factor=factor)
    return first, store.pull(IDS)


def test_sgd() -> None:
    first, last = trained(RowRule(name="sgd", lr=0.1), factor=0.5)
    torch.testing.assert_close(last, first - 0.05 * sum(gradients()))


def test_adagrad_has_one_number_per_row() -> None:
    weight, last = trained(RowRule(name="adagrad", lr=0.1, eps=1e-3))
    square = torch.zeros(len(IDS), 1)
    for grad in gradients():
        square += grad.square().mean(1, keepdim=True)
        weight = weight - 0.1 * grad / (square.sqrt() + 1e-3)
    torch.testing.assert_close(last, weight)


def test_adam_counts_each_rows_own_updates() -> None:
    rule = RowRule(name="adam", lr=0.1, betas=(0.8, 0.9), eps=1e-6)
    store = rows(rule)
    weight = store.pull(IDS)
    mean, square = torch.zeros(len(IDS), WIDTH), torch.zeros(len(IDS), 1)
    steps = torch.zeros(len(IDS), 1)
    for number, grad in enumerate(gradients()):
        now = torch.arange(len(IDS)) <= number  # the second row comes one update later, and so on
        store.push(IDS[now], grad[now].clone())
        steps[now] += 1
        mean[now] = 0.8 * mean[now] + 0.2 * grad[now]
        square[now] = 0.9 * square[now] + 0.1 * grad[now].square().mean(1, keepdim=True)
        root = (square[now] / (1 - 0.9 ** steps[now])).sqrt() + 1e-6
        weight[now] -= 0.1 * mean[now] / (1 - 0.8 ** steps[now]) / root
    torch.testing.assert_close(store.pull(IDS), weight)


def test_a_width_of_one_is_what_torch_does() -> None:
    store = Rows(RowSpec(name="t", width=1, seed=0, rule=RowRule(name="adam", lr=0.1)))
    weight = torch.nn.Parameter(store.pull(IDS))
    optimizer = torch.optim.Adam([weight], lr=0.1)
    for grad in gradients():
        weight.grad = grad[:, :1].clone()
        optimizer.step()
        store.push(IDS, grad[:, :1].clone())
    torch.testing.assert_close(store.pull(IDS), weight.detach())


def test_penalties_act_on_the_rows_of_a_batch() -> None:
    rule = RowRule(name="sgd", lr=0.1, l1=0.01, l2=0.2, weight_decay=0.5)
    store = rows(rule)
    first = store.pull(IDS)
    grad = gradients(1)[0]
    store.push(IDS[:2], grad[:2].clone())
    whole = grad[:2] + 0.2 * first[:2] + 0.01 * first[:2].sign()
    torch.testing.assert_close(store.pull(IDS[:2]), first[:2] * (1 - 0.05) - 0.1 * whole)
    assert torch.equal(store.pull(IDS[2:]), first[2:])


@pytest.mark.parametrize(
    ("width", "count"), [(1, 70_000), (3, 30_000), (7, 1), (33, 1985), (33, 1986), (65_535, 3)]
)
def test_rows_of_any_width_move_by_their_own_gradients(width: int, count: int) -> None:
    """Less than a piece of them, exactly one, several; and rows of a piece each."""
    store = Rows(RowSpec(name="t", width=width, seed=4, rule=RowRule(name="sgd", lr=0.5)))
    generator = torch.Generator().manual_seed(2)
    some = torch.randperm(2 * count, generator=generator)[:count].sort().values
    store.push(torch.arange(2 * count), torch.zeros(2 * count, width))
    before, grad = store.pull(torch.arange(2 * count)), torch.randn(count, width)
    given = grad.clone()
    store.push(some, given)
    assert torch.equal(given, grad), "another process may look at them"
    before[some] -= 0.5 * grad
    torch.testing.assert_close(store.pull(torch.arange(2 * count)), before)


@pytest.mark.parametrize(("name", "rule"), [("adamw", "adam"), ("adagrad", "adagrad")])
def test_follows_the_jobs_optimizer(name: str, rule: str) -> None:
    section = OptimizerSection.model_validate({"name": name, "lr": 0.3, "weight_decay": 0.1})
    found = RowRule.of(section, "t")
    assert (found.name, found.lr, found.weight_decay) == (rule, 0.3, 0.1)


def test_an_optimizer_without_a_row_wise_form_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'momentum' has no form for the rows of table 'users'"):
        RowRule.of(OptimizerSection(name="momentum"), "users")


@pytest.mark.parametrize("name", ["sgd", "adagrad", "adam"])
@pytest.mark.parametrize("l2", [0.0, 0.1])
def test_scaled_gradients_are_as_if_they_had_come_so(name: str, l2: float) -> None:
    rule = RowRule.model_validate({"name": name, "lr": 0.1, "l2": l2})
    one, other = rows(rule), rows(rule)
    for grad in gradients():
        one.push(IDS, grad.clone(), scale=0.25)
        other.push(IDS, grad * 0.25)
    torch.testing.assert_close(one.pull(IDS), other.pull(IDS))


@pytest.mark.parametrize("name", ["sgd", "adagrad", "adam"])
def test_many_rows_learn_as_few_do_and_gradients_are_only_read(name: Any) -> None:
    """Rows are changed a piece at a time, which is to show in nothing."""
    spec = RowSpec(name="t", width=64, seed=4, rule=RowRule(name=name, lr=0.1))
    many, few = Rows(spec), Rows(spec)
    ids = torch.arange(2500)
    for grad in torch.randn(2, len(ids), 64, generator=torch.Generator().manual_seed(2)):
        before = grad.clone()
        many.push(ids, grad)
        assert torch.equal(grad, before)
        for part, some in zip(ids.split(100), grad.split(100), strict=True):
            few.push(part, some)
    torch.testing.assert_close(many.pull(ids), few.pull(ids), rtol=0, atol=1e-7)

"""A task with parts of the wrong type is refused in one line."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from echelon.core.errors import TaskError
from echelon.core.interfaces import Task
from echelon.task import prepare
from echelon.task.losses import cross_entropy
from echelon.task.metrics import Accuracy

GOOD: dict[str, Any] = {
    "model": lambda: torch.nn.Linear(2, 2),
    "loss": cross_entropy,
    "metrics": {"accuracy": Accuracy(), "nll": cross_entropy},
    "labels": ["a", "b"],
    "about": {"name": "small"},
    "fitted": {"mean": [0.5], "inner": {"names": ["a", None]}},
}


def test_what_a_task_is_made_of_is_taken() -> None:
    once = prepare(Task(**GOOD))
    assert list(prepare(once).metrics) == ["accuracy", "nll"]
    assert prepare(Task(**GOOD | {"model": torch.nn.Linear(2, 2)}))


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"model": "mlp"}, "task.model is a str: it must be a module or a function"),
        ({"loss": "mse"}, "task.loss is a str: it must be a function"),
        ({"forward": None}, "task.forward is a NoneType: it must be a function"),
        ({"optimizer": "adam"}, "task.optimizer is a str: it must be None or a function"),
        ({"augment": 3}, "task.augment is a int"),
        ({"decode": 3}, "task.decode is a int"),
        ({"samples": []}, "task.samples is a list"),
        ({"name": 3}, "task.name is a int: it must be a text"),
        ({"labels": "ab"}, "task.labels is a str: it must be a tuple of texts"),
        ({"labels": (1, 2)}, "task.labels is a tuple: it must be a tuple of texts"),
        ({"metrics": [Accuracy()]}, "task.metrics is a list: it must be a mapping"),
        ({"metrics": {"loss": Accuracy()}}, "may not be called 'loss'"),
        ({"metrics": {"a": 3}}, "metric 'a' is a int: it must be a Metric or a function"),
        ({"metrics": {"a": Accuracy}}, "metric 'a' is the class Accuracy"),
        ({"about": None}, "task.about is a NoneType: it must be a mapping"),
        ({"fitted": {"mean": torch.ones(2)}}, "task.fitted is not plain data"),
    ],
)
def test_anything_else_is_refused_in_one_line(parts: dict[str, Any], message: str) -> None:
    with pytest.raises(TaskError) as caught:
        prepare(Task(**GOOD | parts))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)

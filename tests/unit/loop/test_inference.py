"""The samples in the report do not depend on the share of the member that writes it."""

from __future__ import annotations

import torch
from torch import nn

from echelon.core.interfaces import Task
from echelon.core.types import Shard
from echelon.data.loader import Loader
from echelon.data.sources import ColumnSource
from echelon.loop.inference import _decoded
from echelon.task.losses import cross_entropy


def test_one_that_gets_hardly_any_samples_shows_as_many_as_others() -> None:
    source = ColumnSource({"x": torch.arange(40.0)[:, None], "y": torch.arange(40)})
    valid = Loader(source, seed=0, shuffle=False, shard=Shard(0, 2, (0.02, 0.98)))
    task = Task(nn.Identity(), cross_entropy, decode=lambda output: output[:, 0].tolist())
    shown = _decoded(valid, task, nn.Identity())
    assert [row["output"] for row in shown] == [str(number) for number in range(12)]
    assert [row["target"] for row in shown] == [str(number) for number in range(12)]

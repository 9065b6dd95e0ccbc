"""Warnings of the parameter-server strategy before training begins."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from echelon.comm.ps.layout import Layout
from echelon.core.config import ParameterServerSection, SyncSection
from echelon.core.types import Parallel
from echelon.strategy.parameter_server.strategy import OWN_STATISTICS, remarks

SMALL = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
PLAIN = nn.Linear(64, 64)


def told(model: nn.Module, *, tables: bool = False, local: bool = False, **section: Any) -> str:
    names, parameters = zip(*model.named_parameters(), strict=True)
    layout = Layout.of(names, parameters, [True] * len(names))
    servers = ParameterServerSection(**section)
    sync = SyncSection(batch_norm="local" if local else "synchronised")
    parallel = Parallel(servers=servers, sync=sync)
    return "\n".join(remarks(model, layout, parallel, tables=tables, held_out=100))


@pytest.mark.parametrize("dial", [{"staleness": None}, {"staleness": 2}, {"quorum": 2}])
def test_batch_norm_of_trainers_apart_is_of_their_own_samples(dial: dict[str, Any]) -> None:
    assert told(SMALL, **dial) == OWN_STATISTICS
    assert not told(SMALL, local=True, **dial)
    assert not told(PLAIN, **dial)
    assert not told(SMALL)


def test_servers_that_hold_nothing_are_counted() -> None:
    assert "servers = 9: the model is so small that 5 of them hold none" in told(SMALL, servers=9)
    assert not told(SMALL, servers=9, tables=True)
    assert not told(PLAIN, servers=9)


def test_fewer_held_out_samples_than_gradients_are_to_be_judged_by_are_told() -> None:
    words = "parameter_server.merit.samples = 128: there are 100 held-out samples, and"
    assert words in told(PLAIN, merit={"policy": "reject"})
    assert not told(PLAIN, merit={"policy": "weigh", "samples": 100})
    assert not told(PLAIN)

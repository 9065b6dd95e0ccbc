"""Rows of an embedding table: 10,000 of 64 numbers each pulled, and their gradients pushed.

The table has a million rows and row-wise adagrad; every exchange takes other rows, none twice.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from echelon.comm.ps.client import Servers
from echelon.comm.ps.layout import Layout
from echelon.comm.ps.rows import RemoteTables
from echelon.core.process import keep_freed_memory
from echelon.core.types import Lease, RowRule, RowSpec

from . import wire_echelon
from .wire_echelon import connected, rules_of

ROWS, WIDTH, BATCH, BATCHES = 1_000_000, 64, 10_000, 20
LR, EPS = 0.01, 1e-10


def serve(ready: Callable[[str], None]) -> None:
    keep_freed_memory()  # as the processes of a run do
    wire_echelon.serve(ready)


def batches() -> list[Tensor]:
    """Distinct ids in order, as a lookup of theirs leaves them."""
    generator = torch.Generator().manual_seed(0)
    shuffled = torch.randperm(ROWS, generator=generator)[: BATCH * BATCHES]
    return [part.sort().values for part in shuffled.split(BATCH)]


class Bare:
    """The torch calls alone: ids are places already, and everything lies in one process."""

    def __init__(self) -> None:
        keep_freed_memory()
        self._rows, self._squares = torch.randn(ROWS, WIDTH), torch.ones(ROWS)
        self._batches, self._at = batches(), 0
        self._out = torch.empty(BATCH, WIDTH)
        self._gradients = torch.full((BATCH, WIDTH), 1e-3)

    def exchange(self) -> None:
        ids = self._batches[self._at % BATCHES]
        self._at += 1
        torch.index_select(self._rows, 0, ids, out=self._out)
        squares = self._squares.index_select(0, ids).add_(self._gradients.square().mean(1))
        self._squares.index_copy_(0, ids, squares)
        steps = squares.sqrt_().add_(EPS).reciprocal_().mul_(-LR).unsqueeze_(1)
        self._rows.index_add_(0, ids, self._gradients * steps)

    def ask(self) -> None:
        """Nobody to ask."""

    def close(self) -> None:
        """Nothing to close."""


class Caller:
    """A trainer with a table and a small parameter beside it."""

    def __init__(self, where: str, plane: str) -> None:
        keep_freed_memory()
        self._servers: Servers = connected(where, plane)
        rule = RowRule(name="adagrad", lr=LR, eps=EPS)
        spec = RowSpec(name="rows", width=WIDTH, seed=0, rule=rule)
        self._servers.tables = RemoteTables([spec])
        self._rows = self._servers.tables.store(0)
        weight = nn.Parameter(torch.zeros(16))
        layout = Layout.of(["weight"], [weight], [True])
        tables = [spec.model_dump(mode="json")]
        assert self._servers.set_up(layout, rules_of("sgd") | {"tables": tables})
        self._rows.load(_filled())
        self._servers.upload({"model": {"weight": weight.detach()}, "version": 0})
        self._servers.enter(1, [0])
        self._version = self._servers.pull()
        self._batches = batches()
        self._gradients = torch.full((BATCH, WIDTH), 1e-3)

    def exchange(self) -> None:
        version = self._version
        ids = self._batches[version % BATCHES]
        self._rows.pull(ids)
        self._rows.push(ids, self._gradients)
        self._servers.push(Lease(0, version, version + 1), version, [1.0, 1.0, 1.0, 0.0, 0.01])
        outcome = self._servers.outcome()
        assert outcome.kind == "applied", outcome
        self._version = outcome.version

    def ask(self) -> None:
        self._servers.records(self._version)

    def close(self) -> None:
        self._servers.close()


def _filled() -> dict[str, Tensor]:
    return {
        "ids": torch.arange(ROWS),
        "rows": torch.randn(ROWS, WIDTH),
        "square": torch.ones(ROWS),
        "facts": torch.tensor([0, 0]),
    }

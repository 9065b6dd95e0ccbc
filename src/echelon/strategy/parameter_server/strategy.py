"""The parameter-server strategy: trainers compute gradients, servers make updates of them.

    trainer 0   forward ─ backward ─▶ slots ─┐ push                     ┌─▶ the new weights
    trainer 1   forward ─ backward ─▶ slots ─┤ push                     ├─▶ the new weights
    server                                   └▶ Σ grad / Σ weight, step ┘

A gradient is in its slot as soon as backward is done with it, and may be sent at once. How weights
and state get to the trainer is in connection.py, how gradients get into the slots in gradients.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from echelon.comm.ps.layout import Layout, Partition
from echelon.comm.ps.messages import Outcome
from echelon.core.errors import NonFiniteError, PeerError, TaskError, TrainingError
from echelon.core.interfaces import Inspector
from echelon.core.types import Ask, Batch, Lease, Parallel, Stats, Update
from echelon.data.ledger import edges
from echelon.data.sources import as_source
from echelon.strategy.all_reduce import left_alone
from echelon.strategy.base import NO_GRADIENT, Met, Synchronous
from echelon.strategy.batch_norm import synchronise, unsynchronise
from echelon.strategy.diagnose import agree, blame
from echelon.strategy.parameter_server.connection import Connected
from echelon.strategy.parameter_server.gradients import Filled, bend_back, straighten
from echelon.strategy.tables import lookups


class ParameterServer(Connected):
    """One trainer: computes gradients, pushes them, and takes the outcome.

    Trainers are in lockstep, or `apart` (bounded staleness, quorum, asynchronous): then each has
    versions, meetings and outcomes of its own.
    """

    _pushed = 0
    _coming: Sequence[Batch] = ()
    """The micro-batches of the next update, if they are known."""
    _straight: set[int]
    """Parameters whose gradients were computed in their slots."""
    _pass = -1
    """torch's number of the backward pass that makes the update's gradients. Others may run inside
    it: a model may call backward itself."""

    @property
    def foresees(self) -> bool:
        return bool(self._rows.tables) and hasattr(self.model, "lookups")

    def expect(self, micro: Sequence[Batch]) -> None:
        self._coming = micro

    def compute(self, micro: Sequence[Batch], *, backward: bool = True) -> Stats:
        self._refresh(begin=backward)
        return super().compute(micro, backward=backward)

    def update(self, lease: Lease | None = None) -> Update:
        self._comm.pulse(self.version + 1, "updating")
        self._hand_over()
        self._pace.end(self._weight)
        filled = self._filled = self._sum.filled(self._rows.gradients())
        self._rows.push(1.0, self.version + 1)
        if self._inspector is not None and self._inspector.due(self.version + 1):
            self._inspect(self._inspector)
        self._here.push(
            self._made_up() if lease is None else self._part_of(lease),
            self.version,
            self._judged(filled.row),
            finite=filled.finite and math.isfinite(filled.row[2]),
            square=filled.square,
            missing=filled.missing,
        )
        return self._concluded(self._here.outcome(), filled)

    def remarks(self) -> Sequence[str]:
        tables, valid = bool(self._rows.tables), self._task.valid
        held_out = 0 if valid is None else len(as_source(valid))
        return list(
            remarks(self.model, self._layout, self._parallel, tables=tables, held_out=held_out)
        )

    def let_go(self) -> None:
        bend_back(self.model)
        super().let_go()

    def _meet_gradients(self) -> None:
        super()._meet_gradients()
        bend_back(self.model)
        slots = self._servers is not None and not self._servers.sends
        if slots and self._early and not self._numerics.compile:
            straighten(self.model, self._parameters, self._slot, self._written)

    def _backward(self, loss_sum: Tensor) -> None:
        if self._early and self._open and loss_sum.requires_grad:
            loss_sum.register_hook(self._begins)
        super()._backward(loss_sum)

    def _begins(self, _: Tensor) -> None:
        """Note the number of the update's own backward pass."""
        self._pass = torch._C._current_graph_task_id()

    def _slot(self, at: int) -> Tensor | None:
        """Return the slot to compute a parameter's gradient in, or None if that is not possible.

        It is only if no part of the gradient is there yet, and this is the update's own backward.
        """
        parameter = self._parameters[at]
        if not self._open or self._given[at] or parameter.grad is not None:
            return None
        if torch._C._current_graph_task_id() != self._pass:
            return None
        return self._sum.room(at, parameter.dtype)

    def _written(self, at: int) -> None:
        self._sum.written(at)
        self._given[at] = True
        self._straight.add(at)

    def _ready(self, at: int, parameter: Tensor) -> None:
        if self._open and at in self._straight and parameter.grad is not None:
            self._sum.add(at, parameter.grad)
            parameter.grad = None
        else:
            super()._ready(at, parameter)

    def _known(self) -> None:
        """Ask for the rows of the next update, which arrive while this one's backward runs."""
        super()._known()
        self._straight = set()
        coming, self._coming = self._coming, ()
        if coming:
            self._tables.ahead.begin()
            for table in self._rows.tables:
                table.expect_nothing()
        for batch in coming:
            for table, ids in lookups(self._forward, self.model, batch):
                table.expect(ids)

    def _part_of(self, lease: Lease) -> Lease:
        """Return this trainer's part of a lease, as the loader divides it; it may be empty."""
        if self.apart:
            return lease
        index, count, size = self.shard.index, self.shard.count, lease.size
        if self.shard.shares:
            low, high = edges(size, self.shard.shares)[index : index + 2]
        else:
            low, high = size * index // count, size * (index + 1) // count
        return Lease(lease.epoch, lease.start + low, lease.start + high)

    def _made_up(self) -> Lease:
        """Return a lease for a push without one, of samples that no push had before."""
        self._pushed += 1
        at = self._pushed * self.shard.count + self.shard.index
        return Lease(0, at, at + 1)

    def _judged(self, row: Sequence[float]) -> Sequence[float]:
        """Return the push's row, with the gradient's merit if it is measured."""
        if self._judge is None or self._weight <= 0:
            return row
        return [*row, self._judge.merit(self._sum.found)]

    def _concluded(self, outcome: Outcome, filled: Filled) -> Update:
        """Return what the servers made of a push, and bind the new weights."""
        if outcome.kind == "void":
            raise PeerError(outcome.reason or "an update came too late for its generation")
        if self.apart:
            self._resting, self.share = bool(outcome.asked), round(outcome.share)
        if outcome.kind == "refused":
            return self._refused(outcome, filled)
        self._scaler.update(finite=True)
        # A repeated push that was applied before may come without sums.
        _, weight, loss_sum, asked, seconds = (outcome.row or tuple(filled.row))[:5]
        if self._pace.compare(seconds / self._peers.count) and self._balanced and not self.apart:
            self._comm.asked |= Ask.BALANCE
        self.version = outcome.version
        self._sum.end()
        self._bind()
        self._clear()
        return Update(
            committed=outcome.kind != "late",
            version=self.version,
            loss_sum=loss_sum,
            weight=weight,
            asked=outcome.asked or int(asked),
            staleness=outcome.staleness,
            peers=self._comm.count,
        )

    def _refused(self, outcome: Outcome, filled: Filled) -> Update:
        """Handle a refused update: in lockstep all trainers get the same outcome, and find out
        together which of them caused it."""
        if self.apart:
            return self._refused_alone(outcome, filled)
        missing = len(filled.missing) == len(self._parameters)
        _, weight, loss_sum, *_ = filled.row
        sums = self._peers.sum([weight, loss_sum, float(not filled.finite), float(not missing)])
        if not sums[3]:
            raise TaskError(NO_GRADIENT)
        if sums[0] <= 0:
            raise TaskError(f"step {self.version + 1}: the loss gave its batch a weight of 0")
        if not sums[2] and math.isfinite(sums[0] + sums[1]):
            raise TrainingError(
                f"step {self.version + 1}: the servers refused it: {outcome.reason}"
            )
        self._show_gradients(1.0)
        return self._refuse(Met(sums[1], sums[0], finite=False))

    def _refused_alone(self, outcome: Outcome, filled: Filled) -> Update:
        """Handle a refused update of a trainer that is apart.

        If its own push was fine, another trainer's in the same update was not: go on.
        """
        self.version, step = outcome.version, f"step {outcome.version + 1}"
        if len(filled.missing) == len(self._parameters):
            raise TaskError(NO_GRADIENT)
        if filled.row[1] <= 0:
            raise TaskError(f"{step}: the loss gave its batch a weight of 0")
        if filled.finite and math.isfinite(filled.row[2]):
            self._bind()
            self._clear()
            return Update(False, self.version, asked=outcome.asked)
        self._show_gradients(1.0)
        try:
            refused = self._refuse(Met(filled.row[2], filled.row[1], finite=False))
        except NonFiniteError as error:
            error.asked = outcome.asked
            raise
        self._bind()
        return refused._replace(asked=outcome.asked)

    def _inspect(self, inspector: Inspector) -> None:
        """Show the inspector this trainer's own gradients: only the servers have the sum."""
        divisor = self._filled.row[0]
        if divisor > 0:
            self._show_gradients(1 / divisor)
            super()._inspect(inspector)
            for parameter in self._parameters:
                parameter.grad = None

    def _show_gradients(self, scale: float) -> None:
        absent = set(self._filled.missing)
        for at, (parameter, slot) in enumerate(zip(self._parameters, self._sum.found, strict=True)):
            parameter.grad = None if at in absent else (slot * scale).to(parameter.device)

    def _explain(self) -> str:
        """Return why an update is not finite; in lockstep, after all trainers have agreed on it."""
        unsynchronise(self.model)
        words = Synchronous._explain(self)
        if self.apart:
            return words
        if self._lockstep:
            synchronise(self.model, self._peers, always=True)
        fault = 2 * blame(self._micro, self._loss_sum) + (not self._filled.finite)
        return agree(self._peers, words, fault)


# What a person should know before training begins

OWN_STATISTICS = (
    "batch norm sees each trainer's own samples, for trainers make updates apart, and all evaluate "
    "with the statistics of the first (sync.batch_norm: local says that this is meant)"
)


def remarks(
    model: nn.Module, layout: Layout, parallel: Parallel, *, tables: bool, held_out: int
) -> Iterator[str]:
    """Yield warnings about settings that have a surprising effect.

    `tables`: whether the servers hold rows, too; `held_out`: number of held-out samples.
    """
    section = parallel.servers
    if not section.together and parallel.sync.batch_norm == "synchronised" and _normalises(model):
        yield OWN_STATISTICS
    trained = [slot.name for slot in layout.slots]
    if skipped := left_alone(trained, parallel.sync.skip_init):
        yield (
            f"sync.skip_init: {skipped[0]!r} is trained"
            f"{f', and {len(skipped) - 1} more' if skipped[1:] else ''}: it lives on the servers, "
            f"the same for all, and begins as the first trainer made it"
        )
    partition = Partition(layout, section.servers)
    idle = sum(not partition.ranges(shard) for shard in range(section.servers))
    if idle and not tables:
        yield (
            f"parameter_server.servers = {section.servers}: the model is so small that {idle} of "
            f"them hold none of its weights"
        )
    wanted = section.merit.samples
    if section.merit.policy != "none" and wanted > held_out:
        yield (
            f"parameter_server.merit.samples = {wanted}: there are {held_out} held-out samples, "
            f"and gradients are judged by those"
        )


def _normalises(model: nn.Module) -> bool:
    return any(isinstance(module, _BatchNorm) for module in model.modules())

"""`Synchronous`: the base class of all strategies, for members that make every update together.

    compute:  forward ─▶ loss ─▶ (loss sum and weight are final) ─▶ backward     per micro-batch
    update:   reduce the gradients ─▶ finite? ─▶ clip ─▶ inspect ─▶ step
                                        └─ no ─▶ refuse: nothing is applied

A strategy overrides the hooks below "What a strategy overrides": where the parts of the model are,
and how gradients are reduced (`_meet`). The parameter-server strategy keeps `compute` and overrides
`update`, because the servers make the step.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from operator import is_not
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from echelon.core.errors import NonFiniteError, TaskError, TrainingError
from echelon.core.interfaces import Comm, Inspector, Metric, Schedule, Task
from echelon.core.types import Batch, Lease, Numerics, Parallel, Shard, Stats, Update
from echelon.optim import LossScaler, Stepper, build_optimizer, gradients, spare_compiler
from echelon.strategy.diagnose import explain
from echelon.strategy.model import (
    autocast,
    build_model,
    load_weights,
    moving_buffers,
    release,
    trainable,
)
from echelon.strategy.tables import RowUpdates

NO_GRADIENT = "no parameter got a gradient: does the loss depend on the model?"


class Synchronous(ABC):
    """A strategy whose gradient is Σ grad / Σ weight over all micro-batches and members."""

    shard = Shard()
    model: nn.Module
    whole = True
    alone = False
    remote = False
    apart = False
    _stepping = False

    def __init__(
        self,
        numerics: Numerics,
        schedule: Schedule,
        inspector: Inspector | None = None,
        parallel: Parallel | None = None,
    ) -> None:
        self._numerics = numerics
        self._schedule = schedule
        self._inspector = inspector
        self._parallel = parallel or Parallel()
        self._scaler = LossScaler(numerics.precision)
        self._autocast = autocast(numerics)
        self._micro: Sequence[Batch] = ()
        self._weight = 0.0
        self._loss_sum = torch.zeros(())
        self.version = 0

    def setup(self, task: Task, comm: Comm) -> None:
        self._comm = comm
        self._task = task
        self._forward, self._loss = task.forward, task.loss
        self._metrics = {n: m for n, m in task.metrics.items() if isinstance(m, Metric)}
        self.model = build_model(task, self._numerics)
        self._place()
        self._names, self._parameters = trainable(self.model)
        self._rows = self._open_rows()
        self._prepare_step()
        self._join()
        self._find_buffers()
        self.model.train()

    def compute(self, micro: Sequence[Batch], *, backward: bool = True) -> Stats:
        self._comm.pulse(self.version + 1, "computing" if backward else "evaluating")
        if not backward:
            return self._evaluate(micro)
        if not self.model.training:
            self.model.train()
        if self._buffers:  # forward moves batch statistics before the update is known to be finite
            self._keep_buffers()
        self._micro, self._loss_sum, self._weight = micro, torch.zeros(()), 0.0
        last = len(micro) - 1
        for at, batch in enumerate(micro):
            loss_sum, weight = self._loss_of(batch)
            seen = loss_sum.detach()
            self._loss_sum = seen if at == 0 else self._loss_sum + seen
            self._weight += weight
            if at == last:
                self._known()
            self._backward(loss_sum)
        if not micro:
            self._known()
        return Stats(self._loss_sum, self._weight, {})

    def update(self, lease: Lease | None = None) -> Update:  # noqa: ARG002 (all see the same)
        self._comm.pulse(self.version + 1, "updating")
        met = self._meet()
        if met.weight <= 0:
            raise TaskError(f"step {self.version + 1}: the loss gave its batch a weight of 0")
        if not met.finite or not math.isfinite(met.loss_sum):
            return self._refuse(met)
        self._scaler.update(finite=True)
        self._clip()
        if self._inspector is not None and self._inspector.due(self.version + 1):
            self._inspect(self._inspector)
        self._stepping = True
        factor = self._schedule.factor(self.version)
        self._stepper.step(factor)
        self._rows.push(factor, self.version + 1)
        self._applied()
        self._clear()
        self.version += 1
        self._stepping = False
        return Update(
            committed=True,
            version=self.version,
            loss_sum=met.loss_sum,
            weight=met.weight,
            asked=met.asked,
            peers=self._comm.count,
        )

    def total(self, stats: Stats) -> Stats:
        return stats

    def rejoin(self) -> None:
        raise TrainingError(f"{type(self).__name__} cannot go on with other members")

    def held(self) -> tuple[int, int] | None:
        return None

    def lend(self, holders: Any) -> None:  # noqa: ARG002
        raise TrainingError(f"{type(self).__name__} has nothing to lend")

    def balance(self) -> Sequence[float]:
        return [1.0]

    def observe(self, value: float) -> None:
        self._schedule.observe(value)

    def rate(self) -> float:
        return float(self._stepper.optimizer.param_groups[0]["lr"])

    def size(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())

    def remarks(self) -> Sequence[str]:
        return ()

    def state_dict(self) -> dict[str, Any]:
        return {
            "version": self.version,
            "model": self._weights(),
            "optimizer": self._optimizer_state(),
            "schedule": self._schedule.state_dict(),
            "scaler": self._scaler.state_dict(),
        }

    def healing(self) -> dict[str, Any]:
        return self.state_dict()

    def settle(self) -> bool:
        if self._stepping:  # interrupted: some parameters are an update ahead of others
            return False
        if self._micro:
            self._restore_buffers()
        self._clear()
        return True

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._load_weights(state["model"])
        self._load_optimizer_state(state["optimizer"])
        self._schedule.load_state_dict(state["schedule"])
        self._scaler.load_state_dict(state["scaler"])
        self.version = state["version"]

    def let_go(self) -> None:
        self._clear()
        release(self.model)

    def close(self) -> None:
        self.let_go()
        self._comm.close()

    # What a strategy overrides.

    def _place(self) -> None:  # noqa: B027 (not every strategy has to)
        """Called after the model is built: distribute it over the members."""

    def _open_rows(self) -> RowUpdates:
        rows = RowUpdates(self.model)
        if rows.tables:
            raise TaskError(
                f"table {rows.tables[0].name!r} keeps its rows in one place: "
                f"train it with strategy 'single' or 'parameter_server'"
            )
        return rows

    def _prepare_step(self) -> None:
        spare_compiler()
        self._stepper = Stepper(self._optimizer(), self.model.named_parameters())

    def _optimizer(self) -> Optimizer:
        if self._task.optimizer is None:
            return build_optimizer(self._numerics.optimizer, self.model)
        return self._task.optimizer(self._parameters)

    def _join(self) -> None:  # noqa: B027 (not every strategy has to)
        """Called after the optimizer is built: prepare the reduction of gradients."""

    def _known(self) -> None:  # noqa: B027 (not every strategy has to)
        """Called between the last forward pass and its backward: loss sum and weight are final."""

    @abstractmethod
    def _meet(self) -> Met:
        """Reduce: leave the mean gradient over all members' samples in every parameter's `grad`."""

    def _clip(self) -> None:
        clip, grads = self._numerics.clip, self._grads()
        if clip.norm is not None:
            gradients.clip_norm_(grads, clip.norm)
        elif clip.value is not None:
            gradients.clip_value_(grads, clip.value)

    def _applied(self) -> None:  # noqa: B027 (not every strategy has to)
        """Called after the optimizer's step."""

    def _weights(self) -> dict[str, Tensor]:
        return dict(self.model.state_dict())

    def _load_weights(self, weights: dict[str, Tensor]) -> None:
        load_weights(self.model, weights)

    def _optimizer_state(self) -> dict[str, Any]:
        return self._stepper.state_dict()

    def _load_optimizer_state(self, state: dict[str, Any]) -> None:
        self._stepper.load_state_dict(state)

    def _explain(self) -> str:
        """Return why this member's update is not finite."""
        table = self._rows.first_non_finite()
        return explain(self.model, self._forward, self._micro, self._loss_sum, self.version, table)

    # What all strategies have in common.

    def _grads(self) -> list[Tensor]:
        found = [p.grad for p in self._parameters if p.grad is not None]
        return found + self._rows.gradients() if self._rows.tables else found

    def _loss_of(self, batch: Batch) -> tuple[Tensor, float]:
        with self._autocast():
            return as_pair(self._loss(self._forward(self.model, batch), batch))

    def _backward(self, loss_sum: Tensor) -> None:
        if not loss_sum.requires_grad:
            raise TaskError(NO_GRADIENT)
        scale = self._scaler.scale
        (loss_sum if scale == 1.0 else loss_sum * scale).backward()

    @torch.inference_mode()
    def _evaluate(self, micro: Sequence[Batch]) -> Stats:
        if self.model.training:
            self.model.eval()
        loss_total = torch.zeros((), dtype=torch.float64)
        weight_total = 0.0
        totals: dict[str, Tensor] = {}
        for batch in micro:
            with self._autocast():
                output = self._forward(self.model, batch)
                loss_sum, weight = as_pair(self._loss(output, batch))
            loss_total += loss_sum.to("cpu", torch.float64).view(())
            weight_total += weight
            for name, metric in self._metrics.items():
                part = metric.measure(output, batch)
                totals[name] = totals[name] + part if name in totals else part
        return Stats(loss_total, weight_total, totals)

    def _inspect(self, inspector: Inspector) -> None:
        pairs = zip(self._names, self._parameters, strict=True)
        found = {name: (p.detach(), p.grad) for name, p in pairs if p.grad is not None}
        inspector.inspect(
            self.version + 1,
            {name: weight for name, (weight, _) in found.items()},
            {name: gradient for name, (_, gradient) in found.items()},
        )

    def _refuse(self, met: Met) -> Update:
        """Refuse a non-finite update: raise NonFiniteError, or try again with a smaller loss scale.

        The scale only explains gradients that are not finite: the loss does not depend on it.
        """
        reason = f"step {self.version + 1}: the loss gave its batch a weight of {met.weight}"
        if math.isfinite(met.weight):
            self._restore_buffers()
            with self._autocast():
                reason = self._explain()
        self._restore_buffers()
        self._clear()
        if not self._scaler.enabled or not math.isfinite(met.loss_sum + met.weight):
            raise NonFiniteError(reason)
        self._scaler.update(finite=False)
        if self._scaler.exhausted:
            raise NonFiniteError(reason)
        reason += f"; tried again with loss scale {self._scaler.scale:g}"
        return Update(committed=False, version=self.version, reason=reason)

    def _find_buffers(self) -> None:
        self._buffer_homes = moving_buffers(self.model)
        self._buffers = [held[name] for held, name in self._buffer_homes]
        self._kept = [buffer.clone() for buffer in self._buffers]

    def _keep_buffers(self) -> None:
        now = [held.get(name) for held, name in self._buffer_homes]
        if any(map(is_not, now, self._buffers)):  # a model may replace its buffers
            self._find_buffers()
        else:
            torch._foreach_copy_(self._kept, self._buffers)

    def _restore_buffers(self) -> None:
        if not self._buffers:
            return
        for (held, name), buffer in zip(self._buffer_homes, self._buffers, strict=True):
            held[name] = buffer
        torch._foreach_copy_(self._buffers, self._kept)

    def _clear(self) -> None:
        self._micro = ()
        self._rows.clear()
        for parameter in self._parameters:
            parameter.grad = None


class Met(NamedTuple):
    """The sums of one update over all members. The gradients are in each parameter's `grad`."""

    loss_sum: float
    weight: float
    finite: bool
    asked: int = 0


def as_pair(found: Any) -> tuple[Tensor, float]:
    """Check that a loss is a (sum, weight) pair: a tensor of one number, and a number."""
    try:
        loss_sum, weight = found
    except (TypeError, ValueError):
        raise TaskError(
            f"the loss gave {_described(found)}: it must give a pair, (sum over samples, weight)"
        ) from None
    if not isinstance(loss_sum, Tensor) or loss_sum.numel() != 1:
        raise TaskError(f"the loss gave {_described(loss_sum)} for its sum: it must be one number")
    return loss_sum, float(weight)


def _described(value: Any) -> str:
    shape = f" of shape {tuple(value.shape)}" if isinstance(value, Tensor) else ""
    return f"a {type(value).__name__}{shape}"


def as_factory(task: Task) -> Task:
    """Replace a ready model by a factory that copies it: a strategy may cut the copy into parts."""
    if isinstance(task.model, nn.Module):
        return dataclasses.replace(task, model=functools.partial(copy.deepcopy, task.model))
    return task

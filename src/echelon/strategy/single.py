"""One process, one model: the trajectory every synchronous strategy has to end on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from echelon.core.errors import NonFiniteError, TaskError
from echelon.core.protocols import Comm, Inspector, Metric, Schedule
from echelon.core.task import Task
from echelon.core.types import Batch, Numerics, Shard, Stats, Update
from echelon.optim import LossScaler, Stepper, build_optimizer, gradients, spare_compiler
from echelon.strategy.fault import explain
from echelon.strategy.replica import (
    autocast,
    build_model,
    load_weights,
    moving_buffers,
    release,
    trainable,
)


class Single:
    """Gradients are Σ grad / Σ weight over the micro-batches of an update."""

    shard = Shard()
    model: nn.Module

    def __init__(
        self, numerics: Numerics, schedule: Schedule, inspector: Inspector | None = None
    ) -> None:
        self._numerics = numerics
        self._schedule = schedule
        self._inspector = inspector
        self._scaler = LossScaler(numerics.precision)
        self._autocast = autocast(numerics)
        self._micro: Sequence[Batch] = ()
        self._weight = 0.0
        self._loss_sum = torch.zeros(())
        self.version = 0

    def setup(self, task: Task, comm: Comm) -> None:
        self._comm = comm
        self._forward, self._loss = task.forward, task.loss
        self._metrics = {n: m for n, m in task.metrics.items() if isinstance(m, Metric)}
        self.model = build_model(task, self._numerics)
        self._names, self._parameters = trainable(self.model)
        spare_compiler()
        if task.optimizer is None:
            optimizer = build_optimizer(self._numerics.optimizer, self.model)
        else:
            optimizer = task.optimizer(self._parameters)
        self._stepper = Stepper(optimizer, self.model.named_parameters())
        self._buffers = moving_buffers(self.model)
        self._kept = [buffer.clone() for buffer in self._buffers]
        self.model.train()

    def compute(self, micro: Sequence[Batch], *, backward: bool = True) -> Stats:
        if not backward:
            return self._evaluate(micro)
        if not self.model.training:
            self.model.train()
        if self._buffers:  # batch statistics move in forward, before the update is known to be good
            torch._foreach_copy_(self._kept, self._buffers)
        loss_sum, weight = self._add(micro[0])
        for batch in micro[1:]:
            more, more_weight = self._add(batch)
            loss_sum, weight = loss_sum + more, weight + more_weight
        self._micro, self._loss_sum, self._weight = micro, loss_sum, weight
        return Stats(loss_sum, weight, {})

    def update(self) -> Update:
        grads = [p.grad for p in self._parameters if p.grad is not None]
        if not grads:
            raise TaskError("no parameter got a gradient: does the loss depend on the model?")
        if self._weight <= 0:
            raise TaskError(f"step {self.version + 1}: the loss gave its batch a weight of 0")
        finite = gradients.finish_(grads, self._weight * self._scaler.scale)
        if not finite or not math.isfinite(self._loss_sum.item()):
            return self._refuse()
        self._scaler.update(finite=True)
        self._clip(grads)
        if self._inspector is not None and self._inspector.due(self.version + 1):
            self._inspect(self._inspector)
        self._stepper.step(self._schedule.factor(self.version))
        self._clear()
        self.version += 1
        return Update(committed=True, version=self.version)

    def rate(self) -> float:
        return float(self._stepper.optimizer.param_groups[0]["lr"])

    def state_dict(self) -> dict[str, Any]:
        return {
            "version": self.version,
            "model": dict(self.model.state_dict()),
            "optimizer": self._stepper.state_dict(),
            "schedule": self._schedule.state_dict(),
            "scaler": self._scaler.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        load_weights(self.model, state["model"])
        self._stepper.load_state_dict(state["optimizer"])
        self._schedule.load_state_dict(state["schedule"])
        self._scaler.load_state_dict(state["scaler"])
        self.version = state["version"]

    def close(self) -> None:
        self._clear()
        release(self.model)
        self._comm.close()

    def _add(self, batch: Batch) -> tuple[Tensor, float]:
        with self._autocast():
            loss_sum, weight = self._loss(self._forward(self.model, batch), batch)
        scale = self._scaler.scale
        (loss_sum if scale == 1.0 else loss_sum * scale).backward()
        return loss_sum.detach(), float(weight)

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
                loss_sum, weight = self._loss(output, batch)
            loss_total += loss_sum.to("cpu", torch.float64)
            weight_total += float(weight)
            for name, metric in self._metrics.items():
                part = metric.measure(output, batch)
                totals[name] = totals[name] + part if name in totals else part
        return Stats(loss_total, weight_total, totals)

    def _clip(self, grads: list[Tensor]) -> None:
        clip = self._numerics.clip
        if clip.norm is not None:
            gradients.clip_norm_(grads, clip.norm)
        elif clip.value is not None:
            gradients.clip_value_(grads, clip.value)

    def _inspect(self, inspector: Inspector) -> None:
        pairs = zip(self._names, self._parameters, strict=True)
        found = {name: (p.detach(), p.grad) for name, p in pairs if p.grad is not None}
        inspector.inspect(
            self.version + 1,
            {name: weight for name, (weight, _) in found.items()},
            {name: gradient for name, (_, gradient) in found.items()},
        )

    def _refuse(self) -> Update:
        """A non-finite update is never applied. A scaled one is worth another try."""
        self._restore_buffers()
        reason = explain(self.model, self._forward, self._micro, self._loss_sum, self.version)
        self._restore_buffers()
        self._clear()
        self._scaler.update(finite=False)
        if self._scaler.enabled and not self._scaler.exhausted:
            reason += f"; tried again with loss scale {self._scaler.scale:g}"
            return Update(committed=False, version=self.version, reason=reason)
        raise NonFiniteError(reason)

    def _restore_buffers(self) -> None:
        if self._buffers:
            torch._foreach_copy_(self._buffers, self._kept)

    def _clear(self) -> None:
        self._micro = ()
        for parameter in self._parameters:
            parameter.grad = None

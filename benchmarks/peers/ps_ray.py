"""A parameter server on Ray: one server actor, asynchronous trainer actors.

Arrays lie in Ray's shared memory: the server reads gradients there without a copy, and trainers
compute with the weights right where Ray has put them. All of a model is one object each way.
"""

from __future__ import annotations

import os
import warnings
from typing import Any

import numpy as np
import ray
import torch
from torch import Tensor

from .ps_job import LR, TRAINERS, Finding, Job, Ticks, loss_of

_SETTINGS = {
    "RAY_AUTH_MODE": "disabled",  # A session of our own, on loopback alone.
    "RAY_memory_monitor_refresh_ms": "0",  # Else it ends trainers when others fill the memory.
}
Arrays = list[np.ndarray]
_SHARED = 2_000_000_000
"""Bytes of shared memory: about forty times what is under way at once."""


def train(job: Job) -> Finding:
    os.environ.update(_SETTINGS)
    ray.init(
        num_cpus=TRAINERS + 1,
        include_dashboard=False,
        object_store_memory=_SHARED,
        log_to_driver=False,
        logging_level="error",
    )
    try:
        server = ray.remote(Server).remote(job)
        trainers = [ray.remote(Trainer).remote(job, number) for number in range(TRAINERS)]
        ray.get([trainer.run.remote(server) for trainer in trainers])
        return Finding(job.rate(), ray.get(server.loss.remote()))
    finally:
        ray.shutdown()


class Server:
    """Holds the weights; calls come one at a time, as to every actor."""

    def __init__(self, job: Job) -> None:
        torch.set_num_threads(1)
        self._work = job.work()
        self._weights = [parameter.detach() for parameter in self._work.model().parameters()]

    def push_pull(self, gradients: Arrays) -> Arrays:
        torch._foreach_add_(self._weights, _tensors(gradients), alpha=-LR)
        return self.pull()

    def pull(self) -> Arrays:
        return [weight.numpy() for weight in self._weights]

    def loss(self) -> float:
        return loss_of(self._work, self._weights)


class Trainer:
    """Makes its steps in one call, talking to the server by itself."""

    def __init__(self, job: Job, number: int) -> None:
        torch.set_num_threads(1)
        self._job, self._number = job, number
        self._work = job.work()
        self._model = self._work.model().train()

    def run(self, server: Any) -> None:
        ticks, batches = Ticks(self._job.ticks), self._job.batches(self._number)
        self._job.meet(self._number)
        self._use(ray.get(server.pull.remote()))
        for x, y in batches:
            ticks.tick()
            self._model.zero_grad(set_to_none=True)
            self._work.loss(self._model(x), y).backward()
            self._use(ray.get(server.push_pull.remote(self._gradients())))

    def _gradients(self) -> Arrays:
        gradients = (parameter.grad for parameter in self._model.parameters())
        return [gradient.numpy() for gradient in gradients if gradient is not None]

    def _use(self, weights: Arrays) -> None:
        for parameter, weight in zip(self._model.parameters(), _tensors(weights), strict=True):
            parameter.data = weight


def _tensors(arrays: Arrays) -> list[Tensor]:
    """Without a copy; torch warns that they are read-only, which they stay."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [torch.from_numpy(array) for array in arrays]

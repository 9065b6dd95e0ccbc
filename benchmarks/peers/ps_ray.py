"""A parameter server on Ray: one server actor, asynchronous trainer actors.

Arrays lie in Ray's shared memory: the server reads gradients there without a copy, and trainers
compute with the weights right where Ray has put them. The whole model is one array each way.
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

_SHARED = 2_000_000_000
"""Bytes of shared memory: about forty times what is under way at once."""


def train(job: Job) -> Finding:
    os.environ["RAY_AUTH_MODE"] = "disabled"  # A session of our own, on loopback alone.
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
        parts = [parameter.detach().flatten() for parameter in self._work.model().parameters()]
        self._weights = torch.cat(parts)

    def push_pull(self, gradient: np.ndarray) -> np.ndarray:
        self._weights.add_(_tensor(gradient), alpha=-LR)
        return self._weights.numpy()

    def pull(self) -> np.ndarray:
        return self._weights.numpy()

    def loss(self) -> float:
        return loss_of(self._work, _views(self._weights, list(self._work.model().parameters())))


class Trainer:
    """Makes its steps in one call, talking to the server by itself."""

    def __init__(self, job: Job, number: int) -> None:
        torch.set_num_threads(1)
        self._job, self._number = job, number
        self._work = job.work()
        self._model = self._work.model().train()
        self._parameters = list(self._model.parameters())

    def run(self, server: Any) -> None:
        flat = torch.cat([parameter.detach().flatten() for parameter in self._parameters])
        gradient = _views(flat, self._parameters)
        ticks, batches = Ticks(self._job.ticks), self._job.batches(self._number)
        self._job.meet(self._number)
        self._use(ray.get(server.pull.remote()))
        for x, y in batches:
            ticks.tick()
            self._model.zero_grad(set_to_none=True)
            self._work.loss(self._model(x), y).backward()
            torch._foreach_copy_(gradient, self._gradients())
            self._use(ray.get(server.push_pull.remote(flat.numpy())))

    def _gradients(self) -> list[Tensor]:
        return [parameter.grad for parameter in self._parameters if parameter.grad is not None]

    def _use(self, weights: np.ndarray) -> None:
        views = _views(_tensor(weights), self._parameters)
        for parameter, view in zip(self._parameters, views, strict=True):
            parameter.data = view


def _tensor(array: np.ndarray) -> Tensor:
    """Without a copy; torch warns that it is read-only, which it stays."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.from_numpy(array)


def _views(flat: Tensor, parameters: list[torch.nn.Parameter]) -> list[Tensor]:
    parts = flat.split([parameter.numel() for parameter in parameters])
    return [part.view_as(like) for part, like in zip(parts, parameters, strict=True)]

"""A parameter server on torch.distributed.rpc: one server, asynchronous trainers.

A step is one call: gradients there, new weights back, all tensors of the model in one message and
none of them copied by hand. Trainers compute with the tensors that came; the server answers with
the very ones that it updates, without a lock (hogwild): nothing it could do would be less.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed.rpc as rpc
from torch import Tensor
from torch.multiprocessing.spawn import spawn

from .ps_job import LR, TRAINERS, Finding, Job, Ticks, loss_of

CHOICES: dict[str, dict[str, Any]] = {
    "default": {},
    "cma": {"_transports": ["uv"], "_channels": ["cma", "basic"]},
}
"""How tensors travel: as torch chooses, or read from the other's memory by one system call."""
_SERVER = "server"
_SERVING = 4
"""Threads that answer; two trainers never need more than two of them."""
_weights: list[Tensor] = []
"""The server's: functions called from elsewhere have no other place for them."""


def train(job: Job, choice: str = "default") -> Finding:
    spawn(_process, (job, choice), TRAINERS + 1)
    return Finding(job.rate(), float((job.folder / "loss").read_text()))


def push_pull(gradients: list[Tensor]) -> list[Tensor]:
    torch._foreach_add_(_weights, gradients, alpha=-LR)
    return _weights


def pull() -> list[Tensor]:
    return _weights


def _process(rank: int, job: Job, choice: str) -> None:
    torch.set_num_threads(1)
    work = job.work()
    if rank == 0:
        _weights.extend(parameter.detach() for parameter in work.model().parameters())
    rpc.init_rpc(
        f"trainer{rank}" if rank else _SERVER,
        rank=rank,
        world_size=TRAINERS + 1,
        rpc_backend_options=rpc.TensorPipeRpcBackendOptions(
            num_worker_threads=_SERVING,
            init_method=f"file://{job.folder}/meeting",
            **CHOICES[choice],
        ),
    )
    if rank > 0:
        _trainer(rank - 1, job)
    rpc.shutdown()
    if rank == 0:
        (job.folder / "loss").write_text(str(loss_of(work, _weights)))


def _trainer(number: int, job: Job) -> None:
    work = job.work()
    model = work.model().train()
    parameters = list(model.parameters())
    ticks, batches = Ticks(job.ticks), job.batches(number)
    job.meet(number)
    _use(parameters, rpc.rpc_sync(_SERVER, pull))
    for x, y in batches:
        ticks.tick()
        model.zero_grad(set_to_none=True)
        work.loss(model(x), y).backward()
        gradients = [parameter.grad for parameter in parameters]
        _use(parameters, rpc.rpc_sync(_SERVER, push_pull, (gradients,)))


def _use(parameters: list[torch.nn.Parameter], weights: list[Tensor]) -> None:
    for parameter, weight in zip(parameters, weights, strict=True):
        parameter.data = weight

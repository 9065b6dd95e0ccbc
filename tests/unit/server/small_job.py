"""A small job with known gradients: `Job` trains it on servers, `Alone` in one process."""

from __future__ import annotations

import base64
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from echelon.comm.ps.client import Servers
from echelon.comm.ps.layout import Layout
from echelon.comm.ps.messages import Outcome
from echelon.core.config import OptimizerSection
from echelon.core.types import Lease
from echelon.optim import Stepper, build_optimizer
from echelon.optim.build import penalised

SHAPES = ((60, 50), (50,), (), (7, 60), (7,))
NAMES = tuple(f"layer.{at}" for at in range(len(SHAPES)))
SAMPLES = 4
"""Samples of each push."""


def weights(seed: int = 0, shapes: Sequence[tuple[int, ...]] = SHAPES) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def gradients(step: int, member: int, shapes: Sequence[tuple[int, ...]] = SHAPES) -> list[Tensor]:
    return weights(1000 * (step + 1) + member, shapes)


def rules(section: OptimizerSection, **more: Any) -> dict[str, Any]:
    plain = section.model_dump(mode="json")
    return {"optimizer": plain, "staleness": 0, "quorum": "all", "samples": 1 << 20, **more}


class Job:
    """One trainer of the job."""

    def __init__(
        self,
        servers: Servers,
        member: int,
        section: OptimizerSection | None = None,
        shapes: Sequence[tuple[int, ...]] = SHAPES,
        **more: Any,
    ) -> None:
        self.servers, self.member, self.shapes = servers, member, shapes
        self.section = section or OptimizerSection(name="sgd", lr=0.1)
        parameters = [nn.Parameter(w) for w in weights(shapes=shapes)]
        flags = penalised(self.section, parameters)
        names = [f"layer.{at}" for at in range(len(shapes))]
        self.layout = Layout.of(names, parameters, flags)
        self.rules = rules(self.section, **more)
        self.version = 0

    def begin(self, generation: int, members: Sequence[int]) -> None:
        """Set the servers up and pull; the first trainer uploads the weights, the others wait."""
        first = self.member == members[0]
        while self.servers.set_up(self.layout, self.rules):
            if first:
                self.upload()
                break
            time.sleep(0.01)
        self.servers.enter(generation, members)
        self.version = self.servers.pull()

    def upload(self) -> None:
        names = [slot.name for slot in self.layout.slots]
        model = dict(zip(names, weights(shapes=self.shapes), strict=True))
        self.servers.upload({"model": model, "version": 0})

    def fill(self, step: int) -> None:
        torch._foreach_copy_(self.servers.slots, gradients(step, self.member, self.shapes))

    def push(self, step: int, lease: Lease | None = None, **more: Any) -> None:
        """Push; by default samples that no other push has."""
        if lease is None:
            start = (1000 * self.member + step) * SAMPLES
            lease = Lease(0, start, start + SAMPLES)
        row = [float(lease.size), float(lease.size), 1.0, 0.0, 0.01]
        self.servers.push(lease, self.version, row, **more)

    def step(self, step: int, *, early: bool = False, **more: Any) -> Outcome:
        self.fill(step)
        if early:
            for at in reversed(range(len(self.shapes))):
                self.servers.ready(at)
        self.push(step, **more)
        outcome = self.servers.outcome()
        if outcome.weights:
            self.version = outcome.version
        return outcome

    def weights(self) -> str:
        return text_of(self.servers.weights)


def begin_together(job: Job, trainers: int) -> None:
    """Begin as a strategy does: all trainers are set up before the first one uploads weights."""
    assert job.servers.set_up(job.layout, job.rules), "all shards are empty"
    Path(f"{job.member}-ready").touch()
    await_files(*(f"{member}-ready" for member in range(trainers)))
    if job.member == 0:
        job.upload()
        Path("uploaded").touch()
    await_files("uploaded")
    job.servers.enter(1, range(trainers))
    job.version = job.servers.pull()


def await_files(*names: str) -> None:
    """Wait for files, by which trainers and tests give each other signs."""
    while not all(Path(name).exists() for name in names):
        time.sleep(0.0005)


class Alone:
    """The same job in one process."""

    def __init__(
        self,
        section: OptimizerSection | None = None,
        shapes: Sequence[tuple[int, ...]] = SHAPES,
    ) -> None:
        self.section, self.shapes = section or OptimizerSection(name="sgd", lr=0.1), shapes
        self.model = nn.ParameterList([nn.Parameter(w) for w in weights(shapes=shapes)])
        optimizer = build_optimizer(self.section, self.model)
        self._stepper = Stepper(optimizer, self.model.named_parameters())

    def step(self, pushes: Sequence[tuple[int, int]], *, clip: float | None = None) -> None:
        """Make an update with the gradients of these (step, member) pairs."""
        found = [gradients(step, member, self.shapes) for step, member in pushes]
        for at, parameter in enumerate(self.model):
            total = torch.stack([push[at] for push in found]).sum(0)
            parameter.grad = total / (SAMPLES * len(pushes))
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(self.model, clip)
        self._stepper.step(1.0)

    def weights(self) -> str:
        return text_of([parameter.detach() for parameter in self.model])


def text_of(tensors: Sequence[Tensor]) -> str:
    """Return the bits of all values, as text."""
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    return base64.b64encode(flat.numpy().tobytes()).decode()


def close(found: str, expected: str, tolerance: float = 1e-5) -> bool:
    mine, theirs = (
        torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.float32)
        for text in (found, expected)
    )
    return torch.allclose(mine, theirs, rtol=tolerance, atol=tolerance)

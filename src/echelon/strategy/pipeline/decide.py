"""Which layers make which stage: decided by member 0, told to all."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import nn

from echelon.comm.interface import Collective
from echelon.core.config.sections import PipelineSection
from echelon.core.errors import ConfigError, TaskError
from echelon.core.interfaces import Task
from echelon.core.types import Batch
from echelon.data.batch import to_device
from echelon.strategy.pipeline.chain import find_layers
from echelon.strategy.pipeline.cost import measure, traceless
from echelon.strategy.pipeline.entrance import entrance
from echelon.strategy.pipeline.split import balanced, by_names

INTERLEAVED = 2
"""Stages of each member where they are interleaved."""

Autocast = Callable[[], AbstractContextManager[object]]


@dataclass(frozen=True, slots=True)
class Cut:
    """The layers by name, and which of them each stage begins with."""

    layers: tuple[str, ...]
    starts: tuple[int, ...]

    @property
    def stages(self) -> list[tuple[str, ...]]:
        ends = [*self.starts[1:], len(self.layers)]
        return [self.layers[start:end] for start, end in zip(self.starts, ends, strict=True)]


def decide(
    model: nn.Module,
    task: Task,
    section: PipelineSection,
    members: int,
    world: Collective,
    autocast: Autocast,
    samples: int,
) -> Cut:
    """Collective. What is wrong is found by member 0, and raised there.

    Layers are timed with as many samples as a micro-batch has: some take longer for each sample,
    some (a large table's gradient) whatever their number.
    """
    stages = stage_count(section, members)
    if world.index == 0:
        batch = first_samples(task, samples, next(model.parameters()).device)
        return _told(model, world, _chosen(model, task, section, stages, autocast, batch))
    return _told(model, world, None)


def stage_count(section: PipelineSection, members: int) -> int:
    """A split that is given says how many; it has to fit the members and the schedule."""
    interleaved = section.schedule == "interleaved_1f1b"
    if not section.split:
        return members * (INTERLEAVED if interleaved else 1)
    stages = len(section.split) + 1
    fits = stages % members == 0 if interleaved else stages == members
    if not fits:
        rule = f"a multiple of {members} stages" if interleaved else f"{members} stages"
        raise ConfigError(
            f"pipeline.split names {len(section.split)} layers, which makes {stages} stages; "
            f"schedule {section.schedule!r} with {members} members needs {rule}",
            ("pipeline", "split"),
        )
    return stages


def _chosen(
    model: nn.Module,
    task: Task,
    section: PipelineSection,
    stages: int,
    autocast: Autocast,
    batch: Batch,
) -> Cut:
    with traceless(model):
        layers = find_layers(model, lambda whole: task.forward(whole, batch))
        x = entrance(task.forward, batch)
        if len(layers) < stages:
            raise ConfigError(
                f"{stages} stages are more than the {len(layers)} layers of "
                f"{type(model).__name__} ({', '.join(layers)})",
                ("mesh", "pipeline"),
            )
        if section.split:
            return Cut(tuple(layers), tuple(by_names(layers, section.split)))
        costs = measure([model.get_submodule(name) for name in layers], x, autocast)
        return Cut(tuple(layers), tuple(balanced(costs, stages)))


def first_samples(task: Task, count: int, device: torch.device) -> Batch:
    if task.train is None or not len(task.train):
        raise TaskError("strategy 'pipeline' tries the model on training samples: there are none")
    rows = torch.arange(min(count, len(task.train)))
    batch: Batch = to_device(task.train.gather(rows), device)
    return batch


def _told(model: nn.Module, world: Collective, chosen: Cut | None) -> Cut:
    """Layers travel as their numbers among all modules: everybody built the same model."""
    names = [name for name, _ in model.named_modules()]
    mine = [] if chosen is None else [len(chosen.layers), len(chosen.starts)]
    layers, stages = map(int, world.sum(mine or [0, 0]))
    numbers = torch.zeros(layers + stages, dtype=torch.int64)
    if chosen is not None:
        numbers[:layers] = torch.tensor([names.index(layer) for layer in chosen.layers])
        numbers[layers:] = torch.tensor(chosen.starts)
    world.broadcast_([numbers])
    found = numbers.tolist()
    return Cut(tuple(names[at] for at in found[:layers]), tuple(found[layers:]))

"""Trainers whose weights live on servers end where one process ends."""

from __future__ import annotations

import copy
from typing import Any, Literal

import pytest
import torch
from torch import nn

from echelon.core.config import (
    ClipSection,
    OptimizerSection,
    ParameterServerSection,
    ScheduleSection,
    SyncSection,
)
from echelon.core.errors import NonFiniteError, PeerError
from echelon.core.types import Parallel

from . import networks, trained
from .jobs import difference, strategy, weights
from .serving import Served, alone, run

pytestmark = pytest.mark.timeout(300)

OPTIMIZERS = {
    "sgd": OptimizerSection(name="sgd", lr=0.1, l2=1e-3),
    "momentum": OptimizerSection(name="momentum", lr=0.05, weight_decay=0.1),
    "nesterov": OptimizerSection(name="nesterov", lr=0.05),
    "adagrad": OptimizerSection(name="adagrad", lr=1e-2, eps=1e-5),
    "rmsprop": OptimizerSection(name="rmsprop", lr=1e-3, momentum=0.5, eps=1e-4),
    "adam": OptimizerSection(name="adam", lr=1e-2, eps=1e-5),
    "adamw": OptimizerSection(name="adamw", lr=1e-2, eps=1e-5, weight_decay=0.1, l1=1e-3),
}
ADAPTIVE = {"adagrad", "rmsprop", "adam", "adamw"}
"""A step of theirs is as long for a small gradient as for a large one, and so for mere rounding."""
Plane = Literal["auto", "memory", "tcp"]
CLIPS = (ClipSection(), ClipSection(norm=0.05), ClipSection(value=0.01))
CASES = [
    (network, optimizer, CLIPS[at % 3], 1 + at % 2, ("constant", "cosine")[at % 2])
    for at, (network, optimizer) in enumerate(
        [("mlp", optimizer) for optimizer in OPTIMIZERS]
        + [("gpt64" if optimizer in ADAPTIVE else "gpt", optimizer) for optimizer in OPTIMIZERS]
    )
]


def train(
    case: tuple[Any, ...], comm: Served | None = None, plane: Plane = "auto"
) -> dict[str, torch.Tensor]:
    network, optimizer, clip, micro, schedule = case
    built = strategy(
        "single" if comm is None else "parameter_server",
        networks.task(network),
        optimizer=OPTIMIZERS[optimizer],
        clip=clip,
        micro=micro,
        schedule=ScheduleSection(name=schedule),
        comm=comm,
        parallel=Parallel(servers=ParameterServerSection(plane=plane)),
    )
    index, count = (0, 1) if comm is None else (comm.index, comm.count)
    for batch in networks.batches(network):
        built.compute(networks.part(batch, index, count, micro))
        assert built.update().committed
    return trained.weights(built)


@pytest.mark.parametrize(
    ("count", "servers", "plane"),
    [(2, 1, "tcp"), (2, 2, "memory"), (4, 1, "memory"), (4, 2, "tcp")],
)
def test_ends_on_the_weights_of_one_process(count: int, servers: int, plane: Plane) -> None:
    cases = CASES if (count, servers) == (2, 2) else CASES[: len(OPTIMIZERS)]
    expected = {case: train(case) for case in cases}

    def work(group: Served) -> dict[str, float]:
        found = {}
        for case in cases:
            group.next()
            found["{} {}".format(*case)] = difference(train(case, group, plane), expected[case])
        return found

    found = run(count, servers, work, times=len(cases))
    assert all(apart <= networks.limit(job.split()[0]) for job, apart in found.items()), found


def test_batch_norm_evaluation_and_checkpoints_are_those_of_one_process() -> None:
    """Half of the way alone, the rest with servers, and the other way round."""
    case = ("cnn64", "adamw", CLIPS[1], 1, "constant")
    whole, first = _half(case, None, 20), _half(case, None, 10)

    def work(group: Served) -> dict[str, float]:
        group.next()
        second = _half(case, group, 10, first["state"], slice(10, 20))
        group.next()
        begun = _half(case, group, 10)
        found = {"resumed": difference(second["weights"], whole["weights"])}
        found["seen"] = abs(second["loss"] - whole["loss"])
        if group.index == 0:
            ended = _half(case, None, 10, begun["state"], slice(10, 20))
            found["taken over"] = difference(ended["weights"], whole["weights"])
        return found

    found = run(2, 2, work, times=2)
    assert max(found.values()) <= 1e-5, found
    assert len(found) == 3


def _half(
    case: tuple[Any, ...],
    comm: Served | None,
    count: int,
    state: dict[str, Any] | None = None,
    which: slice = slice(None),
) -> dict[str, Any]:
    network, optimizer, clip, micro, _ = case
    name = "single" if comm is None else "parameter_server"
    chosen = {"optimizer": OPTIMIZERS[optimizer], "clip": clip, "micro": micro, "comm": comm}
    built = strategy(name, networks.task(network), **chosen)
    if state is not None:
        built.load_state_dict(copy.deepcopy(state))
        if comm is not None:
            comm.collective().barrier()  # as a run's members meet after loading
    index, parts = (0, 1) if comm is None else (comm.index, comm.count)
    for batch in networks.batches(network)[which][:count]:
        built.compute(networks.part(batch, index, parts, micro))
        assert built.update().committed
    last = networks.batches(network)[0]
    stats = built.total(built.compute(networks.part(last, index, parts), backward=False))
    found = copy.deepcopy(built.state_dict())
    return {"weights": found["model"], "state": found, "loss": float(stats.loss_sum)}


class Odd(nn.Module):
    """Frozen, unused and tied parameters."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.frozen = nn.Linear(6, 8).requires_grad_(False)
        self.unused = nn.Linear(3, 3)
        self.one = nn.Linear(8, 8)
        self.other = nn.Linear(8, 8)
        self.other.weight = self.one.weight
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(torch.tanh(self.other(torch.tanh(self.one(self.frozen(x))))))


def test_frozen_unused_and_tied_parameters_are_as_in_one_process() -> None:
    def odd(comm: Served | None) -> dict[str, torch.Tensor]:
        task = networks.task("mlp")
        task.model = Odd
        name = "single" if comm is None else "parameter_server"
        built = strategy(name, task, optimizer=OPTIMIZERS["adamw"], comm=comm)
        index, parts = (0, 1) if comm is None else (comm.index, comm.count)
        for batch in networks.batches("mlp")[:8]:
            built.compute(networks.part(batch, index, parts))
            assert built.update().committed
        return trained.weights(built)

    expected = odd(None)
    assert run(2, 2, lambda group: difference(odd(group), expected)) <= 1e-5


def test_an_update_that_is_not_finite_in_one_trainer_is_refused_by_all() -> None:
    def work(group: Served) -> list[str]:
        built = strategy("parameter_server", networks.task("mlp"), comm=group)
        before = weights(built)
        batch = dict(networks.part(networks.batches("mlp")[0], group.index, group.count)[0])
        if group.index == 1:
            batch["x"] = torch.full_like(batch["x"], float("nan"))  # type: ignore[arg-type]
        built.compute([batch])
        with pytest.raises(NonFiniteError) as caught:
            built.update()
        assert difference(weights(built), before) == 0
        built.compute(networks.part(networks.batches("mlp")[1], group.index, group.count))
        return [str(caught.value), str(built.update().version)]

    said, version = run(2, 2, work)
    assert said == "step 1: the loss is nan: input column 'x' is not finite (member 1)"
    assert version == "1"


@pytest.mark.parametrize(
    ("staleness", "held"), [(None, "pinned"), (0, "pinned"), (2, "pinned"), (None, "live")]
)
def test_one_trainer_apart_is_one_process(
    staleness: int | None, held: Literal["pinned", "live"]
) -> None:
    section = ParameterServerSection(staleness=staleness, quorum=1, weights=held)
    case = ("mlp", "adam", ClipSection(norm=0.05), 2, "cosine")
    expected = train(case)
    comm = alone(2)
    built = strategy(
        "parameter_server",
        networks.task("mlp"),
        optimizer=OPTIMIZERS["adam"],
        clip=case[2],
        micro=2,
        schedule=ScheduleSection(name="cosine"),
        comm=comm,
        parallel=Parallel(servers=section),
    )
    for batch in networks.batches("mlp"):
        built.compute(networks.part(batch, 0, 1, 2))
        done = built.update()
        assert (done.committed, done.staleness) == (True, 0)
    assert difference(trained.weights(built), expected) <= 1e-5


def test_trainers_apart_make_the_updates_that_one_process_makes_of_their_old_gradients() -> None:
    def work(group: Served) -> list[float]:
        task, batches, peers = networks.task("mlp"), networks.batches("mlp"), group.collective()
        section = ParameterServerSection(staleness=None)
        momentum = OptimizerSection(name="momentum", lr=0.05)
        parallel = Parallel(servers=section)
        built: Any = strategy(
            "parameter_server", task, optimizer=momentum, comm=group, parallel=parallel
        )
        history = [[p.detach().clone() for p in built.model.parameters()]]
        places = [0.0] * (2 * len(batches))
        for at in range(group.index, len(batches) - len(batches) % 2, 2):
            built.compute([batches[at]])
            peers.barrier()  # both have the same weights, and one is too late for them
            based, done = built.version, built.update()
            places[2 * at : 2 * at + 2] = [based, based + done.staleness + 1]
        places = peers.sum(places)
        built.pull()
        pairs = [(int(places[2 * at + 1]), int(places[2 * at]), at) for at in range(len(batches))]
        final = [p.detach().clone() for p in built.model.parameters()]
        return [*_replayed(task, batches, sorted(pairs), history, final)]

    difference, oldest = run(2, 2, work)
    assert oldest >= 1
    assert difference <= 1e-5


def _replayed(
    task: Any, batches: Any, pairs: Any, history: list[list[torch.Tensor]], final: Any
) -> tuple[float, int]:
    """How far away the same updates end, made in turn; how old the oldest gradient was."""
    model, oldest = task.model(), 0
    parameters = list(model.parameters())
    speed = [torch.zeros_like(p) for p in parameters]
    for made, based, at in (pair for pair in pairs if pair[0]):
        for parameter, held in zip(parameters, history[based], strict=True):
            parameter.data = held
        loss_sum, weight = task.loss(task.forward(model, batches[at]), batches[at])
        grads = torch.autograd.grad(loss_sum / weight, parameters)
        for buffer, grad in zip(speed, grads, strict=True):
            buffer.mul_(0.9).add_(grad)
        now = [w - 0.05 * buffer for w, buffer in zip(history[-1], speed, strict=True)]
        history.append(now)
        oldest = max(oldest, made - 1 - based)
    ends = zip(history[-1], final, strict=True)
    return max(float((a - b).norm() / b.norm()) for a, b in ends), oldest


def test_what_is_trained_begins_as_the_first_made_it_and_only_the_rest_can_be_left_alone() -> None:
    def work(group: Served) -> list[Any]:
        task = networks.task("mlp")
        make = task.model

        def different() -> nn.Module:
            model = make()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.fill_(float(group.index + 1))
            model.get_parameter("2.weight").requires_grad_(False)
            return model

        task.model = different
        parallel = Parallel(sync=SyncSection(skip_init=("0.*", "2.weight")))
        built = strategy("parameter_server", task, parallel=parallel, comm=group)
        sums = torch.stack([p.detach().mean() for p in built.model.parameters()])
        group.collective().sum_(sums)
        return [sums.tolist(), *built.remarks()]

    sums, remark = run(2, 1, work)
    assert sums == [2.0, 2.0, 2.0, 2.0, 3.0, 2.0]
    assert remark.startswith("sync.skip_init: '0.0.weight' is trained, and 1 more: it lives on")


def test_servers_hear_of_a_plateau_from_whoever_is_left_and_only_once() -> None:
    def work(group: Served) -> dict[str, Any]:
        plateau = ScheduleSection(name="plateau", patience=0, factor=0.5)
        built: Any = strategy("parameter_server", comm=group, schedule=plateau)
        for value in (1.0, 2.0):
            built.observe(value)
        group.collective().barrier()
        if group.index:  # the first one is lost meanwhile
            built.observe(3.0)
        group.collective().barrier()
        return dict(built._here.state()["schedule"])

    assert run(2, 1, work) == {"level": 0.25, "best": 1.0, "waited": 0}


def test_servers_that_could_not_hear_of_a_plateau_are_told_when_members_have_met() -> None:
    def work(group: Served) -> dict[str, Any]:
        plateau = ScheduleSection(name="plateau", patience=0, factor=0.5)
        built: Any = strategy("parameter_server", comm=group, schedule=plateau)
        built.observe(1.0)
        heard, built._servers.observe = built._servers.observe, _lost
        with pytest.raises(PeerError, match="a server is lost"):
            built.observe(2.0)
        built._servers.observe = heard
        before = dict(built._here.state()["schedule"])
        built.pull()  # as whoever goes on with others does
        assert before == {"level": 1.0, "best": 1.0, "waited": 0}
        return dict(built._here.state()["schedule"])

    assert run(1, 1, work) == {"level": 0.5, "best": 1.0, "waited": 0}


def _lost(_schedule: object) -> None:
    raise PeerError("a server is lost")

"""Members that hold a part each of optimizer, gradients or weights end where one process ends."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from echelon.comm.group import Group
from echelon.core.config import SyncSection
from echelon.core.config.sections import ShardedSection
from echelon.core.interfaces import Task
from echelon.core.types import Ask, Parallel, Stats
from echelon.loop.build import kind

from . import members, networks
from .jobs import cut, difference, steps, strategy
from .levels import LEVELS, apart, arranged, built
from .trained import ADAM, CASE, CASES, MOMENTUM, alone, go, weights

pytestmark = pytest.mark.timeout(300)

CHOSEN = {
    "mlp": tuple(CASES),
    # Batch norm sees micro-batches: those of one process are cut otherwise than those of several.
    "cnn": ("plain",),
    "cnn64": ("penalised",),
    "textcnn": ("clipped by norm, accumulated", "adam, clipped, accumulated"),
    "gpt": ("clipped by norm, accumulated", "adam, clipped, accumulated"),
}
JOBS = [(name, case) for name, cases in CHOSEN.items() for case in cases]
FEWER = [
    ("mlp", "clipped by norm, accumulated"),
    ("mlp", "penalised"),
    ("cnn64", "penalised"),
    ("textcnn", "clipped by norm, accumulated"),
    ("gpt", "adam, clipped, accumulated"),
]
"""Four members on two cores take their time."""


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    "mesh", [{"sharded": 2}, {"sharded": 4}, {"data": 2, "sharded": 2}], ids=str
)
def test_ends_on_the_weights_of_one_process(level: str, mesh: dict[str, int]) -> None:
    jobs = JOBS if mesh == {"sharded": 2} else FEWER
    expected = {job: alone(*job) for job in jobs}

    def work(group: Group) -> dict[str, float]:
        found = {}
        for name, case in jobs:
            trained = built(networks.task(name), case, group, arranged(level, mesh))
            go(trained, name, case, slice(20))
            found[f"{name}, {case}"] = apart(weights(trained), expected[name, case], group)
        return found

    count = mesh["sharded"] * mesh.get("data", 1)
    found = members.run(count, work)
    limit = {job: networks.limit(job.partition(",")[0]) for job in found}
    assert all(found[job] <= limit[job] for job in found), found


def test_what_was_saved_at_one_level_goes_on_at_another_and_alone() -> None:
    expected = alone("gpt", CASE)
    task = networks.task("gpt")
    first = built(task, CASE)
    go(first, "gpt", CASE, slice(0, 3))
    early = first.state_dict()

    def work(group: Group) -> list[float]:
        state, start = early, 3
        for level in (*LEVELS, "optimizer"):
            trained = built(task, CASE, group, arranged(level))
            trained.load_state_dict(shared(state, group))
            go(trained, "gpt", CASE, slice(start, start + 4))
            state, start = trained.state_dict(), start + 4
        if group.index:
            return []
        last = built(task, CASE)
        last.load_state_dict(state)
        go(last, "gpt", CASE, slice(start, 20))
        kept = last.state_dict()["optimizer"]
        assert kept["state"].keys() == early["optimizer"]["state"].keys()
        return [difference(weights(last), expected)]

    assert max(members.run(3, work)) <= 1e-5


def shared(state: dict[str, Any], group: Group) -> dict[str, Any]:
    """A checkpoint as every member reads it: as the first one wrote it."""
    folder = group.collective()
    names = [(n, k) for n, held in state["optimizer"]["state"].items() for k in held]
    model, kept = dict(state["model"]), {n: {} for n, _ in names}  # type: ignore[var-annotated]
    reference = networks.MODELS["gpt"]().state_dict()
    sizes = dict(networks.MODELS["gpt"]().named_parameters())
    for name, like in reference.items():
        model[name] = model[name].detach().clone() if group.index == 0 else torch.zeros_like(like)
        folder.broadcast_([model[name]])
    for name in sizes:
        held = state["optimizer"]["state"][name]
        for key in ("exp_avg", "exp_avg_sq"):
            whole = held[key].clone() if group.index == 0 else torch.zeros_like(sizes[name])
            folder.broadcast_([whole.detach()])
            kept[name][key] = whole.detach()
        kept[name]["step"] = held["step"]
    optimizer = {**state["optimizer"], "state": kept}
    return {**state, "model": model, "optimizer": optimizer}


def odd_model() -> nn.Module:
    """Used, frozen, unused and tied layers; some have fewer values than there are members."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.used = nn.Linear(6, 5)
            self.frozen = nn.Linear(5, 5).requires_grad_(False)
            self.unused = nn.Linear(3, 3)
            self.scale = nn.Parameter(torch.ones(1))
            self.tied = nn.Linear(5, 5)
            self.tied.weight = nn.Parameter(torch.eye(5))
            self.again = nn.Linear(5, 5)
            self.again.weight = self.tied.weight
            self.last = nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            x = torch.tanh(self.tied(self.frozen(self.used(x))))
            return self.last(self.again(x)) * self.scale  # type: ignore[no-any-return]

    return Odd()


def test_frozen_unused_tied_and_tiny_parameters_are_trained_as_alone() -> None:
    task = networks.task("mlp")
    task.model = odd_model
    single = built(task, "penalised")
    go(single, "mlp", "penalised", slice(6))
    expected, before = weights(single), odd_model().state_dict()
    state = single.state_dict()["optimizer"]["state"].keys()

    def work(group: Group) -> dict[str, list[float]]:
        found = {}
        for level in LEVELS:
            trained = built(task, "penalised", group, arranged(level))
            go(trained, "mlp", "penalised", slice(6))
            assert trained.state_dict()["optimizer"]["state"].keys() == state
            mine = weights(trained)
            found[level] = [apart(mine, expected, group)]
            if group.index == 0:
                same = {name for name in mine if torch.equal(mine[name], before[name])}
                assert same == {
                    f"{n}.{k}" for n in ("frozen", "unused") for k in ("weight", "bias")
                }
        return found

    found = members.run(4, work)
    assert max(max(values) for values in found.values()) <= 1e-5, found


def test_figures_are_those_of_all_members_and_every_sample_counts_once() -> None:
    batch = networks.batches("mlp")[0]
    single = strategy("single", networks.task("mlp"))
    expected = single.compute([batch], backward=False)
    single.compute([batch])
    update = single.update()

    def work(group: Group) -> list[list[float]]:
        found = []
        for level in LEVELS:
            trained = built(networks.task("mlp"), "plain", group, arranged(level))
            few, rest = cut(batch, [2, 10])
            looked = [networks.part(few, group.index, 3), networks.part(rest, group.index, 3)]
            seen = [trained.compute(micro, backward=False) for micro in looked]
            loss_sum = torch.stack([stats.loss_sum for stats in seen]).sum()
            total = trained.total(Stats(loss_sum, sum(stats.weight for stats in seen), {}))
            group.asked = Ask.SIGNAL if group.index == 1 else Ask.NOTHING
            trained.compute(networks.part(batch, group.index, group.count))
            done = trained.update()
            figures = [float(total.loss_sum), total.weight]
            found.append([*figures, done.loss_sum, done.weight, done.asked, done.peers])
        return found

    for found in members.run(3, work):
        figures = [float(expected.loss_sum), 12, update.loss_sum, 12, Ask.SIGNAL, 3]
        assert found == pytest.approx(figures, rel=1e-5)


def test_half_precision_and_recomputing_train() -> None:
    def work(group: Group) -> list[float]:
        found = []
        for level in LEVELS:
            for precision in ("bf16", "fp16"):
                trained = strategy(
                    "sharded",
                    networks.task("gpt"),
                    optimizer=ADAM,
                    precision=precision,
                    recompute=precision == "bf16",
                    comm=group,
                    parallel=arranged(level),
                )
                losses = []
                for batch in networks.batches("gpt", count=1) * 12:
                    trained.compute(networks.part(batch, group.index, group.count))
                    done = trained.update()
                    losses += [done.loss_sum] * done.committed  # fp16 finds its scale first
                found.append(losses[-1] / losses[0])
        return found

    assert max(members.run(2, work)) < 0.95


def test_the_inspector_sees_the_norms_of_whole_gradients() -> None:
    class Look:
        def __init__(self) -> None:
            self.norms: dict[str, float] = {}

        def due(self, _version: int) -> bool:
            return True

        def inspect(self, _version: int, weights: Any, grads: Any) -> None:
            assert weights.keys() == grads.keys()
            self.norms = {name: float(grad.norm()) for name, grad in grads.items()}

    def looked(trained: Any) -> dict[str, float]:
        trained._inspector = look = Look()
        go(trained, "mlp", "plain", slice(1))
        return look.norms

    expected = looked(built(networks.task("mlp"), "plain"))

    def work(group: Group) -> list[dict[str, float]]:
        made = [built(networks.task("mlp"), "plain", group, arranged(level)) for level in LEVELS]
        return [looked(trained) for trained in made]

    for found in members.run(2, work):
        assert found == pytest.approx(expected, rel=1e-4)


def test_batch_norm_of_ones_own_samples_is_as_in_all_reduce() -> None:
    sync = SyncSection(batch_norm="local")

    def work(group: Group) -> list[float]:
        reference = strategy(
            "all_reduce",
            networks.task("cnn64"),
            optimizer=MOMENTUM,
            comm=group,
            parallel=Parallel(sync=sync),
        )
        micros = [
            networks.part(batch, group.index, group.count)
            for batch in networks.batches("cnn64", count=5)
        ]
        steps(reference, micros)
        found = []
        for level in LEVELS:
            parallel = Parallel(sync=sync, sharded=ShardedSection(level=level))
            trained = built(networks.task("cnn64"), "plain", group, parallel)
            steps(trained, micros)
            found.append(apart(weights(trained), weights(reference), group))
        return found

    assert max(members.run(4, work)) <= 1e-9


def test_a_ready_model_of_the_users_is_left_as_it_is() -> None:
    def work(group: Group) -> bool:
        ready = networks.MODELS["mlp"]()
        before = {name: value.clone() for name, value in ready.state_dict().items()}
        trained = built(Task(ready, networks.task("mlp").loss), CASE, group, arranged("parameters"))
        assert kind(trained.model) == type(ready).__name__, "as its author called it"
        assert trained.size() == sum(p.numel() for p in ready.parameters())
        assert not trained.whole
        trained.compute(networks.part(networks.batches("mlp")[0], trained.shard.index, 2, 2))
        assert trained.update().committed
        return all(torch.equal(before[name], value) for name, value in ready.state_dict().items())

    assert members.run(2, work)

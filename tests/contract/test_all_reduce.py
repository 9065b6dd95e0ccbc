"""Members that sum their gradients end where one process ends."""

from __future__ import annotations

import pytest
import torch

from echelon.comm.group import Group
from echelon.core.config import ClipSection, OptimizerSection, SyncSection
from echelon.core.errors import ConfigError, NonFiniteError
from echelon.core.interfaces import Strategy
from echelon.core.types import Ask, Batch, Parallel
from echelon.models.mlp import MLP, MLPOptions

from . import members, networks
from .jobs import difference, strategy, weights

pytestmark = pytest.mark.timeout(300)

MOMENTUM = OptimizerSection(name="momentum", lr=0.05)
# Of attention's key biases the gradient is exactly nothing but noise, which a small eps blows up.
ADAM = OptimizerSection(name="adam", lr=1e-2, eps=1e-5)
ADAMW = OptimizerSection(name="adamw", lr=1e-2, eps=1e-5, weight_decay=0.1, l1=1e-3)
CASES = {
    "plain": (MOMENTUM, ClipSection(), 1),
    "clipped by norm": (MOMENTUM, ClipSection(norm=0.05), 1),
    "clipped by value": (MOMENTUM, ClipSection(value=0.01), 1),
    "accumulated": (MOMENTUM, ClipSection(), 3),
    "adam, clipped, accumulated": (ADAM, ClipSection(norm=0.1), 2),
    "penalised": (ADAMW, ClipSection(norm=0.1), 1),
}


def trained(name: str, case: str, comm: Group | None = None) -> dict[str, torch.Tensor]:
    optimizer, clip, micro = CASES[case]
    built = strategy(
        "single" if comm is None else "all_reduce",
        networks.task(name),
        optimizer=optimizer,
        clip=clip,
        micro=micro,
        comm=comm,
    )
    index, count = (0, 1) if comm is None else (comm.index, comm.count)
    for batch in networks.batches(name):
        built.compute(networks.part(batch, index, count, micro))
        assert built.update().committed
    return weights(built)


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("name", networks.MODELS)
def test_ends_on_the_weights_of_one_process(name: str, count: int) -> None:
    # Batch norm sees micro-batches: those of one process are cut otherwise than those of several.
    cases = [case for case, (_, _, micro) in CASES.items() if name != "cnn64" or micro == 1]
    cases = ["plain"] if name == "cnn" else cases
    alone = {case: trained(name, case) for case in cases}

    def work(group: Group) -> dict[str, float]:
        return {case: difference(trained(name, case, group), alone[case]) for case in cases}

    found = members.run(count, work)
    assert max(found.values()) <= networks.limit(name), found


def test_large_gradients_are_summed_during_backward_and_come_out_the_same() -> None:
    from echelon.strategy import all_reduce

    alone = trained("gpt", "adam, clipped, accumulated")

    def work(group: Group) -> float:
        all_reduce.EARLY = 0
        return difference(trained("gpt", "adam, clipped, accumulated", group), alone)

    assert members.run(2, work) <= 1e-5


def test_members_begin_with_the_first_ones_weights_but_for_those_left_out() -> None:
    def work(group: Group) -> list[float]:
        task = networks.task("mlp")
        make = task.model

        def different() -> torch.nn.Module:
            model = make()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.fill_(float(group.index + 1))
            return model

        task.model = different
        parallel = Parallel(sync=SyncSection(skip_init=("0.*",)))
        built = strategy("all_reduce", task, parallel=parallel, comm=group)
        mine = torch.stack([p.detach().mean() for p in built.model.parameters()])
        sums = mine.clone()
        group.collective().sum_(sums)
        return sums.tolist()

    assert members.run(2, work) == [3.0, 3.0, 2.0, 2.0, 2.0, 2.0]


def test_a_left_out_parameter_that_does_not_exist_is_refused() -> None:
    parallel = Parallel(sync=SyncSection(skip_init=("nope.*",)))
    with pytest.raises(ConfigError, match=r"sync.skip_init: parameter 'nope.\*' is unknown"):
        strategy("all_reduce", networks.task("mlp"), parallel=parallel)


def test_frozen_and_unused_parameters_stay_as_they_are() -> None:
    def model() -> torch.nn.Module:
        torch.manual_seed(1)
        built = torch.nn.ModuleDict(
            {n: torch.nn.Linear(6, 3) for n in ("used", "frozen", "unused")}
        )
        built["frozen"].requires_grad_(False)
        return built

    def work(group: Group) -> list[bool]:
        task = networks.task("mlp")
        task.model = model
        task.forward = lambda m, b: m["used"](b["x"]) + m["frozen"](b["x"])  # type: ignore[index]
        built = strategy("all_reduce", task, optimizer=ADAMW, comm=group)
        before = weights(built)
        for batch in networks.batches("mlp", count=3):
            built.compute(networks.part(batch, group.index, group.count))
            assert built.update().committed
        after = weights(built)
        return [bool(torch.equal(before[f"{n}.weight"], after[f"{n}.weight"])) for n in model_names]

    model_names = ("used", "frozen", "unused")
    assert members.run(2, work) == [False, True, True]


def test_loss_weight_and_wishes_to_stop_are_those_of_all_members() -> None:
    def work(group: Group) -> list[float]:
        built = strategy("all_reduce", networks.task("mlp"), comm=group)
        if group.index == 1:
            group.asked = Ask.SIGNAL
        built.compute(networks.part(networks.batches("mlp")[0], group.index, group.count))
        done = built.update()
        return [done.weight, done.asked, done.peers, done.loss_sum]

    weight, asked, peers, loss_sum = members.run(3, work)
    alone = strategy("single", networks.task("mlp"))
    alone.compute([networks.batches("mlp")[0]])
    assert (weight, asked, peers) == (12, Ask.SIGNAL, 3)
    assert loss_sum == pytest.approx(alone.update().loss_sum, rel=1e-6)


@pytest.mark.parametrize("name", ["mlp", "cnn"])
def test_an_update_that_is_not_finite_in_one_member_is_refused_by_all(name: str) -> None:
    def work(group: Group) -> list[str]:
        built = strategy("all_reduce", networks.task(name), comm=group)
        batch = dict(networks.part(networks.batches(name)[0], group.index, group.count)[0])
        if group.index == 1:
            batch["x"] = torch.full_like(batch["x"], float("nan"))  # type: ignore[arg-type]
        before = weights(built)
        built.compute([batch])
        with pytest.raises(NonFiniteError) as caught:
            built.update()
        assert difference(weights(built), before) == 0
        built.compute(networks.part(networks.batches(name)[1], group.index, group.count))
        assert built.update().committed
        return [str(caught.value)]

    (message,) = members.run(2, work)
    assert "step 1" in message
    assert "input column 'x' is not finite" in message
    assert "(member 1)" in message


def test_local_batch_norm_evaluates_with_the_first_members_statistics() -> None:
    def work(group: Group) -> list[float]:
        parallel = Parallel(sync=SyncSection(batch_norm="local"))
        built = strategy("all_reduce", networks.task("cnn"), parallel=parallel, comm=group)
        for batch in networks.batches("cnn", count=3):
            built.compute(networks.part(batch, group.index, group.count))
            assert built.update().committed
        mean = built.model.state_dict()["1.1.running_mean"]
        peers = group.collective()

        def apart() -> float:
            sums = mean.clone()
            peers.sum_(sums)
            return float((sums / group.count - mean).abs().max())

        before = apart()
        built.compute(networks.batches("cnn", count=1), backward=False)
        return [before, apart()]

    before, after = members.run(2, work)
    assert before > 1e-4
    assert after <= 1e-7


def test_a_lone_sample_among_members_trains_as_in_one_process() -> None:
    def model() -> torch.nn.Module:
        torch.manual_seed(1)
        return MLP((6,), 3, MLPOptions(hidden=(8,), norm="batch"))

    task = networks.task("mlp")
    task.model = model
    whole = networks.batches("mlp")[0]
    lone: Batch = {name: column[:1] for name, column in networks.data("mlp").items()}

    def trained(comm: Group | None) -> dict[str, torch.Tensor]:
        built = strategy("single" if comm is None else "all_reduce", task, comm=comm)
        index, count = (0, 1) if comm is None else (comm.index, comm.count)
        for batch in (lone, whole, lone, whole):
            built.compute(networks.part(batch, index, count))
            assert built.update().committed
        return weights(built)

    alone = trained(None)
    assert members.run(3, lambda group: difference(trained(group), alone)) <= 1e-5


def test_held_out_figures_are_those_of_all_samples_once() -> None:
    """Also where a member has no sample at all."""

    def stats(built: Strategy, index: int, count: int) -> tuple[float, float, list[float]]:
        seen = built.compute(networks.part(few, index, count), backward=False)
        total = built.total(seen)
        return float(total.loss_sum), total.weight, total.metrics["hits"].tolist()

    few: Batch = {key: column[:3] for key, column in networks.data("mlp").items()}
    task = networks.task("mlp")
    task.metrics = {"hits": Hits()}

    def work(group: Group) -> tuple[float, float, list[float]]:
        return stats(strategy("all_reduce", task, comm=group), group.index, group.count)

    loss, weight, hits = members.run(4, work)
    loss1, weight1, hits1 = stats(strategy("single", task), 0, 1)
    assert (weight, hits) == (weight1, hits1) == (3.0, hits1)
    assert loss == pytest.approx(loss1, rel=1e-6)


class Hits:
    """A metric with a shape of its own."""

    def measure(self, output: torch.Tensor, batch: Batch) -> torch.Tensor:
        right = output.argmax(1) == batch["y"]
        return torch.bincount(batch["y"][right], minlength=3).double()  # type: ignore[arg-type]

    def value(self, total: torch.Tensor) -> float:
        return float(total.sum())


def test_half_precision_trains_alike_in_all_members() -> None:
    def work(group: Group) -> list[float]:
        found = []
        for precision in ("bf16", "fp16"):
            built = strategy("all_reduce", networks.task("gpt"), precision=precision, comm=group)
            losses = []
            for batch in networks.batches("gpt", count=1) * 20:
                built.compute(networks.part(batch, group.index, group.count))
                done = built.update()
                if done.committed:  # a loss scale that is too large is refused at first
                    losses.append(done.loss_sum / done.weight)
            mine = torch.cat([p.detach().flatten() for p in built.model.parameters()])
            others = mine.clone()
            group.collective().sum_(others)
            found += [float((others / group.count - mine).abs().max()), losses[-1] - losses[0]]
        return found

    apart16, gain16, apart, gain = members.run(2, work)
    assert apart16 <= 1e-7
    assert apart <= 1e-7
    assert gain16 < 0
    assert gain < 0


def test_what_members_saved_one_process_goes_on_with_and_the_other_way_round() -> None:
    whole = trained("mlp", "adam, clipped, accumulated")

    def go_on(name: str, comm: Group | None, state: dict | None, steps: slice):  # type: ignore[type-arg, no-untyped-def]
        optimizer, clip, micro = CASES["adam, clipped, accumulated"]
        built = strategy(
            name, networks.task("mlp"), optimizer=optimizer, clip=clip, micro=micro, comm=comm
        )
        if state is not None:
            built.load_state_dict(state)
        index, count = (0, 1) if comm is None else (comm.index, comm.count)
        for batch in networks.batches("mlp")[steps]:
            built.compute(networks.part(batch, index, count, micro))
            assert built.update().committed
        return built

    early = go_on("single", None, None, slice(0, 9)).state_dict()

    def work(group: Group) -> list[float]:
        first = go_on("all_reduce", group, early, slice(9, 20))
        second = go_on("all_reduce", group, None, slice(0, 9))
        state = second.state_dict()
        third = go_on("single", None, state, slice(9, 20))
        return [difference(weights(first), whole), difference(weights(third), whole)]

    assert max(members.run(2, work)) <= 1e-5

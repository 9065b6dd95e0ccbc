"""Members that pass micro-batches from stage to stage end where one process ends."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from echelon.checkpoint import Shelf
from echelon.comm.group import Group
from echelon.core.config import ClipSection, OptimizerSection
from echelon.core.interfaces import Strategy
from echelon.core.types import Ask, Batch
from echelon.strategy.pipeline.schedule import how_many, pieces

from . import members, networks
from .jobs import difference, strategy
from .pipelines import ADAM, MOMENTUM, batches, copied, piped, steps, task

pytestmark = pytest.mark.timeout(300)

PLAIN, BY_NORM, BY_VALUE = ClipSection(), ClipSection(norm=0.05), ClipSection(value=0.01)


class Case(NamedTuple):
    """One training; `accumulate` schedule runs make up an update."""

    name: str
    schedule: str
    optimizer: OptimizerSection = MOMENTUM
    clip: ClipSection = PLAIN
    accumulate: int = 1


# Where a gradient is 0 but for rounding (biases under batch norm, keys' biases in attention), adam
# makes a step of the rounding: those networks meet adam in double precision.
CASES: dict[tuple[int, int], list[Case]] = {
    (1, 2): [
        Case("mlp", "gpipe", ADAM, BY_NORM, 3),
        Case("mlp", "interleaved_1f1b", MOMENTUM, BY_VALUE),
        Case("cnn", "zero_bubble"),
        Case("cnn64", "1f1b", ADAM, BY_NORM, 2),
        Case("textcnn", "zero_bubble", ADAM, BY_NORM, 2),
        Case("gpt", "1f1b", MOMENTUM, BY_NORM),
        Case("gpt", "interleaved_1f1b", MOMENTUM, PLAIN, 2),
        Case("gpt64", "zero_bubble", ADAM, BY_NORM, 2),
    ],
    (1, 4): [
        Case("mlp", "1f1b", ADAM, BY_NORM, 2),
        Case("cnn", "gpipe"),
        Case("cnn64", "interleaved_1f1b", ADAM, BY_NORM),
        Case("gpt", "1f1b", MOMENTUM, BY_NORM),
        Case("gpt64", "zero_bubble", ADAM),
    ],
    (2, 2): [
        Case("mlp", "1f1b", ADAM, BY_NORM, 3),
        Case("cnn64", "zero_bubble", MOMENTUM, BY_NORM),
        Case("cnn64", "1f1b", ADAM, PLAIN, 2),
        Case("textcnn", "gpipe", ADAM, BY_VALUE),
        Case("gpt", "interleaved_1f1b", MOMENTUM, BY_NORM),
        Case("gpt64", "1f1b", ADAM, BY_NORM, 2),
    ],
}


def alone(case: Case, data: int, places: int) -> dict[str, Tensor]:
    """One process with the same micro-batches: batch norm sees one at a time."""
    built = strategy("single", task(case.name), optimizer=case.optimizer, clip=case.clip)
    for batch in batches(case.name):
        parts = [networks.part(batch, at, data, case.accumulate) for at in range(data)]
        built.compute(list(chain.from_iterable(together(b, places) for b in lined_up(parts))))
        assert built.update().committed
    return copied(built)


def lined_up(parts: Sequence[Sequence[Batch]]) -> list[list[Batch]]:
    """What all replicas compute at the same time; one with fewer samples may have fewer batches."""
    longest = max(len(part) for part in parts)
    return [[part[at] for part in parts if at < len(part)] for at in range(longest)]


def together(parallel: Sequence[Batch], places: int) -> list[Batch]:
    sizes = [len(batch["y"]) for batch in parallel]
    count = how_many(sum(sizes) // len(sizes), places, None)
    cut = [pieces(batch, count) for batch in parallel]
    return [
        {key: torch.cat([piece[key] for piece in alike]) for key in alike[0]}
        for alike in zip(*cut, strict=True)
    ]


@pytest.mark.parametrize(("data", "places"), CASES)
def test_ends_on_the_weights_of_one_process(data: int, places: int) -> None:
    cases = CASES[data, places]
    expected = [alone(case, data, places) for case in cases]

    def work(group: Group) -> list[float]:
        found = []
        for case, wanted in zip(cases, expected, strict=True):
            built = piped(
                group,
                task(case.name),
                case.schedule,
                data=data,
                optimizer=case.optimizer,
                clip=case.clip,
                micro=case.accumulate,
            )
            steps(built, batches(case.name), case.accumulate)
            mine = copied(built)
            found.append(difference(mine, wanted) if group.index == 0 else 0.0)
        return found

    found = members.run(data * places, work)
    for case, apart in zip(cases, found, strict=True):
        assert apart <= networks.limit(case.name), (case, apart)


def test_what_members_saved_one_process_goes_on_with_and_the_other_way_round(
    tmp_path: Path,
) -> None:
    case = Case("gpt64", "interleaved_1f1b", ADAM, BY_NORM)
    whole = alone(case, 1, 2)

    def single(state: dict[str, Any] | None, found: Sequence[Batch]) -> Strategy:
        built = strategy("single", task("gpt64"), optimizer=ADAM, clip=BY_NORM)
        if state is not None:
            built.load_state_dict(state)
        steps(built, found)
        return built

    Shelf(tmp_path / "single").save(9, {"strategy": single(None, batches("gpt64", 9)).state_dict()})

    def work(group: Group) -> list[float]:
        first = piped(group, task("gpt64"), case.schedule, optimizer=ADAM, clip=BY_NORM)
        first.load_state_dict(Shelf(tmp_path / "single").load("last")["strategy"])
        assert first.rate() == pytest.approx(1e-2)
        steps(first, batches("gpt64")[9:15])
        cut = first.state_dict()
        if group.index == 0:
            Shelf(tmp_path / "pipeline").save(15, {"strategy": cut})
        group.collective().barrier()
        saved = Shelf(tmp_path / "pipeline").load("last")["strategy"]
        again = piped(group, task("gpt64"), "zero_bubble", optimizer=ADAM, clip=BY_NORM)
        again.load_state_dict(saved)
        steps(again, batches("gpt64")[15:])
        mine, state = copied(again), again.state_dict()
        if group.index:
            return []
        third = single(saved, batches("gpt64")[15:])
        assert [g["names"] for g in state["optimizer"]["groups"]] == [
            g["names"] for g in third.state_dict()["optimizer"]["groups"]
        ]
        assert state["optimizer"]["state"].keys() == third.state_dict()["optimizer"]["state"].keys()
        return [difference(mine, whole), difference(copied(third), whole), state["version"]]

    mine, other, version = members.run(2, work)
    assert max(mine, other) <= networks.limit("gpt64")
    assert version == 20


def test_every_held_out_sample_counts_once_and_every_member_knows_the_figures() -> None:
    def look(built: Strategy, index: int, count: int) -> list[Any]:
        loss, weight, totals = torch.zeros((), dtype=torch.float64), 0.0, dict[str, Tensor]()
        for start, stop in ((0, 1), (1, 30), (30, 50)):
            batch: Batch = {k: v[start:stop] for k, v in networks.data("cnn").items()}
            stats = built.compute(networks.part(batch, index, count), backward=False)
            loss, weight = loss + stats.loss_sum, weight + stats.weight
            for name, part in stats.metrics.items():
                totals[name] = totals[name] + part if name in totals else part
        seen = built.total(type(stats)(loss, weight, totals))
        figures = [value.double().tolist() for _, value in sorted(seen.metrics.items())]
        return [float(seen.loss_sum), seen.weight, figures]

    def work(group: Group) -> list[Any]:
        built = piped(group, task("cnn"), "interleaved_1f1b", data=2)
        steps(built, batches("cnn", 2))
        kept = copied(built)
        found = look(built, built.shard.index, built.shard.count)
        after = built.state_dict()["model"]
        assert all(torch.equal(kept[name], value) for name, value in after.items())
        mine = torch.tensor([found[0], found[1], sum(map(sum, found[2][1]))], dtype=torch.float64)
        world = group.collective()
        total = mine.clone()
        world.sum_(total)
        torch.testing.assert_close(total, mine * world.count)  # all know the same
        steps(built, batches("cnn", 1))
        whole = strategy("single", task("cnn"))
        if group.index == 0:
            whole.model.load_state_dict(kept)
        return [found, look(whole, 0, 1)]

    found, expected = members.run(4, work)
    assert found[1:] == expected[1:]
    assert found[1] == 50
    assert found[0] == pytest.approx(expected[0], rel=1e-5)


def test_loss_weight_and_wishes_to_stop_are_those_of_all_members() -> None:
    def work(group: Group) -> list[float]:
        built = piped(group, task("mlp"))
        if group.index == 1:
            group.asked = Ask.SIGNAL
        built.compute([batches("mlp")[0]])
        done = built.update()
        return [done.weight, done.asked, done.peers, done.loss_sum]

    weight, asked, peers, loss_sum = members.run(2, work)
    one = strategy("single", task("mlp"))
    one.compute([batches("mlp")[0]])
    assert (weight, asked, peers) == (12, Ask.SIGNAL, 2)
    assert loss_sum == pytest.approx(one.update().loss_sum, rel=1e-6)


class Noting:
    """An inspector that remembers the norms of what it was shown."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, float, float]] = []

    def due(self, version: int) -> bool:
        return version == 2

    def inspect(
        self, version: int, weights: Mapping[str, Tensor], grads: Mapping[str, Tensor]
    ) -> None:
        assert version == 2
        self.seen = [(n, float(w.norm()), float(grads[n].norm())) for n, w in weights.items()]


def test_the_first_member_is_shown_the_layers_of_all() -> None:
    def noted(built: Strategy) -> list[list[Any]]:
        built._inspector = noting = Noting()  # type: ignore[attr-defined]
        steps(built, batches("gpt", 2))
        return [list(line) for line in noting.seen]

    expected = noted(strategy("single", task("gpt")))
    for data in (1, 2):
        work = partial(_built_and_noted, noted, data)
        found = members.run(2 * data, work)
        assert [name for name, *_ in found] == [name for name, *_ in expected]
        for (_, *mine), (_, *other) in zip(found, expected, strict=True):
            assert mine == pytest.approx(other, rel=1e-4)


def _built_and_noted(noted: Callable[[Strategy], Any], data: int, group: Group) -> Any:
    return noted(piped(group, task("gpt"), data=data))

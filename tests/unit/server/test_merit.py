"""Trainers with spoilt samples harm the others, unless the gate judges updates by merit."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional

from echelon.comm.ps.layout import Layout, Partition
from echelon.comm.ps.messages import PushHead
from echelon.comm.ps.state import divide
from echelon.core.config import OptimizerSection
from echelon.core.errors import PeerError
from echelon.core.types import Batch, Lease
from echelon.server.accounting import PATIENCE, Merits, merits_of
from echelon.server.decisions import Push, Round
from echelon.server.gate import Gate
from echelon.server.weights import Flats
from echelon.strategy.parameter_server.merit import Judge

TRAINERS = 3
Columns = dict[str, Tensor]


def digits() -> tuple[Columns, Columns]:
    data = load_digits()
    x = torch.tensor(data.data, dtype=torch.float32) / 16
    y = torch.tensor(data.target, dtype=torch.int64)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(7))
    train, held = order[:1300], order[1300:]
    return {"x": x[train], "y": y[train]}, {"x": x[held], "y": y[held]}


class Crew:
    """Trainers, a gate and a shard in one process, one push after the other."""

    def __init__(
        self, rules: dict[str, Any], spoil: Callable[[int, Columns], Columns], broken: int = -1
    ) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 10))
        self.train, self.held = digits()
        section = OptimizerSection(name="momentum", lr=0.1)
        named = dict(self.model.named_parameters())
        layout = Layout.of(list(named), list(named.values()), [True] * len(named))
        partition = Partition(layout, 1)
        self.flats = Flats(partition, 0, section)
        self.flats.load(divide(partition, {"model": named})[0])
        self.layout = layout
        for parameter, weight in zip(named.values(), layout.views(self.flats.weights), strict=True):
            parameter.data = weight
        self.gate = Gate({"samples": 1 << 40, **rules}, len(named))
        self.gate.enter(0.0, 1, range(TRAINERS))
        parts = [self._cut(at, spoil) for at in range(TRAINERS)]
        self._judges = [
            Judge(self.model, self._loss, list(self.model.parameters()), parts, every=2)
            for _ in range(TRAINERS)
        ]
        self._spoil, self._broken = spoil, broken
        self._at = 0

    def _cut(self, member: int, spoil: Callable[[int, Columns], Columns]) -> Batch:
        part = {name: values[member:120:TRAINERS] for name, values in self.held.items()}
        return {**spoil(member, part)}

    def _loss(self, batch: Batch) -> tuple[Tensor, float]:
        x, y = batch["x"], batch["y"]
        assert isinstance(x, Tensor)
        assert isinstance(y, Tensor)
        return functional.cross_entropy(self.model(x), y, reduction="sum"), float(len(y))

    def step(self, member: int) -> None:
        rows = torch.randint(0, len(self.train["y"]), (32,))
        batch = self._spoil(member, {name: values[rows] for name, values in self.train.items()})
        loss_sum, weight = self._loss({**batch})
        grads = torch.autograd.grad(loss_sum, list(self.model.parameters()))
        if member == self._broken:
            grads = tuple(5 * grad.norm() * torch.randn_like(grad) for grad in grads)
        staged = self.layout.empty()
        torch._foreach_copy_(self.layout.views(staged), list(grads))
        merit = self._judges[member].merit(grads)
        row = (weight, weight, float(loss_sum.detach()), 0.0, 0.1, merit)
        self._at += 32
        head = PushHead(1, Lease(0, self._at - 32, self._at), self.gate.version, row)
        self._staged[member] = staged
        for decision in self.gate.push(0.0, member, Push(self._at, head)):
            if isinstance(decision, Round) and decision.pushes:
                pushes = [self._staged[who] for who, _ in decision.pushes]
                scale, factor = decision.scale, decision.factor
                for _ in self.flats.apply(pushes, scale=scale, factor=factor):
                    pass

    def accuracy(self, steps: int = 120) -> float:
        """On other held-out samples, the mean over the last quarter of the training."""
        self._staged: dict[int, list[Tensor]] = {}
        found = []
        for step in range(steps):
            for member in range(TRAINERS):
                self.step(member)
            if step >= steps * 3 // 4:
                found.append(self._look())
        return sum(found) / len(found)

    @torch.no_grad()
    def _look(self) -> float:
        x, y = self.held["x"], self.held["y"]
        return float((self.model(x[120:]).argmax(1) == y[120:]).float().mean())


def as_it_is(_: int, batch: Columns) -> Columns:
    return batch


def shuffled_labels(member: int, batch: Columns) -> Columns:
    """Of trainer 2, its held-out samples too."""
    if member != 2:
        return batch
    y = batch["y"]
    return {**batch, "y": y[torch.randperm(len(y))]}


APART = {"staleness": None, "quorum": 1}
TOGETHER = {"staleness": 0, "quorum": "all"}


def test_shuffled_labels_do_no_harm_where_updates_are_judged() -> None:
    clean = Crew(APART, as_it_is).accuracy()
    spoilt = Crew(APART, shuffled_labels).accuracy()
    crew = Crew({**APART, "merit": "reject"}, shuffled_labels)
    judged = crew.accuracy()
    assert spoilt < clean - 0.03
    assert judged > spoilt + 0.02
    assert judged > clean - 0.02
    figures = crew.gate.figures()
    assert figures["2"]["rejected"] > 60
    assert figures["2"]["merit"] < 0.25 * min(figures["0"]["merit"], figures["1"]["merit"])
    assert all(figures[good]["rejected"] < 12 for good in "01")


def test_a_broken_model_does_no_harm_to_updates_that_all_make_together() -> None:
    found = {}
    for policy in ("none", "reject"):
        crew = Crew({**TOGETHER, "merit": policy}, as_it_is, broken=1)
        found[policy] = crew.accuracy(60)
    assert crew.gate.version == 60
    assert found["reject"] > found["none"] + 0.2
    assert crew.gate.figures()["1"]["rejected"] > 40


def test_whose_merit_is_a_small_part_of_the_others_is_out_until_it_is_like_theirs() -> None:
    merits = Merits("reject")
    members = [0, 1, 2]
    for _ in range(PATIENCE - 1):
        for member, merit in enumerate((0.4, 0.3, 0.0)):
            merits.note(member, merit, members)
    assert merits.weight(2, members) == 1.0, "too early to tell"
    for member, merit in enumerate((0.4, 0.3, 0.0)):
        merits.note(member, merit, members)
    assert [merits.weight(member, members) for member in members] == [1.0, 1.0, 0.0]
    assert merits.reject(2) == "updates of member 2 do harm: their merit is 0.00"
    assert merits.figures()[2] == {"merit": 0.0, "rejected": 1}
    merits.note(2, math.nan, members)
    for _ in range(5):
        merits.note(2, 0.5, members)
    assert merits.weight(2, members) == 0.0, "better, but that may be chance"
    for _ in range(10):
        merits.note(2, 0.5, members)
    assert merits.weight(2, members) == 1.0


def test_chance_lets_nobody_in_and_turns_nobody_away() -> None:
    """Late in a training all merits are about 0, and each is above the others' at times."""
    crew = Crew({**APART, "merit": "reject"}, shuffled_labels)
    assert crew.accuracy(400) > 0.95
    figures = crew.gate.figures()
    assert figures["2"]["applied"] < 40
    assert all(figures[good]["rejected"] == 0 for good in "01")


def test_one_whose_samples_are_mended_takes_part_again() -> None:
    spoilt = True

    def spoil(member: int, batch: Columns) -> Columns:
        return shuffled_labels(member, batch) if spoilt else batch

    crew = Crew({**APART, "merit": "reject"}, spoil)
    crew.accuracy(25)
    assert crew.gate.figures()["2"]["rejected"] > 0
    spoilt = False
    crew.accuracy(100)
    before = crew.gate.figures()["2"]["rejected"]
    crew.accuracy(20)
    assert crew.gate.figures()["2"]["rejected"] == before


def test_a_gate_that_takes_over_knows_whose_updates_do_harm() -> None:
    crew = Crew({**APART, "merit": "reject"}, as_it_is, broken=1)
    crew.accuracy(60)
    before = crew.gate.figures()
    assert before["1"]["rejected"] > 0
    state = json.loads(json.dumps(crew.gate.state_dict()))
    crew.gate._merits = Merits("reject")
    crew.gate.load_state_dict(state)
    after = crew.gate.figures()
    assert [after[member]["merit"] for member in after] == [before[m]["merit"] for m in before]
    assert after["1"]["rejected"] == before["1"]["rejected"]


def test_where_nobody_has_merit_nobody_is_to_blame() -> None:
    merits = Merits("reject")
    for _ in range(20):
        for member, merit in enumerate((0.01, -0.2, 0.0)):
            merits.note(member, merit, [0, 1, 2])
    assert all(merits.weight(member, [0, 1, 2]) == 1.0 for member in range(3))
    alone = Merits("reject")
    for _ in range(20):
        alone.note(0, -1.0, [0])
    assert alone.weight(0, [0]) == 1.0


def test_updates_may_be_weighed() -> None:
    merits = Merits("weigh")
    for _ in range(PATIENCE):
        for member, merit in enumerate((0.4, 0.4, 0.2)):
            merits.note(member, merit, [0, 1, 2])
    assert merits.weight(2, [0, 1, 2]) == pytest.approx(0.5)
    assert merits.weight(0, [0, 1, 2]) == 1.0


def test_one_that_is_left_alone_makes_updates_of_nothing() -> None:
    """Its samples would come back to it for ever."""
    crew = Crew({**APART, "merit": "reject"}, as_it_is, broken=1)
    crew.accuracy(20)
    before, version = crew.flats.weights[0].clone(), crew.gate.version
    for other in (0, 2):
        crew.gate.rest(0.0, other)
    crew.step(1)
    assert crew.gate.version == version + 1
    assert torch.equal(before, crew.flats.weights[0])


def test_policies_that_are_not_known_are_refused() -> None:
    assert merits_of(None) is None
    assert merits_of("none") is None
    with pytest.raises(PeerError, match=r"merit 'odd' is unknown \(choices: none, reject, weigh\)"):
        merits_of("odd")

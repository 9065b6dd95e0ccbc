"""Tables on servers end on the rows of a single process, however many trainers and servers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from echelon import cross_entropy
from echelon.core.config import ClipSection, OptimizerSection, ParameterServerSection
from echelon.core.errors import NonFiniteError
from echelon.core.interfaces import Strategy, Task
from echelon.core.types import Batch, Parallel, RowRule
from echelon.models import Table
from echelon.strategy.parameter_server import ParameterServer

from . import serving
from .jobs import difference, steps, strategy

pytestmark = pytest.mark.timeout(120)
STEPS, BATCH, WIDTH = 24, 16, 4
ADAM = OptimizerSection(name="adam", lr=0.02)
RULES = {
    "plain": RowRule(name="sgd", lr=0.1, l2=0.01),
    "square": RowRule(name="adagrad", lr=0.1, weight_decay=0.01),
    "late": RowRule(name="adam", lr=0.05),
    "short": RowRule(name="adagrad", lr=0.1),
}


class Rated(nn.Module):
    """A table of every kind, and a layer above them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.plain = Table("plain", WIDTH, rule=RULES["plain"], std=0.5)
        self.square = Table("square", WIDTH, rule=RULES["square"], std=0.5, bag="mean")
        self.late = Table("late", WIDTH, rule=RULES["late"], std=0.5, admit=3)
        self.short = Table("short", WIDTH, rule=RULES["short"], std=0.5, expire=2)
        self.followed = Table("followed", WIDTH, std=0.5)
        self.layer = nn.Linear(5 * WIDTH, 3)

    def forward(self, ids: Tensor) -> Tensor:
        several = (self.plain, self.late, self.short, self.followed)
        found = [table(ids).sum(1) for table in several]
        return self.layer(torch.cat([*found, self.square(ids)], 1))  # type: ignore[no-any-return]

    def lookups(self, ids: Tensor) -> list[tuple[Table, Tensor]]:
        several = (self.plain, self.late, self.short, self.followed, self.square)
        return [(table, ids) for table in several]


def task() -> Task:
    return Task(model=Rated, loss=cross_entropy)


def batches() -> list[Batch]:
    generator = torch.Generator().manual_seed(9)
    common = torch.randint(0, 6, (STEPS, BATCH, 2), generator=generator)
    rare = torch.randint(0, 300, (STEPS, BATCH, 2), generator=generator) << 40
    ids = torch.cat([common, -rare], 2)
    y = (ids % 7).sum(2) % 3
    return [{"x": ids[at], "y": y[at]} for at in range(STEPS)]


def share(batch: Batch, index: int, count: int) -> dict[str, Tensor]:
    """Uneven parts; the last member has few samples, or none at all."""
    first = BATCH // count + 1
    edges = [min(at * first, BATCH) for at in range(count)] + [BATCH]
    part = slice(edges[index], edges[index + 1])
    return {name: column[part] for name, column in batch.items() if isinstance(column, Tensor)}


def rows(trained: Strategy) -> dict[str, Tensor]:
    """The model's state, rows in the order of their ids."""
    state: dict[str, Tensor] = trained.state_dict()["model"]
    found: dict[str, Tensor] = {}
    for name, value in state.items():
        table, _, column = name.rpartition(".")
        if column == "facts" or table == "layer":
            found[name] = value
            continue
        ids = "waiting_ids" if column.startswith("waiting") else "ids"
        found[name] = value[state[f"{table}.{ids}"].argsort()]
    return {name: value.double() for name, value in found.items()}


def single(clip: ClipSection | None) -> dict[str, Tensor]:
    alone = strategy("single", task(), optimizer=ADAM, clip=clip)
    steps(alone, [[batch] for batch in batches()])
    return rows(alone)


def told(trained: Strategy, micros: Sequence[Sequence[Batch]]) -> None:
    """The next batch is known while one is computed, but now and then."""
    server = cast(ParameterServer, trained)
    assert server.foresees
    for at, micro in enumerate(micros):
        if at % 5:
            server.expect(micros[at + 1] if at + 1 < len(micros) else ())
        ahead = server._tables.ahead
        asked = len(ahead._batches)
        steps(trained, [micro])
        assert len(ahead._before) == 0 or not micro, "what was asked for ahead is what was pulled"
        assert asked in (0, 5)


def together(trainers: int, servers: int, clip: ClipSection | None) -> dict[str, Tensor]:
    def work(group: serving.Served) -> dict[str, Any]:
        trained = strategy(
            "parameter_server", task(), optimizer=ADAM, clip=clip, batch=BATCH, comm=group
        )
        parts = [share(batch, group.index, trainers) for batch in batches()]
        told(trained, [[dict(part)] if len(part["x"]) else [] for part in parts])
        found = rows(trained) if group.index == 0 else {}
        return {name: value.tolist() for name, value in found.items()}

    found = serving.run(trainers, servers, work)
    return {name: torch.tensor(value, dtype=torch.float64) for name, value in found.items()}


@pytest.mark.parametrize(
    ("trainers", "servers", "clip"),
    [(2, 1, ClipSection()), (2, 2, ClipSection(norm=0.1)), (4, 2, ClipSection(value=0.01))],
)
def test_servers_make_the_same_rows(trainers: int, servers: int, clip: ClipSection) -> None:
    expected = single(clip)
    found = together(trainers, servers, clip)
    assert {name: value.shape for name, value in found.items() if value.numel()} == {
        name: value.shape for name, value in expected.items() if value.numel()
    }
    for name in expected:
        if name.endswith(("ids", "seen", "counts", "steps", "facts")):
            assert torch.equal(found[name], expected[name]), name
    left, right = ({n: v for n, v in each.items() if v.numel()} for each in (found, expected))
    assert difference(left, right) <= 1e-5


def test_a_run_goes_on_with_other_servers_or_none() -> None:
    whole, first = (strategy("single", task(), optimizer=ADAM) for _ in range(2))
    far = Parallel(servers=ParameterServerSection(plane="tcp"))
    one = strategy("parameter_server", task(), optimizer=ADAM, parallel=far, comm=serving.alone(1))
    micros = [[batch] for batch in batches()]
    steps(whole, micros)
    told(one, micros[:8])
    first.load_state_dict(one.state_dict())
    steps(first, micros[8:16])
    two = strategy("parameter_server", task(), optimizer=ADAM, comm=serving.alone(2))
    two.load_state_dict(first.state_dict())
    steps(two, micros[16:])
    assert difference(rows(two), rows(whole)) <= 1e-5


class Rooted(nn.Module):
    """Its rows begin at 0, where a root has no slope."""

    def __init__(self) -> None:
        super().__init__()
        self.sound = Table("sound", 3, rule=RULES["plain"])
        self.roots = Table("roots", 3, rule=RULES["plain"], std=0.0)
        self.layer = nn.Linear(3, 3)

    def forward(self, ids: Tensor) -> Tensor:
        found: Tensor = self.layer(self.sound(ids).sum(1)) + self.roots(ids).sum(1).sqrt()
        return found


@pytest.mark.parametrize("name", ["single", "parameter_server"])
def test_a_gradient_of_rows_that_is_not_finite_is_told_with_its_table(name: str) -> None:
    trained = strategy(name, Task(model=Rooted, loss=cross_entropy), optimizer=ADAM)
    trained.compute(batches()[:1])
    with pytest.raises(NonFiniteError, match="step 1: the gradient of table 'roots' is not finite"):
        trained.update()

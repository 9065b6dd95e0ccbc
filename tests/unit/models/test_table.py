"""Tables inside models: their output, their gradients, and how they are trained."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from echelon import cross_entropy
from echelon.comm import Alone
from echelon.comm.group import Group
from echelon.comm.peers import Place
from echelon.core.config import ClipSection, OptimizerSection, ScheduleSection
from echelon.core.errors import CheckpointError, TaskError
from echelon.core.interfaces import Strategy, Task
from echelon.core.types import Batch, Numerics, RowRule, Sparse
from echelon.models import Table
from echelon.optim import build_schedule
from echelon.optim.tables import Rows
from echelon.strategy import build

RULE = RowRule(name="sgd", lr=0.1)
FAR = 1 << 40


def table(**options: object) -> Table:
    made = Table("t", 3, rule=RULE, seed=5, **options)  # type: ignore[arg-type]
    made.store = Rows(made.spec(None))
    return made


def rows_of(made: Table, ids: Tensor) -> Tensor:
    assert made.store is not None
    return made.store.pull(ids.reshape(-1)).view(*ids.shape, -1)


def test_every_id_has_its_row() -> None:
    made, ids = table(), torch.tensor([[7, -1], [FAR, 7]])
    found = made(ids)
    assert torch.equal(found, rows_of(made, ids))
    assert torch.equal(made((ids % 5).int()), rows_of(made, ids % 5))
    assert made(torch.empty(0, 2, dtype=torch.int64)).shape == (0, 2, 3)


def test_gradients_are_summed_by_id() -> None:
    made = table()
    made(torch.tensor([9, 2, 9, 9])).sum().backward()
    [(ids, sums, counts)] = made.take()
    assert ids.tolist() == [2, 9]
    assert sums[:, 0].tolist() == [1, 3]
    assert counts.tolist() == [1, 3]
    assert made.take() == []


def test_evaluation_leaves_nothing_behind() -> None:
    made = table()
    made.eval()(torch.tensor([1]))
    with torch.no_grad():
        made.train()(torch.tensor([1]))
    made.eval()
    with torch.inference_mode():
        made(torch.tensor([1]))
    assert made.take() == []
    assert isinstance(made.store, Rows)
    assert len(made.store) == 0


@pytest.mark.parametrize("bag", ["sum", "mean"])
def test_bags(bag: str) -> None:
    made, ids = table(bag=bag), torch.tensor([[1, 2, FAR], [2, 2, 3]])
    whole = getattr(rows_of(made, ids), bag)(1)
    torch.testing.assert_close(made(ids), whole)
    torch.testing.assert_close(made(ids.flatten(), torch.tensor([0, 3])), whole)


def test_sparse_columns_are_weighted_bags() -> None:
    made = table(bag="sum")
    ids, values = torch.tensor([4, 5, 4]), torch.tensor([1.0, 2.0, 3.0])
    found = made(Sparse(ids, values, torch.tensor([0, 2, 3]), 10))
    each = rows_of(made, ids) * values[:, None]
    torch.testing.assert_close(found, torch.stack([each[:2].sum(0), each[2]]))


def test_padding_counts_for_nothing() -> None:
    plain, mean = table(padding=0), table(padding=0, bag="mean")
    ids = torch.tensor([[0, 8, 8], [0, 0, 8]])
    assert not plain(ids)[ids == 0].any()
    torch.testing.assert_close(mean(ids), rows_of(mean, torch.tensor([8, 8])))
    plain.drop()
    plain(ids).sum().backward()
    [(found, sums, _)] = plain.take()
    assert found.tolist() == [8]
    assert sums[0, 0] == 3
    assert plain(torch.tensor([3])).shape == (1, 3), "no padding among them"


def test_the_seed_is_drawn_like_other_first_weights() -> None:
    def first() -> Tensor:
        torch.manual_seed(3)
        made = Table("t", 3, rule=RULE)
        made.store = Rows(made.spec(None))
        return rows_of(made, torch.arange(3))

    assert torch.equal(first(), first())


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(TaskError, match="table 't' has no store"):
        Table("t", 3)(torch.tensor([1]))
    with pytest.raises(TaskError, match=r"takes ids of type int64, not torch\.float32"):
        table()(torch.tensor([1.0]))
    with pytest.raises(TaskError, match="takes bags of ids only with bag"):
        table()(torch.tensor([1]), torch.tensor([0]))
    with pytest.raises(TaskError, match="its own optimizer, which knows nothing of the rows"):
        Table("t", 3).spec(None)


class Rated(nn.Module):
    """A table (or an embedding that does the same) and a layer."""

    def __init__(self, first: nn.Module) -> None:
        super().__init__()
        self.first = first
        torch.manual_seed(2)
        self.layer = nn.Linear(3, 2)

    def forward(self, ids: Tensor) -> Tensor:
        return self.layer(self.first(ids).sum(1))  # type: ignore[no-any-return]


def model_of(strategy: Strategy) -> Rated:
    assert isinstance(strategy.model, Rated)
    return strategy.model


def users_of(strategy: Strategy) -> Table:
    first = model_of(strategy).first
    assert isinstance(first, Table)
    return first


def rated(rule: RowRule | None = None) -> Rated:
    return Rated(Table("users", 3, rule=rule, seed=5))


def batches(count: int = 12) -> list[Batch]:
    generator = torch.Generator().manual_seed(0)
    return [
        {
            "x": torch.randint(0, 20, (size, 4), generator=generator),
            "y": torch.randint(0, 2, (size,), generator=generator),
        }
        for size in [8, 5, 1, 8] * (count // 4)
    ]


def single(
    model: Callable[[], nn.Module],
    optimizer: OptimizerSection,
    clip: ClipSection | None = None,
    name: str = "single",
    precision: str = "fp32",
) -> Strategy:
    cpu = torch.device("cpu")
    numerics = Numerics(
        device=cpu, optimizer=optimizer, clip=clip or ClipSection(), precision=precision
    )
    rates = build_schedule(ScheduleSection(warmup=4), 20)
    strategy = build(name, numerics, rates)
    comm = Alone() if name == "single" else Group(Place(0, 1))
    strategy.setup(Task(model=model, loss=cross_entropy), comm)
    return strategy


def train(strategy: Strategy, steps: list[list[Batch]]) -> None:
    for micro in steps:
        strategy.compute(micro)
        assert strategy.update().committed


def embedded() -> nn.Module:
    embedding = nn.Embedding(20, 3)
    embedding.weight.data = rows_of(_named(), torch.arange(20))
    return Rated(embedding)


def _named() -> Table:
    made = Table("users", 3, rule=RULE, seed=5)
    made.store = Rows(made.spec(None))
    return made


@pytest.mark.parametrize("clip", [ClipSection(), ClipSection(norm=0.1), ClipSection(value=0.01)])
def test_trains_as_an_embedding_does(clip: ClipSection) -> None:
    sgd = OptimizerSection(name="sgd", lr=0.5)
    sparse, dense = single(rated, sgd, clip), single(embedded, sgd, clip)
    steps = [[batch] for batch in batches()]
    for strategy in (sparse, dense):
        train(strategy, steps)
    users = users_of(sparse)
    embedding = model_of(dense).first
    assert isinstance(embedding, nn.Embedding)
    torch.testing.assert_close(rows_of(users, torch.arange(20)), embedding.weight.detach())
    torch.testing.assert_close(model_of(sparse).layer.weight, model_of(dense).layer.weight)


@pytest.mark.parametrize("name", ["sgd", "adagrad", "adamw"])
def test_accumulating_parts_equals_the_whole_batch(name: str) -> None:
    optimizer = OptimizerSection.model_validate({"name": name, "lr": 0.1})
    whole, parts = single(rated, optimizer), single(rated, optimizer)
    for batch in batches():
        train(whole, [[batch]])
        columns = {name: column for name, column in batch.items() if isinstance(column, Tensor)}
        cuts = [{name: column[at::2] for name, column in columns.items()} for at in (0, 1)]
        train(parts, [[dict(cut) for cut in cuts if len(cut["y"])]])
    everything = torch.arange(20)
    one, other = (rows_of(users_of(s), everything) for s in (whole, parts))
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_going_on_from_saved_state_is_bit_identical() -> None:
    adam = OptimizerSection(name="adam", lr=0.1)
    whole, second = single(rated, adam), single(rated, adam)
    steps = [[batch] for batch in batches()]
    train(whole, steps[:6])
    second.load_state_dict(whole.state_dict())
    for strategy in (whole, second):
        train(strategy, steps[6:])
    one, other = (strategy.state_dict()["model"] for strategy in (whole, second))
    assert one.keys() == other.keys() >= {"first.ids", "first.rows", "first.square"}
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_checkpoint_without_the_rows_is_refused() -> None:
    adam = OptimizerSection(name="adam", lr=0.1)
    strategy = single(rated, adam)
    state = strategy.state_dict()
    state["model"] = {n: v for n, v in state["model"].items() if not n.startswith("first.")}
    with pytest.raises(CheckpointError, match=r"does not fit the model.*first\.rows"):
        strategy.load_state_dict(state)


def test_trains_in_half_precision() -> None:
    strategy = single(rated, OptimizerSection(name="adagrad", lr=0.1), precision="fp16")
    for batch in batches():
        strategy.compute([batch])
        strategy.update()
    users = users_of(strategy)
    assert rows_of(users, torch.arange(20)).isfinite().all()
    assert isinstance(users.store, Rows)
    assert len(users.store) == 20


def test_a_non_finite_update_makes_no_rows() -> None:
    strategy = single(rated, OptimizerSection(name="sgd", lr=0.1), precision="fp16")
    model_of(strategy).layer.weight.data *= 1e4
    strategy.compute(batches(4)[:1])
    assert not strategy.update().committed
    users = users_of(strategy)
    assert isinstance(users.store, Rows)
    assert len(users.store) == 0


def test_other_strategies_refuse_tables() -> None:
    with pytest.raises(TaskError, match="train it with strategy 'single' or 'parameter_server'"):
        single(lambda: rated(RULE), OptimizerSection(), name="all_reduce")


def test_two_tables_of_one_name_are_refused() -> None:
    def twice() -> nn.Module:
        return nn.Sequential(Table("t", 3, rule=RULE), Table("t", 3, rule=RULE), nn.Linear(3, 2))

    with pytest.raises(TaskError, match="two tables are called 't'"):
        single(twice, OptimizerSection())


def test_one_table_may_be_used_twice() -> None:
    class Twice(Rated):
        def forward(self, ids: Tensor) -> Tensor:
            both = self.first(ids[:, :2]).sum(1) + self.first(ids[:, 2:]).sum(1)
            return self.layer(both)  # type: ignore[no-any-return]

    def twice() -> nn.Module:
        return Twice(Table("users", 3, seed=5))

    sgd = OptimizerSection(name="sgd", lr=0.5)
    one, other = single(rated, sgd), single(twice, sgd)
    for strategy in (one, other):
        train(strategy, [[batch] for batch in batches()])
    torch.testing.assert_close(*(rows_of(users_of(s), torch.arange(20)) for s in (one, other)))


def test_the_loss_falls() -> None:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 50, (400, 4), generator=generator) * FAR
    good = torch.randn(50, generator=generator)[ids // FAR].sum(1) > 0
    strategy = single(rated, OptimizerSection(name="adagrad", lr=0.5))
    for start in range(0, 400 * 8, 40):
        at = slice(start % 400, start % 400 + 40)
        train(strategy, [[{"x": ids[at], "y": good[at].long()}]])
    scores = strategy.model.eval()(ids).detach()
    assert float(F.cross_entropy(scores, good.long())) < 0.3

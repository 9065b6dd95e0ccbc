"""Wide & deep, and DLRM."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from echelon.core.errors import ConfigError, DataError
from echelon.models.dlrm import DLRM, DLRMOptions, Dot
from echelon.models.table import Table
from echelon.optim.tables import Rows

FIELDS = (3, 10, 5)


def dlrm(fields: tuple[int, ...] = FIELDS, dense: int = 4, outputs: int = 1, **values: Any) -> DLRM:
    chosen = {"width": 6, "hidden": (8, 7), **values}
    return DLRM(fields, dense, outputs, DLRMOptions.model_validate(chosen))


def samples(count: int = 5, dense: int = 4) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(0, size, (count,), generator=generator) for size in FIELDS]
    return torch.randn(count, dense, generator=generator), torch.stack(ids, dim=1)


def parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def test_wide_and_deep_has_the_size_of_its_parts() -> None:
    table, wide = 18 * 6, 18 + 4
    deep = (3 * 6 + 4) * 8 + 8 + 8 * 7 + 7 + 7 + 1
    assert parameters(dlrm()) == table + wide + deep
    assert parameters(dlrm(wide=False)) == table + deep


def test_dot_interaction_has_a_pair_for_every_two_vectors() -> None:
    table, wide = 18 * 6, 18 + 4
    bottom = 4 * 9 + 9 + 9 * 6 + 6
    deep = (6 + 4 * 3 // 2) * 8 + 8 + 8 * 7 + 7 + 7 + 1
    assert parameters(dlrm(interaction="dot", bottom=(9,))) == table + wide + bottom + deep


@pytest.mark.parametrize("interaction", ["concat", "dot"])
@pytest.mark.parametrize("dense", [0, 4])
@pytest.mark.parametrize("outputs", [1, 3])
def test_it_scores_categories_and_numbers(interaction: str, dense: int, outputs: int) -> None:
    model = dlrm(dense=dense, outputs=outputs, interaction=interaction)
    assert model(*samples(dense=dense)).shape == (5, outputs)


def test_ids_may_be_of_another_integer_type() -> None:
    dense, ids = samples()
    model = dlrm()
    torch.testing.assert_close(model(dense, ids.int()), model(dense, ids))


def test_each_field_has_rows_of_its_own() -> None:
    model = dlrm()
    dense, ids = torch.zeros(1, 4), torch.tensor([[2, 0, 4]])
    torch.autograd.backward(model(dense, ids).sum())
    assert isinstance(model.vectors, nn.Embedding)
    table = model.vectors.weight.grad
    assert table is not None
    assert (table != 0).any(1).nonzero().flatten().tolist() == [2, 3, 3 + 10 + 4]


def test_the_wide_part_starts_at_nothing_and_is_linear() -> None:
    dense, ids = samples()
    model = dlrm()
    assert model.wide is not None
    assert bool((model.wide(dense, ids + model.starts) == 0).all())
    for p in model.wide.parameters():
        nn.init.normal_(p)
    assert model.wide.numbers is not None
    weights = model.wide.categories
    assert isinstance(weights, nn.Parameter)
    expected = weights[ids + model.starts].sum(1) + dense @ model.wide.numbers.t()
    torch.testing.assert_close(model.wide(dense, ids + model.starts), expected)
    deep_only = model.head(model.deep(model.meet(dense, model.vectors(ids + model.starts))))
    torch.testing.assert_close(model(dense, ids), deep_only + expected)


def test_dots_are_those_of_every_two_vectors() -> None:
    dot = Dot(3, 0, DLRMOptions(width=4, interaction="dot"))
    vectors = torch.randn(2, 3, 4)
    a, b, c = vectors.unbind(1)
    expected = torch.stack([(b * a).sum(1), (c * a).sum(1), (c * b).sum(1)], dim=1)
    torch.testing.assert_close(dot(torch.zeros(2, 0), vectors), expected)


def test_what_follows_from_the_data_is_not_part_of_its_state() -> None:
    assert not any("starts" in key or "pairs" in key for key in dlrm().state_dict())


def test_vectors_start_small() -> None:
    vectors = dlrm(fields=(5000,)).vectors
    assert isinstance(vectors, nn.Embedding)
    assert vectors.weight.std().item() == pytest.approx(0.05, rel=0.05)


def test_dropout_is_off_in_evaluation() -> None:
    model = dlrm(dropout=0.5).eval()
    assert torch.equal(model(*samples()), model(*samples()))
    model.train()
    assert not torch.equal(model(*samples()), model(*samples()))


@pytest.mark.parametrize(("field", "value", "last"), [(1, 10, 9), (2, -1, 4)])
def test_an_id_that_is_no_category_is_refused(field: int, value: int, last: int) -> None:
    dense, ids = samples()
    ids[3, field] = value
    message = f"categorical field {field} has ids 0 to {last}, but a sample has {value}"
    with pytest.raises(DataError, match=message):
        dlrm()(dense, ids)


def test_dot_with_nothing_to_pair_is_refused() -> None:
    with pytest.raises(ConfigError, match="nothing to pair") as caught:
        dlrm(fields=(3,), dense=0, interaction="dot")
    assert caught.value.path == ("model", "interaction")


def test_dot_pairs_one_field_with_the_numbers() -> None:
    model = dlrm(fields=(3,), dense=1, interaction="dot")
    assert model(torch.zeros(2, 1), torch.tensor([[0], [2]])).shape == (2, 1)


def test_a_bottom_without_effect_is_refused() -> None:
    with pytest.raises(ValueError, match=r"model.bottom has no effect on interaction 'concat'"):
        DLRMOptions(bottom=(8,))


def test_categories_may_be_any_numbers_in_tables() -> None:
    model = dlrm(table={"rule": {"name": "sgd", "lr": 0.1}}, interaction="dot")
    tables = [module for module in model.modules() if isinstance(module, Table)]
    assert [table.name for table in tables] == ["vectors", "wide"]
    for table in tables:
        table.store = Rows(table.spec(None))
    dense, ids = samples()
    scores = model(dense, ids * -(10**12))
    scores.sum().backward()
    [(keys, _, counts)] = tables[0].take()
    distinct = sum(len(column.unique()) for column in ids.unbind(1))
    assert (len(keys), int(counts.sum())) == (distinct, ids.numel()), "fields do not share rows"
    assert not tables[1].store.pull(keys).any(), "the wide part begins with zeros"  # type: ignore[union-attr]
    deep = dlrm(wide=False, dense=0, interaction="concat", table={})
    assert parameters(deep) == 3 * 6 * 8 + 8 + 8 * 7 + 7 + 7 + 1, "rows are no parameters"

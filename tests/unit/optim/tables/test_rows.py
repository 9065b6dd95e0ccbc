"""Rows are made by updates, read without being made, admitted, and forgotten."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor

from echelon.core.errors import CheckpointError
from echelon.core.types import RowRule, RowSpec
from echelon.optim.tables import RowGradients, Rows, merged

SGD = RowRule(name="sgd", lr=1.0)


def rows(rule: RowRule = SGD, **options: Any) -> Rows:
    return Rows(RowSpec(**{"name": "t", "width": 4, "seed": 1, "rule": rule, **options}))


def ids(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


def ones(count: int, width: int = 4) -> Tensor:
    return torch.ones(count, width)


def test_first_values_depend_on_seed_table_and_id_alone() -> None:
    one, other = rows(), rows()
    one.push(ids(5, 6, 7), ones(3) * 0)
    other.push(ids(7), ones(1) * 0)
    some = ids(7, 5, 99)
    assert torch.equal(one.pull(some), other.pull(some))
    assert not torch.equal(one.pull(some), rows(seed=2).pull(some))
    assert not torch.equal(one.pull(some), rows(name="u").pull(some))
    wide = rows(width=7).pull(ids(7))
    assert len(set(wide.flatten().tolist())) == 7


def test_first_values_are_spread_as_asked() -> None:
    drawn = rows(std=0.3).pull(torch.arange(20_000))
    assert abs(float(drawn.mean())) < 0.005
    assert float(drawn.std()) == pytest.approx(0.3, rel=0.02)
    columns = torch.corrcoef(torch.cat([drawn[:-1], drawn[1:]], 1).T) - torch.eye(8)
    assert float(columns.abs().max()) < 0.03, "neither columns nor neighbours go together"
    assert not rows(std=0.0).pull(torch.arange(10)).any()


def test_looking_makes_no_rows() -> None:
    store = rows()
    store.pull(torch.arange(1000))
    assert len(store) == 0
    store.push(ids(3), ones(1))
    assert len(store) == 1


def test_reads_into_memory_that_is_given() -> None:
    store, out = rows(), torch.empty(2, 4)
    store.push(ids(1), ones(1))
    assert store.pull(ids(1, 2), out=out) is out
    assert torch.equal(out, store.pull(ids(1, 2)))


def test_ids_pulled_before_others_came_find_their_rows() -> None:
    store, mine = rows(), ids(1, 2, 3)
    first = store.pull(mine)
    store.push(ids(2), ones(1))  # somebody else's
    store.push(mine, ones(3))
    moved = (first - store.pull(mine)).round()
    assert moved[:, 0].tolist() == [1, 2, 1]
    assert len(store) == 3


def test_ids_in_memory_that_others_write_to_are_kept_as_they_were() -> None:
    store, mine, theirs = rows(), ids(1, 2, 3), ids(1, 2, 3)
    copied = store.own(theirs)
    store.pull(mine)
    found = store.own(theirs)
    assert found is mine, "those of a pull need no copy"
    theirs.fill_(9)
    assert copied.tolist() == found.tolist() == [1, 2, 3]
    store.push(found, ones(3))
    assert torch.equal(store.pull(ids(9)), rows().pull(ids(9)))
    torch.testing.assert_close(store.pull(mine), rows().pull(mine) - 1)


@pytest.mark.parametrize("other", [(), (3,), (2, 3), (1, 4, 3), (3, 2, 1), (1, 2, 3, 3)])
def test_ids_are_those_of_a_pull_only_if_all_of_them_are(other: tuple[int, ...]) -> None:
    store = rows()
    store.pull(ids(1, 2, 3))
    store.pull(ids())
    given = ids(*other)
    found = store.own(given)
    assert found.tolist() == list(other)
    assert found is not given
    store.push(given.unique(), ones(len(given.unique())))
    assert len(store) == len(set(other))


def test_a_row_is_made_after_so_many_occurrences() -> None:
    store = rows(admit=3)
    store.push(ids(1, 2), ones(2), torch.tensor([2, 1]))
    assert (len(store), store.waiting) == (0, 2)
    assert not store.pull(ids(1, 2, 9)).any(), "zeros stand for what is not admitted"
    store.push(ids(1, 2), ones(2), torch.tensor([1, 1]))
    assert (len(store), store.waiting) == (1, 1)
    assert torch.equal(store.pull(ids(1)), rows().pull(ids(1))), "admitted with its first values"
    store.push(ids(1, 2), ones(2))
    torch.testing.assert_close(store.pull(ids(1)), rows().pull(ids(1)) - 1)
    assert (len(store), store.waiting) == (2, 0)


def test_a_row_is_forgotten_when_it_was_not_seen_for_long() -> None:
    store = rows(expire=2)
    store.push(ids(1, 2), ones(2), version=1)
    store.push(ids(2), ones(1), version=3)
    torch.testing.assert_close(store.pull(ids(1)), rows().pull(ids(1)) - 1)
    store.push(ids(2), ones(1), version=4)
    assert torch.equal(store.pull(ids(1)), rows().pull(ids(1))), "as if it had never been there"
    assert len(store) == 1
    store.push(ids(1), ones(1), version=5)
    torch.testing.assert_close(store.pull(ids(1)), rows().pull(ids(1)) - 1)


def test_what_waits_is_forgotten_too() -> None:
    store = rows(admit=2, expire=2)
    store.push(ids(1), ones(1), version=1)
    for version in (9, 10):
        store.push(ids(version), ones(1), version=version)
    assert store.waiting == 2
    store.push(ids(1), ones(1), version=11)
    assert (len(store), store.waiting) == (0, 3), "its count began anew"


def test_state_of_the_optimizer_begins_anew_with_a_row() -> None:
    store = rows(RowRule(name="adagrad", lr=1.0), expire=1)
    for version in (1, 2, 3):
        store.push(ids(1), ones(1) * 9, version=version)
    store.push(ids(2), ones(1), version=9)
    store.push(ids(1), ones(1), version=10)
    torch.testing.assert_close(store.pull(ids(1)), rows().pull(ids(1)) - 1)


@pytest.mark.parametrize("name", ["sgd", "adagrad", "adam"])
@pytest.mark.parametrize("options", [{}, {"admit": 2}, {"expire": 3}, {"admit": 3, "expire": 2}])
def test_going_on_from_saved_state_is_bit_identical(name: Any, options: dict[str, Any]) -> None:
    rule = RowRule(name=name, lr=0.1)
    whole, other = rows(rule, **options), rows(rule, seed=77, **options)
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randint(0, 40, (25,), generator=generator).unique() for _ in range(20)]
    for at, batch in enumerate(batches):
        if at == 10:
            other.load({key: value.clone() for key, value in whole.state().items()})
        for store in (whole, other)[: 1 + (at >= 10)]:
            store.push(batch, torch.full((len(batch), 4), at + 1.0))
    everything = torch.arange(50)
    assert torch.equal(whole.pull(everything), other.pull(everything))
    assert (len(whole), whole.waiting) == (len(other), other.waiting)
    assert whole.version == other.version == 20


def test_a_state_that_does_not_fit_changes_nothing() -> None:
    store = rows()
    store.push(ids(1), ones(1))
    before = store.pull(ids(1))
    adagrad = rows(RowRule(name="adagrad", lr=0.1)).state()
    with pytest.raises(CheckpointError, match="differ in square; was it saved with another opt"):
        store.load(adagrad)
    with pytest.raises(CheckpointError, match=r"rows is torch.float32 \(0, 8\), not .*\(0, 4\)"):
        store.load(rows(width=8).state())
    assert torch.equal(store.pull(ids(1)), before)


def test_gradients_of_several_places_are_added_up() -> None:
    parts = [
        RowGradients(ids(1, 2), ones(2), torch.tensor([1, 2])),
        RowGradients(ids(2, 9), ones(2) * 2, torch.tensor([3, 4])),
    ]
    found = merged(parts)
    assert found.ids.tolist() == [1, 2, 9]
    assert found.sums[:, 0].tolist() == [1, 3, 2]
    assert found.counts.tolist() == [1, 5, 4]


@pytest.mark.parametrize("wrong", [{"width": 0}, {"name": "a b"}, {"admit": 1 << 31}, {"std": -1}])
def test_a_table_that_cannot_be_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        rows(**wrong)


@settings(max_examples=60, deadline=None)
@given(
    admit=st.integers(1, 3),
    expire=st.none() | st.integers(1, 4),
    batches=st.lists(st.dictionaries(st.integers(-6, 6), st.integers(1, 2)), max_size=25),
)
def test_does_what_a_dictionary_of_rows_does(
    admit: int, expire: int | None, batches: list[dict[int, int]]
) -> None:
    store, model = rows(admit=admit, expire=expire), _Model(admit, expire)
    everything = torch.arange(-6, 7)
    for batch in batches:
        keys = torch.tensor(list(batch), dtype=torch.int64)
        pulled = store.pull(keys)
        counts = torch.tensor(list(batch.values()), dtype=torch.int64)
        store.push(keys, ones(len(keys)), counts)
        model.push(batch)
        assert pulled.shape == (len(keys), 4)
        torch.testing.assert_close(store.pull(everything), model.pull(everything))


class _Model:
    """The same in plain Python: changes by id, and counts."""

    def __init__(self, admit: int, expire: int | None) -> None:
        self.admit, self.expire, self.version = admit, expire, 0
        self.first = rows()
        self.changes: dict[int, float] = {}
        self.counts: dict[int, int] = {}
        self.seen: dict[int, int] = {}

    def push(self, batch: dict[int, int]) -> None:
        self.version += 1
        for key in list(self.seen):
            if self.expire is not None and self.seen[key] < self.version - self.expire:
                self.changes.pop(key, None)
                self.counts.pop(key, None)
                del self.seen[key]
        for key, count in batch.items():
            self.seen[key] = self.version
            if key in self.changes:
                self.changes[key] -= 1
                continue
            self.counts[key] = self.counts.get(key, 0) + count
            if self.counts[key] >= self.admit:
                self.changes[key] = 0.0 if self.admit > 1 else -1.0
                del self.counts[key]

    def pull(self, keys: Tensor) -> Tensor:
        found = self.first.pull(keys)
        for at, key in enumerate(keys.tolist()):
            if key in self.changes:
                found[at] += self.changes[key]
            elif self.admit > 1:
                found[at] = 0
        return found


@pytest.mark.parametrize("options", [{}, {"admit": 2}, {"expire": 2}])
def test_what_was_pulled_is_brought_up_to_date_by_its_changes(options: dict[str, Any]) -> None:
    store, wanted = rows(**options), torch.arange(-5, 25)
    store.push(ids(1, 2, 3), ones(3))
    generator = torch.Generator().manual_seed(3)
    for updates in (0, 1, 5, 40):
        turn, held = store.turn, store.pull(wanted)
        for _ in range(updates):
            some = torch.randperm(40, generator=generator)[:4].sort().values
            store.push(some, ones(4))
        places, new = store.changes(wanted, turn)
        held[places] = new
        assert torch.equal(held, store.pull(wanted))
        if "expire" not in options and updates < 2:
            assert len(places) <= 4 * updates
    turn = store.turn
    store.load(store.state())
    assert len(store.changes(wanted, turn)[0]) == len(wanted), "anything may be different"
    turn = store.turn
    store.push(ids(7, 3), ones(2))
    assert len(store.changes(wanted, turn)[0]) == len(wanted), "ids that are in no order"

"""A batch is a pure function of (seed, lease, shard), however it is read."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from echelon.core.types import Batch, Lease, Shard, Sparse
from echelon.data import loader as loading
from echelon.data.augment import Compose, Flip, Mixup
from echelon.data.ledger import Ledger, Proof
from echelon.data.loader import Loader, ranges
from echelon.data.order import Order
from echelon.data.sources import ColumnSource

N = 1003


def columns(n: int = N) -> ColumnSource:
    offsets = torch.arange(n + 1) * 2
    pairs = Sparse(torch.arange(2 * n), torch.ones(2 * n), offsets, 2 * n)
    return ColumnSource({"x": torch.arange(4 * n).view(n, 2, 2), "y": torch.arange(n), "s": pairs})


class Padded:
    """Row r has r % 7 + 1 numbers; a batch is padded to its longest row."""

    def __len__(self) -> int:
        return N

    def gather(self, rows: Tensor) -> Batch:
        lengths = rows % 7 + 1
        return {"x": rows[:, None] * (torch.arange(int(lengths.max())) < lengths[:, None])}


def numbers(micro: Iterable[Batch]) -> list[int]:
    return [row for batch in micro for row in batch["y"].tolist()]  # type: ignore[union-attr]


def same(left: list[Batch], right: list[Batch]) -> bool:
    def tensors(micro: list[Batch]) -> list[Tensor]:
        flat = [c for batch in micro for _, c in sorted(batch.items())]
        return [t for c in flat for t in (c[:3] if isinstance(c, Sparse) else [c])]

    pairs = itertools.zip_longest(tensors(left), tensors(right))
    return all(torch.equal(*pair) for pair in pairs) and len(left) == len(right)


def test_a_lease_is_read_in_the_order_of_its_epoch() -> None:
    loader = Loader(columns(), seed=5)
    order = Order(5, 3, N).rows(64, 96)
    assert numbers(loader.read(Lease(3, 64, 96))) == order.tolist()
    assert numbers(loader.read(Lease(4, 64, 96))) != order.tolist()


def test_without_shuffling_rows_come_as_they_are() -> None:
    loader = Loader(columns(), seed=5, shuffle=False)
    read = [numbers(micro) for _, micro in loader.stream(ranges(N, 256))]
    assert [len(part) for part in read] == [256, 256, 256, 235]
    assert list(itertools.chain(*read)) == list(range(N))


LOADERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulating": {"micro": 3},
    "one of three": {"shard": Shard(1, 3)},
    "all at once": {"micro": 2, "shard": Shard(0, 2), "augment": Compose([Flip(), Mixup(0.5)])},
    "augmented": {"augment": Compose([Flip(), Mixup(0.5)])},
}


@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.parametrize("chunk", [1, 3000, 1 << 20])
@pytest.mark.parametrize("options", LOADERS.values(), ids=LOADERS)
def test_chunks_and_threads_change_nothing(
    options: dict[str, Any], chunk: int, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "CHUNK_BYTES", chunk)
    monkeypatch.setattr(loading, "WORTH", -1.0)
    single = Loader(columns(), seed=1, **options)
    streaming = Loader(columns(), seed=1, prefetch=depth, **options)
    leases = [*Ledger(N).leases(0, 50), *Ledger(N).leases(1, 64)]
    streamed = list(streaming.stream(leases))
    assert [lease for lease, _ in streamed] == leases
    for lease, micro in streamed:
        assert same(micro, single.read(lease)), lease


@pytest.mark.parametrize("depth", [0, 2])
def test_a_source_that_pads_is_read_batch_by_batch(
    depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "WORTH", -1.0)
    single, streaming = Loader(Padded(), seed=1), Loader(Padded(), seed=1, prefetch=depth)
    for lease, micro in streaming.stream(Ledger(N).leases(0, 3)):
        assert same(micro, single.read(lease))


def test_leases_that_came_back_are_read_with_the_others() -> None:
    loader = Loader(columns(), seed=2)
    scattered = [Lease(0, 900, 930), Lease(0, 10, 20), Lease(0, 20, 25), Lease(0, 0, 10)]
    order = Order(2, 0, N)
    loader.read(scattered[0])  # so that the stream knows how large a chunk may be
    for lease, micro in loader.stream(scattered):
        assert numbers(micro) == order.rows(lease.start, lease.stop).tolist()


@pytest.mark.parametrize("count", [2, 3, 5, 64])
def test_shards_of_a_lease_are_its_parts(count: int) -> None:
    lease = Lease(1, 100, 132)
    parts = [Loader(columns(), seed=1, shard=Shard(i, count)).read(lease) for i in range(count)]
    sizes = [len(numbers(part)) for part in parts]
    assert max(sizes) - min(sizes) <= 1
    assert list(itertools.chain(*map(numbers, parts))) == Order(1, 1, N).rows(100, 132).tolist()


def test_a_member_without_samples_has_no_batches() -> None:
    loader = Loader(columns(), seed=1, shard=Shard(0, 4))
    assert loader.read(Lease(0, 0, 3)) == []
    leases = [Lease(0, 0, 2), Lease(0, 2, 40), Lease(0, 40, 42)]
    assert [len(numbers(micro)) for _, micro in loader.stream(leases)] == [0, 9, 0]


@pytest.mark.parametrize(("size", "parts"), [(12, [4, 4, 4]), (11, [3, 4, 4]), (2, [1, 1])])
def test_micro_batches_split_a_batch(size: int, parts: list[int]) -> None:
    whole = Loader(columns(), seed=1).read(Lease(0, 0, size))
    micro = Loader(columns(), seed=1, micro=3).read(Lease(0, 0, size))
    assert [len(numbers([batch])) for batch in micro] == parts
    assert numbers(micro) == numbers(whole)


def test_accumulation_does_not_change_augmentation() -> None:
    augment = Compose([Flip(), Mixup(0.5)])
    whole = Loader(columns(), seed=1, augment=augment).read(Lease(0, 0, 30))
    micro = Loader(columns(), seed=1, augment=augment, micro=4).read(Lease(0, 0, 30))
    for name in ("x", "y", "y2", "mix"):
        assert torch.equal(torch.cat([batch[name] for batch in micro]), whole[0][name])  # type: ignore[misc, arg-type]


def test_draws_belong_to_positions_not_to_members() -> None:
    whole = Loader(columns(), seed=1, augment=Flip()).read(Lease(2, 10, 50))[0]["x"]
    parts = [
        Loader(columns(), seed=1, augment=Flip(), shard=Shard(i, 3)).read(Lease(2, 10, 50))[0]["x"]
        for i in range(3)
    ]
    assert torch.equal(torch.cat(parts), whole)  # type: ignore[arg-type]


def test_chunks_hold_as_many_leases_as_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    gathered: list[int] = []

    class Watched(ColumnSource):
        def gather(self, rows: Tensor) -> Batch:
            gathered.append(len(rows))
            return super().gather(rows)

    monkeypatch.setattr(loading, "CHUNK_BYTES", 80 * 8)
    monkeypatch.setattr(loading, "CHUNK_LEASES", 4)
    loader = Loader(Watched({"y": torch.arange(200)}), seed=0, prefetch=0)
    list(loader.stream([*Ledger(200).leases(0, 30), *Ledger(200).leases(1, 10)]))
    assert gathered == [30, 60, 60, 50, 40, 40, 40, 40, 40]


def test_batches_outlive_the_stream() -> None:
    loader = Loader(columns(), seed=3)
    kept = [(lease, micro) for lease, micro in loader.stream(Ledger(N).leases(0, 10))]
    again = Loader(columns(), seed=3)
    assert all(same(micro, again.read(lease)) for lease, micro in kept)


@pytest.mark.parametrize("depth", [0, 2])
def test_an_epoch_broken_off_and_resumed_is_consumed_once(
    depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "WORTH", -1.0)
    monkeypatch.setattr(loading, "CHUNK_BYTES", 5000)
    ledger, loader = Ledger(N), Loader(columns(), seed=3, prefetch=depth)
    seen: list[int] = []
    for stop in (7, 8, 20, None):
        stream = loader.stream(ledger.leases(0, 32))
        for lease, micro in itertools.islice(stream, stop):
            ledger.commit(lease, 1)
            seen += numbers(micro)
        stream.close()
        ledger.give_back_all()
    assert seen == Order(3, 0, N).rows(0, N).tolist()
    assert ledger.proof(0) == Proof(N, once=N, twice=0, never=0)
    assert not [t for t in threading.enumerate() if t.name == "echelon-prefetch"]


def test_an_error_of_the_source_keeps_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "WORTH", -1.0)

    class Broken(Padded):
        def gather(self, rows: Tensor) -> Batch:
            if 77 in rows.tolist():
                raise OSError("record 77 is unreadable")
            return super().gather(rows)

    loader = Loader(Broken(), seed=0, shuffle=False)
    stream = loader.stream(ranges(N, 10))
    assert [next(stream)[0].start for _ in range(7)] == [0, 10, 20, 30, 40, 50, 60]
    with pytest.raises(OSError, match="record 77"):
        next(stream)


def test_a_device_gets_its_batches_from_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned = []

    def pin_memory(tensor: Tensor) -> Tensor:
        pinned.append(tensor)
        return tensor

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    source = ColumnSource({"x": torch.zeros(9, 2), "y": torch.zeros(9)})
    batch = Loader(source, seed=0, device=torch.device("meta")).read(Lease(0, 0, 8))[0]
    assert [c.device.type for c in batch.values() if isinstance(c, Tensor)] == ["meta", "meta"]
    assert len(pinned) == 2


def test_the_random_numbers_of_the_user_are_left_alone() -> None:
    torch.manual_seed(1)
    np.random.seed(1)
    states = torch.get_rng_state(), repr(np.random.get_state())
    list(Loader(columns(), seed=0, augment=Flip()).stream(Ledger(N).leases(0, 64)))
    assert torch.equal(torch.get_rng_state(), states[0])
    assert repr(np.random.get_state()) == states[1]


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"shard": Shard(2, 2)}, "is not a part of a batch"),
        ({"shard": Shard(-1, 2)}, "is not a part of a batch"),
        ({"micro": 0}, "0 micro-batches"),
    ],
)
def test_impossible_loaders_are_refused(options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(AssertionError, match=complaint):
        Loader(columns(), seed=0, **options)


def test_a_lease_beyond_the_data_is_refused() -> None:
    with pytest.raises(AssertionError, match=r"positions up to 1010 of 1003 samples"):
        Loader(columns(), seed=0).read(Lease(0, 1000, 1010))

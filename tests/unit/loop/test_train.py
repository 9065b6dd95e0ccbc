"""The loop hears requests with refused updates, and passes on the next batch ahead of time."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from echelon.core.errors import NonFiniteError
from echelon.core.types import Ask, Lease
from echelon.loop import train
from echelon.loop.train import told_ahead


@pytest.mark.parametrize(("asked", "made"), [(0, 3), (int(Ask.SIGNAL), 1)])
def test_what_all_are_asked_for_is_heard_with_a_refusal(
    monkeypatch: pytest.MonkeyPatch, asked: int, made: int
) -> None:
    tried: list[Lease] = []

    def refuse(lease: Lease) -> Any:
        tried.append(lease)
        error = NonFiniteError("the loss is nan")
        error.asked = asked
        raise error

    leases = [Lease(0, start, start + 5) for start in (0, 5, 10)]
    monkeypatch.setattr(train, "told_ahead", lambda _, __: ((lease, []) for lease in leases))
    monkeypatch.setattr(train, "skip_or_raise", lambda *_: None)
    run: Any = SimpleNamespace(heard=0, batch_size=5, meter=None, glance=None)
    run.strategy = SimpleNamespace(apart=True, compute=lambda _: None, update=refuse)
    run.loader = SimpleNamespace(stream=lambda _: (lease for lease in leases))
    run.ledger = SimpleNamespace(commit=None, leases=lambda *_: leases, give_back_all=lambda: None)
    run.heed = lambda wish: setattr(run, "heard", wish)
    assert train._pass(run, 0) is None
    assert len(tried) == made
    assert run.heard == asked


class _Foreseeing:
    """A strategy that hears of batches to come."""

    remote = True

    def __init__(self, *, foresees: bool) -> None:
        self.foresees = foresees
        self.heard: list[object] = []

    def expect(self, micro: object) -> None:
        self.heard.append(micro)


@pytest.mark.parametrize("foresees", [True, False])
def test_the_next_batch_is_told_before_one_is_handed_out(foresees: bool) -> None:
    strategy = _Foreseeing(foresees=foresees)
    batches: list[Any] = [(Lease(0, at, at + 1), [at]) for at in range(3)]
    seen = []
    for lease, micro in told_ahead(cast(Any, strategy), iter(batches)):
        seen.append((lease, micro))
        assert strategy.heard == ([[1], [2], ()][: len(seen)] if foresees else [])
    assert seen == batches

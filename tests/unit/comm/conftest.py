"""Fixtures of the tests of collectives and gradient sums."""

from __future__ import annotations

import pytest

from echelon.comm import collectives, gradient_sum


@pytest.fixture
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several buckets, and several pieces of each, of few bytes; inherited by the members."""
    monkeypatch.setattr(collectives, "SHARED_BUCKET", 64 * 1024)
    monkeypatch.setattr(gradient_sum, "NETWORK_BUCKET", 64 * 1024)
    monkeypatch.setattr(gradient_sum, "PIECE", 8 * 1024)

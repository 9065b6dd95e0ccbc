"""What several tests of sums share."""

from __future__ import annotations

import pytest

from echelon.comm import local, private, sliced


@pytest.fixture
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several buckets, and several pieces of each, of few bytes; inherited by the members."""
    monkeypatch.setattr(local, "BUCKET", 64 * 1024)
    monkeypatch.setattr(private, "BUCKET", 64 * 1024)
    monkeypatch.setattr(sliced, "PIECE", 8 * 1024)

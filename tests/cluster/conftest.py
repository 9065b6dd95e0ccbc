"""What tests of several processes share."""

from __future__ import annotations

import pytest

from echelon.cluster import supervisor
from tests.e2e.forks import serve


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who cannot hear SIGTERM is ended sooner, where that is not what is tried."""
    monkeypatch.setattr(supervisor, "TERM_SECONDS", 0.2)


@pytest.fixture(scope="session")
def forked_commands() -> None:
    """Commands begin with torch imported."""
    serve()

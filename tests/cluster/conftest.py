"""Fixtures for tests of several processes."""

from __future__ import annotations

import pytest
from torch import Tensor

from echelon.cluster import supervisor
from tests.cluster.elastic import undisturbed
from tests.e2e.forks import serve


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who cannot hear SIGTERM is ended sooner, where that is not what is tried."""
    monkeypatch.setattr(supervisor, "TERM_SECONDS", 0.2)


@pytest.fixture(scope="session")
def forked_commands() -> None:
    """Commands begin with torch imported."""
    serve()


@pytest.fixture(scope="session")
def weights(tmp_path_factory: pytest.TempPathFactory, forked_commands: None) -> dict[str, Tensor]:
    """What the job of `elastic.py` ends on if nothing happens to it."""
    del forked_commands
    return undisturbed(tmp_path_factory.mktemp("alone"))

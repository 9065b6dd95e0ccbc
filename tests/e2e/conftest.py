"""What tests of whole runs share."""

from __future__ import annotations

import pytest

from .forks import serve


@pytest.fixture(scope="session", autouse=True)
def _commands_are_forked() -> None:
    serve()

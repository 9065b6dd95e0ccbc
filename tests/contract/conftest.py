"""Whatever a test has started is ended with it."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from . import serving
from .jobs import close_all


@pytest.fixture(autouse=True)
def _ends_servers() -> Iterator[None]:
    yield
    close_all()
    serving.end_all()
    gc.collect()

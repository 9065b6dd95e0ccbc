"""Whatever a test has started is ended with it."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from . import serving


@pytest.fixture(autouse=True)
def _ends_servers() -> Iterator[None]:
    yield
    serving.close_all()
    serving.end_all()
    gc.collect()

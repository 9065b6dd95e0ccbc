"""The server processes that a test starts end with it."""

from __future__ import annotations

from tests.contract.conftest import _ends_servers

__all__ = ["_ends_servers"]

"""Descriptors that belong to one process: whoever is forked later gives its copies back.

A copy in a loader's worker would keep a dead member's connection open, and the others waiting.
"""

from __future__ import annotations

import os
from typing import Protocol
from weakref import WeakSet


class Owner(Protocol):
    def close(self) -> None: ...


_OWNERS: WeakSet[Owner] = WeakSet()
_HOOKED: list[bool] = []


def close_in_children(owner: Owner) -> None:
    if not _HOOKED:
        _HOOKED.append(True)
        os.register_at_fork(after_in_child=_forked)
    _OWNERS.add(owner)


def _forked() -> None:
    for owner in list(_OWNERS):
        owner.close()
    _OWNERS.clear()

"""The random generators that a run, or a data set of the user's, may draw from."""

from __future__ import annotations

import random
import zlib
from typing import Any, TypeAlias, cast

import numpy as np
import torch
from numpy.typing import NDArray

_NumpyState: TypeAlias = tuple[str, NDArray[np.uint32], int, int, float]


def seed(number: int) -> None:
    """Start all of them alike."""
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number % 2**32)


def part_ways(number: int, member: int, version: int) -> None:
    """Let a member that reads other samples than the first draw other numbers than it."""
    if member > 0:
        seed(zlib.crc32(f"{number} {member} {version}".encode()))


def capture() -> dict[str, Any]:
    """Torch's generators, Python's and NumPy's global one."""
    name, keys, place, has_spare, spare = cast(_NumpyState, np.random.get_state(legacy=True))
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(keys.astype(np.int64)), place, has_spare, spare),
    }


def restore(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    if state["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"])
    random.setstate(state["python"])
    name, keys, place, has_spare, spare = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), place, has_spare, spare))

"""Echelon: train neural networks on the machines people really have.

    import echelon
    result = echelon.train("classify", data={"name": "digits"}, epochs=20)

Nothing heavy is imported until it is used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_WHERE = {
    "EchelonError": "echelon.core.errors",
    "Job": "echelon.core.config",
    "Prepared": "echelon.data.prepare.prepared",
    "Result": "echelon.loop.result",
    "Task": "echelon.core.task",
    "cross_entropy": "echelon.task.losses",
    "binary_cross_entropy": "echelon.task.losses",
    "squared_error": "echelon.task.losses",
    "prepare": "echelon.data.prepare.preparing",
    "train": "echelon.api",
}

__all__ = [
    "EchelonError",
    "Job",
    "Prepared",
    "Result",
    "Task",
    "__version__",
    "binary_cross_entropy",
    "cross_entropy",
    "prepare",
    "squared_error",
    "train",
]

if TYPE_CHECKING:
    from echelon.api import train
    from echelon.core.config import Job
    from echelon.core.errors import EchelonError
    from echelon.core.task import Task
    from echelon.data.prepare.prepared import Prepared
    from echelon.data.prepare.preparing import prepare
    from echelon.loop.result import Result
    from echelon.task.losses import binary_cross_entropy, cross_entropy, squared_error


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'echelon' has no attribute {name!r}")
    return getattr(importlib.import_module(_WHERE[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)

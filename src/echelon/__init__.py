"""Echelon: train neural networks on the machines people really have.

    import echelon
    result = echelon.train("classify", data={"name": "digits"}, epochs=20)

Nothing heavy is imported until it is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from echelon.core.lazy import lazily

__version__ = "0.1.0"

__all__ = [
    "EchelonError",
    "Interrupted",
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
    from echelon.core.errors import EchelonError, Interrupted
    from echelon.core.interfaces import Task
    from echelon.data.prepare import prepare
    from echelon.data.prepare.encoders import Prepared
    from echelon.loop.driver import Result
    from echelon.task.losses import binary_cross_entropy, cross_entropy, squared_error

__getattr__ = lazily(
    __name__,
    {
        "api": ("train",),
        "core.config": ("Job",),
        "core.errors": ("EchelonError", "Interrupted"),
        "core.interfaces": ("Task",),
        "data.prepare": ("prepare",),
        "data.prepare.encoders": ("Prepared",),
        "loop.driver": ("Result",),
        "task.losses": ("binary_cross_entropy", "cross_entropy", "squared_error"),
    },
)


def __dir__() -> list[str]:
    return sorted(__all__)

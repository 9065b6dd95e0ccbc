"""Where the figures can go besides: TensorBoard, MLflow, Weights & Biases."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib import import_module
from pathlib import Path

from echelon.core.errors import ConfigError, MissingExtra, unknown
from echelon.core.protocols import Observer
from echelon.track.behind import Behind

_EXPORTERS = {
    "tensorboard": ("echelon.track.exporters.tensorboard", "TensorBoard"),
    "mlflow": ("echelon.track.exporters.mlflow", "MLflow"),
    "wandb": ("echelon.track.exporters.wandb", "Wandb"),
}


def exporter(name: str, run_folder: Path) -> Observer:
    """An observer that exports, on a thread of its own."""
    return Behind(_maker(name)(run_folder))


def check_exporters(names: Iterable[str]) -> None:
    """Fail before there is a run, and by name, if a library is not installed."""
    for name in names:
        _maker(name)


def _maker(name: str) -> Callable[[Path], Observer]:
    if name not in _EXPORTERS:
        raise ConfigError(unknown("exporter", name, _EXPORTERS), ("track", "exporters"))
    module, kind = _EXPORTERS[name]
    try:
        make: Callable[[Path], Observer] = getattr(import_module(module), kind)
    except ImportError as error:
        raise MissingExtra(f"exporter {name!r}", name) from error
    return make


__all__ = ["check_exporters", "exporter"]

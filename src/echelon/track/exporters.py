"""Exporters: observers that also send a run to TensorBoard, MLflow or Weights & Biases."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from echelon.core.errors import ConfigError, MissingExtra, unknown
from echelon.core.format import to_json
from echelon.core.interfaces import Observer
from echelon.track.observers import Behind

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


def exporter(name: str, run_folder: Path) -> Observer:
    """Return an exporter that runs on a thread of its own."""
    return Behind(_maker(name)(run_folder))


def check_exporters(names: Iterable[str]) -> None:
    """Raise before the run starts if an exporter is unknown or its library is missing."""
    for name in names:
        _maker(name)


def _maker(name: str) -> Callable[[Path], Observer]:
    if name not in _EXPORTERS:
        raise ConfigError(unknown("exporter", name, _EXPORTERS), ("track", "exporters"))
    make, libraries = _EXPORTERS[name]
    try:
        for library in libraries:
            import_module(library)
    except ImportError as error:
        raise MissingExtra(f"exporter {name!r}", name) from error
    return make


class TensorBoard:
    """Event files in the run's folder: `tensorboard --logdir runs` shows them."""

    def __init__(self, run_folder: Path) -> None:
        self._folder = run_folder / "tensorboard"
        self._writer: SummaryWriter | None = None

    def started(self, run: str, facts: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(self._folder))
        self._text("run", f"{run}\n\n```json\n{to_json(facts)}\n```", 0)

    def progressed(self, step: int, values: Mapping[str, float]) -> None: ...

    def logged(self, step: int, values: Mapping[str, float]) -> None:
        self._scalars("train", step, values)

    def evaluated(self, step: int, values: Mapping[str, float]) -> None:
        self._scalars("valid", step, values)

    def noticed(self, step: int, message: str) -> None:
        self._text("notices", message, step)

    def finished(self, status: str, summary: Mapping[str, Any]) -> None:
        if self._writer is not None:
            self._text("result", f"{status}\n\n```json\n{to_json(summary)}\n```", 0)
            self._writer.close()
            self._writer = None

    def _scalars(self, part: str, step: int, values: Mapping[str, float]) -> None:
        assert self._writer is not None, "started comes first"
        for name, value in values.items():
            self._writer.add_scalar(f"{part}/{name}", value, step)

    def _text(self, tag: str, text: str, step: int) -> None:
        assert self._writer is not None, "started comes first"
        self._writer.add_text(tag, text, step)


class MLflow:
    """Runs in MLflow: a database in the run's folder, or the server that MLflow is set up for.

    Sends metrics in batches, because each request takes MLflow several milliseconds.
    """

    def __init__(self, run_folder: Path) -> None:
        self._folder = run_folder.resolve()
        self._client: Any = None
        self._run = ""
        self._pending: list[Any] = []
        self._sent = time.monotonic()

    def started(self, run: str, facts: Mapping[str, Any]) -> None:
        import mlflow
        from mlflow.entities import Param
        from mlflow.tracking import is_tracking_uri_set

        logging.getLogger("mlflow.store.db.utils").setLevel(
            logging.WARNING
        )  # silence its table creation
        # None leaves the choice to MLflow and its own settings.
        own = None if is_tracking_uri_set() else f"sqlite:///{self._folder / 'mlflow.db'}"
        self._client = mlflow.MlflowClient(tracking_uri=own)
        made = self._client.create_run(self._experiment(own is not None), run_name=run)
        self._run = made.info.run_id
        params = [Param(key, str(value)[:_LONGEST_VALUE]) for key, value in facts.items()]
        self._client.log_batch(self._run, params=params)

    def progressed(self, step: int, values: Mapping[str, float]) -> None: ...

    def logged(self, step: int, values: Mapping[str, float]) -> None:
        self._add("train", step, values)

    def evaluated(self, step: int, values: Mapping[str, float]) -> None:
        self._add("valid", step, values)

    def noticed(self, step: int, message: str) -> None:
        self._client.set_tag(self._run, f"notice.{step}", message)

    def finished(self, status: str, summary: Mapping[str, Any]) -> None:
        if self._run:
            self._send()
            self._client.set_tag(self._run, "summary", to_json(summary))
            self._client.set_terminated(self._run, _STATUS.get(status, "FAILED"))

    def _experiment(self, ours: bool) -> str:
        found = self._client.get_experiment_by_name(_EXPERIMENT)
        if found is not None:
            return str(found.experiment_id)
        place = (self._folder / "mlflow").as_uri() if ours else None
        return str(self._client.create_experiment(_EXPERIMENT, artifact_location=place))

    def _add(self, part: str, step: int, values: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        self._pending += [Metric(f"{part}/{n}", v, now, step) for n, v in values.items()]
        if len(self._pending) >= _BATCH or time.monotonic() - self._sent > _SECONDS:
            self._send()

    def _send(self) -> None:
        while self._pending:
            self._client.log_batch(self._run, metrics=self._pending[:_BATCH])
            del self._pending[:_BATCH]
        self._sent = time.monotonic()


_EXPERIMENT = "echelon"


_BATCH = 500
"""Metrics per request; MLflow takes at most 1000."""


_SECONDS = 2.0


_LONGEST_VALUE = 500


_STATUS = {"done": "FINISHED", "stopped": "KILLED"}


class Wandb:
    """Runs in Weights & Biases: offline in the run's folder, unless the user is logged in.

    Runs quietly and without W&B's capture of the terminal, because progress is shown already.
    """

    def __init__(self, run_folder: Path) -> None:
        self._folder = run_folder
        self._run: Any = None

    def started(self, run: str, facts: Mapping[str, Any]) -> None:
        import wandb

        # None leaves the choice to W&B and its own settings.
        mode = None if wandb.login(prompt=False) else "offline"
        self._run = wandb.init(
            project=_PROJECT,
            name=run,
            dir=str(self._folder),
            config=dict(facts),
            mode=mode,
            settings=wandb.Settings(console="off", silent=True),
        )

    def progressed(self, step: int, values: Mapping[str, float]) -> None: ...

    def logged(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({f"train/{name}": value for name, value in values.items()}, step=step)

    def evaluated(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({f"valid/{name}": value for name, value in values.items()}, step=step)

    def noticed(self, step: int, message: str) -> None:
        self._run.alert(title="Echelon", text=f"step {step}: {message}")

    def finished(self, status: str, summary: Mapping[str, Any]) -> None:
        if self._run is not None:
            self._run.summary.update({"status": status, **summary})
            self._run.finish(exit_code=0 if status == "done" else 1)


_PROJECT = "echelon"


_EXPORTERS: Mapping[str, tuple[Callable[[Path], Observer], Sequence[str]]] = {
    "tensorboard": (TensorBoard, ("torch.utils.tensorboard",)),
    "mlflow": (MLflow, ("mlflow", "sqlalchemy", "alembic")),  # its small package lacks the last two
    "wandb": (Wandb, ("wandb",)),
}
"""Name → class and the libraries it needs."""

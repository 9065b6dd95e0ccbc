"""Runs in MLflow: a database in the run's folder, or the server MLflow was told to use."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import mlflow
from mlflow.entities import Metric, Param
from mlflow.tracking import is_tracking_uri_set

from echelon.track.text import to_json

for _needed in ("sqlalchemy", "alembic"):  # by its database; its small package brings neither
    import_module(_needed)

_EXPERIMENT = "echelon"
_BATCH = 500
"""Metrics per request; MLflow takes at most 1000."""
_SECONDS = 2.0
_LONGEST_VALUE = 500
_STATUS = {"done": "FINISHED", "stopped": "KILLED"}


class MLflow:
    """Sends metrics in batches: each request costs MLflow several milliseconds."""

    def __init__(self, run_folder: Path) -> None:
        self._folder = run_folder.resolve()
        self._client: Any = None
        self._run = ""
        self._pending: list[Any] = []
        self._sent = time.monotonic()

    def started(self, run: str, facts: Mapping[str, Any]) -> None:
        logging.getLogger("mlflow.store.db.utils").setLevel(logging.WARNING)  # its table making
        # None leaves the choice to MLflow, which knows its own settings.
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
        now = int(time.time() * 1000)
        self._pending += [Metric(f"{part}/{n}", v, now, step) for n, v in values.items()]
        if len(self._pending) >= _BATCH or time.monotonic() - self._sent > _SECONDS:
            self._send()

    def _send(self) -> None:
        while self._pending:
            self._client.log_batch(self._run, metrics=self._pending[:_BATCH])
            del self._pending[:_BATCH]
        self._sent = time.monotonic()

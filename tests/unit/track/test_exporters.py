"""Exporters: found by name, missing by name; the two too large to install, by their calls."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from echelon.core.errors import ConfigError, MissingExtra
from echelon.core.interfaces import Observer
from echelon.track.exporters import check_exporters, exporter

_SUMMARY = {"run": "digits-0001", "steps": 100, "metrics": {"accuracy": 0.5}}


@pytest.fixture(autouse=True)
def _fresh_exporters() -> Iterator[None]:
    """Each test imports its exporter anew, with the libraries the test says are there."""
    _forget("echelon.track.exporters.")
    yield
    _forget("echelon.track.exporters.")


def _forget(prefix: str) -> None:
    for name in [name for name in sys.modules if name.startswith(prefix)]:
        del sys.modules[name]


def _tell(observer: Observer) -> None:
    observer.started("digits-0001", {"task": "digits", "epochs": 2})
    for step in (50, 100):
        observer.logged(step, {"loss": 1 / step, "lr": 0.1})
    observer.evaluated(100, {"loss": 0.5, "accuracy": 0.75})
    observer.noticed(100, "careful")
    observer.finished("done", _SUMMARY)


@pytest.mark.parametrize(
    ("name", "library"), [("tensorboard", "tensorboard"), ("mlflow", "mlflow"), ("wandb", "wandb")]
)
def test_a_missing_library_names_the_extra(
    name: str, library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = (library, f"torch.utils.{library}")
    for module in [name for name in sys.modules if name.startswith(loaded)]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(MissingExtra, match=rf"pip install 'echelon\[{name}\]'"):
        exporter(name, tmp_path)
    with pytest.raises(MissingExtra):
        check_exporters([name])


def test_an_unknown_exporter_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'tensorboard'") as caught:
        exporter("tensorbord", tmp_path)
    assert caught.value.path == ("track", "exporters")


def test_nothing_to_check_is_fine() -> None:
    check_exporters([])


@pytest.mark.parametrize("logged_in", [True, False])
def test_wandb_is_offline_unless_the_user_is_logged_in(
    logged_in: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, Any]] = []
    run = SimpleNamespace(
        log=lambda values, step: calls.append(("log", (step, values))),
        alert=lambda title, text: calls.append(("alert", (title, text))),
        finish=lambda exit_code: calls.append(("finish", exit_code)),
        summary={},
    )

    def init(**options: Any) -> SimpleNamespace:
        calls.append(("init", options))
        return run

    fake = ModuleType("wandb")
    vars(fake).update(
        login=lambda **_how: logged_in,
        Settings=lambda **settings: settings,
        init=init,
    )
    monkeypatch.setitem(sys.modules, "wandb", fake)
    _tell(exporter("wandb", tmp_path))
    made = calls[0][1]
    assert (made["mode"], made["name"]) == (None if logged_in else "offline", "digits-0001")
    assert made["dir"] == str(tmp_path)
    assert calls[1:] == [
        ("log", (50, {"train/loss": 0.02, "train/lr": 0.1})),
        ("log", (100, {"train/loss": 0.01, "train/lr": 0.1})),
        ("log", (100, {"valid/loss": 0.5, "valid/accuracy": 0.75})),
        ("alert", ("Echelon", "step 100: careful")),
        ("finish", 0),
    ]
    assert run.summary == {"status": "done", **_SUMMARY}


class _Client:
    """What MLflow's client is asked to do."""

    def __init__(self, tracking_uri: str | None) -> None:
        self.uri = tracking_uri
        self.metrics: list[tuple[Any, ...]] = []
        self.params: dict[str, str] = {}
        self.tags: dict[str, str] = {}
        self.batches = 0
        self.ended = ""

    def get_experiment_by_name(self, _name: str) -> None:
        return None

    def create_experiment(self, name: str, artifact_location: str | None) -> str:
        self.place = artifact_location
        return f"id of {name}"

    def create_run(self, experiment: str, run_name: str) -> SimpleNamespace:
        assert experiment == "id of echelon"
        return SimpleNamespace(info=SimpleNamespace(run_id=f"id of {run_name}"))

    def log_batch(self, run: str, metrics: Any = (), params: Any = ()) -> None:
        assert run == "id of digits-0001"
        self.batches += 1
        self.metrics += metrics
        self.params.update(params)

    def set_tag(self, _run: str, key: str, value: str) -> None:
        self.tags[key] = value

    def set_terminated(self, _run: str, status: str) -> None:
        self.ended = status


@pytest.fixture
def mlflow(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A module with MLflow's names; the client made is kept as `client`."""
    kept = SimpleNamespace(client=None, uri_set=False)

    def make(tracking_uri: str | None) -> _Client:
        client = kept.client = _Client(tracking_uri)
        return client

    modules = {name: ModuleType(name) for name in ("mlflow", "mlflow.entities", "mlflow.tracking")}
    vars(modules["mlflow"]).update(MlflowClient=make)
    vars(modules["mlflow.entities"]).update(
        Metric=lambda key, value, _time, step: (key, value, step), Param=lambda k, v: (k, v)
    )
    vars(modules["mlflow.tracking"]).update(is_tracking_uri_set=lambda: kept.uri_set)
    for name in ("sqlalchemy", "alembic"):
        modules[name] = ModuleType(name)
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return kept


def test_mlflow_keeps_a_database_in_the_run_s_folder(
    mlflow: SimpleNamespace, tmp_path: Path
) -> None:
    _tell(exporter("mlflow", tmp_path))
    client = mlflow.client
    assert client.uri == f"sqlite:///{tmp_path.resolve()}/mlflow.db"
    assert client.place == (tmp_path.resolve() / "mlflow").as_uri()
    assert client.params == {"task": "digits", "epochs": "2"}
    assert client.metrics == [
        ("train/loss", 0.02, 50),
        ("train/lr", 0.1, 50),
        ("train/loss", 0.01, 100),
        ("train/lr", 0.1, 100),
        ("valid/loss", 0.5, 100),
        ("valid/accuracy", 0.75, 100),
    ]
    assert client.batches == 2, "facts, then all metrics at once"
    assert client.tags["notice.100"] == "careful"
    assert client.ended == "FINISHED"


def test_mlflow_s_own_server_is_left_to_mlflow(mlflow: SimpleNamespace, tmp_path: Path) -> None:
    mlflow.uri_set = True
    _tell(exporter("mlflow", tmp_path))
    assert (mlflow.client.uri, mlflow.client.place) == (None, None)


def test_mlflow_without_its_database_names_the_extra(
    mlflow: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert mlflow.client is None
    monkeypatch.setitem(sys.modules, "sqlalchemy", None)
    with pytest.raises(MissingExtra, match=r"echelon\[mlflow\]"):
        exporter("mlflow", tmp_path)

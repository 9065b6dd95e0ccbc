"""A Ray cluster: the one this machine belongs to, one at an address, or one that is started here.

Imports Ray only on use.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from echelon.core.errors import MissingExtra, UserError
from echelon.core.process import interrupts_wait
from echelon.data.prepare.answers import WorkerError
from echelon.data.prepare.on_ray.processes import Processes

LOCAL, AUTO = "local", "auto"
_REACH_SECONDS = 10.0
_END_SECONDS = 10.0
_STORE_MIN, _STORE_EACH = 256 << 20, 128 << 20


def address_of(on: str) -> str:
    """`ray`, `ray:local` or `ray:HOST:PORT` → where it is; checks that Ray is there to be used."""
    kind, _, address = on.partition(":")
    if address.startswith("//"):
        raise UserError(
            f"on is {on!r}: a Ray client cannot do this; begin on a machine of the cluster, "
            f"with ray or ray:HOST:PORT"
        )
    host, _, port = address.rpartition(":")
    known = address in ("", LOCAL) or (host and port.isdecimal())
    if kind != "ray" or not known:
        raise UserError(f"on is {on!r}: it must be ray, ray:local or ray:HOST:PORT")
    if find_spec("ray") is None or find_spec("pandas") is None:
        raise MissingExtra(f"on={on}", "ray")
    return address or AUTO


@contextmanager
def connected(address: str, workers: int | None) -> Iterator[None]:
    """Ray is there; what was begun here is ended here."""
    import ray

    with ExitStack() as stack:
        if ray.is_initialized():
            if address != AUTO:
                raise WorkerError(
                    f"this process is on a Ray cluster already, not on {address}: say on='ray'"
                )
        elif address == LOCAL:
            stack.enter_context(_own(workers or 1))
        else:
            _reach(address)
            _begin(address)
            stack.callback(ray.shutdown)
        stack.enter_context(_silent())
        yield


def _begin(address: str, **settings: Any) -> None:
    import ray

    os.putenv("RAY_BACKEND_LOG_LEVEL", "fatal")  # else it tells the terminal of its insides
    try:
        with interrupts_wait(), _handlers_kept(), _mute():  # half a cluster would be nobody's
            ray.init(
                address=address, logging_level=logging.CRITICAL, log_to_driver=False, **settings
            )
    except (ConnectionError, RuntimeError, ValueError, TimeoutError, OSError) as error:
        ray.shutdown()
        if address == AUTO and isinstance(error, ConnectionError):
            raise WorkerError(
                "no Ray cluster runs on this machine: begin one with `ray start`, name one with "
                "ray:HOST:PORT, or say ray:local for this machine alone"
            ) from None
        raise WorkerError(f"Ray ({address}): {in_a_line(error)}") from None


def _reach(address: str) -> None:
    """Ray itself would try for a minute, and then end this process."""
    if address == AUTO:
        return
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), _REACH_SECONDS).close()
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", None) or error
        raise WorkerError(f"there is no Ray cluster at {address}: {why}") from None


@contextmanager
def _own(workers: int) -> Iterator[None]:
    """A cluster on this machine alone: nobody hears of it, and nothing is left of it."""
    import ray
    from ray._common.usage import usage_lib
    from ray._private import ray_constants

    usage_lib.set_usage_stats_enabled_via_env_var(False)
    folder = tempfile.mkdtemp(prefix="echelon-ray-", dir="/tmp")  # sockets want a short path
    elsewhere = ray_constants.ENABLE_RAY_CLUSTER
    try:
        ray_constants.ENABLE_RAY_CLUSTER = False  # listen on loopback alone
        _begin(
            LOCAL,
            num_cpus=workers,
            include_dashboard=False,
            object_store_memory=_STORE_MIN + workers * _STORE_EACH,
            _temp_dir=folder,
        )
        yield
    finally:
        with interrupts_wait():
            processes = Processes(folder)
            ray.shutdown()
            processes.await_end(_END_SECONDS)
        ray_constants.ENABLE_RAY_CLUSTER = elsewhere
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _handlers_kept() -> Iterator[None]:
    """Ray takes SIGTERM for itself."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, handler)


@contextmanager
def _mute() -> Iterator[None]:
    """Ray tells the terminal that it was told to be silent; what is wrong is raised."""
    with Path(os.devnull).open("wb") as nowhere:
        kept = os.dup(2)
        os.dup2(nowhere.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(kept, 2)
            os.close(kept)


@contextmanager
def _silent() -> Iterator[None]:
    """Ray Data tells of every stream it runs, and Ray of lost workers, on stdout."""
    import ray.data  # sets its logger up

    handlers = logging.getLogger("ray.data").handlers
    levels = [handler.level for handler in handlers]
    said = ray._private.worker.print_to_stdstream
    for handler in handlers:
        handler.setLevel(logging.CRITICAL)
    ray._private.worker.print_to_stdstream = partial(_to_stderr, said)
    try:
        yield
    finally:
        ray._private.worker.print_to_stdstream = said
        for handler, level in zip(handlers, levels, strict=True):
            handler.setLevel(level)


def _to_stderr(
    say: Callable[..., None], message: Mapping[str, Any], *given: Any, **more: Any
) -> None:
    say({**message, "is_err": True}, *given, **more)


def in_a_line(error: BaseException) -> str:
    """Ray's errors hold a traceback, or an explanation, of many lines."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    return lines[-1] if lines[0].startswith(("ray::", "\x1b", "Traceback")) else lines[0]

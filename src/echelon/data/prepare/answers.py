"""What comes of a task, as plain values: a result, or why there is none."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from typing import Any

from echelon.core.errors import DataError, EchelonError, UserError

Answer = dict[str, Any]


class WorkerError(EchelonError):
    """A worker ended, cannot work where it is, or met something that nobody foresaw."""


def answered(do: Callable[..., Any], *given: Any) -> Answer:
    """Where the work is done: whatever happens is told."""
    try:
        return {"result": do(*given)}
    except UserError as error:
        return {"mistake": str(error)}
    except WorkerError as error:
        return {"place": str(error)}
    except OSError as error:
        return {"system": [error.errno, error.strerror, str(error.filename or "")]}
    except Exception as error:
        return {"fault": repr(error), "traceback": traceback.format_exc()}


def result_of(answer: Mapping[str, Any], told: str) -> Any:
    """Where the result is wanted; `told` says what was asked for."""
    if "mistake" in answer:
        raise DataError(answer["mistake"])
    if "place" in answer:
        raise WorkerError(answer["place"])
    if "system" in answer:  # such as a full disk
        raise OSError(*answer["system"])
    if "fault" in answer:
        error = WorkerError(f"{told}: {answer['fault']}")
        error.add_note(answer["traceback"].rstrip())
        raise error
    return answer["result"]

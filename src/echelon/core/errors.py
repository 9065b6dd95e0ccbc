"""Every error Echelon raises on purpose.

`UserError` is a mistake the user can mend: it is shown as one line and ends with exit code 2.
`TrainingError` is a run that went wrong: one line too, exit code 1.
Anything else is a bug, ours or the task's, and keeps its traceback.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import Any

KeyPath = tuple[str | int, ...]


class EchelonError(Exception):
    """Root of the tree."""


class UserError(EchelonError, ValueError):
    """Something the user gave is wrong."""


class ConfigError(UserError):
    """A setting is unknown, of the wrong type, or contradicts another one."""

    def __init__(self, message: str, path: KeyPath = ()) -> None:
        super().__init__(message)
        self.message = message
        self.path = path


class TaskError(UserError):
    """The user's task cannot be loaded, or does not fit together."""


class DataError(UserError):
    """A file is missing, corrupt or not what it claims to be; names the file and the record."""


class MissingExtra(UserError):
    """An optional dependency is needed and not installed."""

    def __init__(self, feature: str, extra: str) -> None:
        super().__init__(f"{feature} needs an extra: pip install 'echelon[{extra}]'")


class RunError(UserError):
    """A run is not in the store, or cannot be resumed."""


class TrainingError(EchelonError):
    """Training could not go on."""


class NonFiniteError(TrainingError):
    """A loss or a gradient is not finite; names the layer and the step."""

    asked: int = 0
    """What all were asked for meanwhile, as `Update.asked` has it."""


class PeerError(TrainingError):
    """Another member is gone or does not answer: never the cause, always the consequence."""


class Left(EchelonError):
    """This member was asked to go; the run goes on without it."""


class CheckpointError(TrainingError):
    """A checkpoint is torn, corrupt or does not fit the model."""


class Interrupted(KeyboardInterrupt):
    """Ctrl-C, SIGTERM or a closed terminal stopped training.

    `result` is what training had reached, after its last checkpoint was written; None if the
    workers ended at once, because of a second signal for example.
    """

    def __init__(self, message: str, result: Any = None) -> None:
        super().__init__(message)
        self.result = result
        self.facts: dict[str, Any] = {}


def unknown(kind: str, value: str, choices: Iterable[str]) -> str:
    """One line for a name that is not among the choices, with the nearest one."""
    names = sorted(choices)
    near = nearest(value, names)
    hint = f"; did you mean {near!r}?" if near else ""
    return f"{kind} {value!r} is unknown{hint} (choices: {', '.join(names)})"


def nearest(value: str, choices: Sequence[str]) -> str | None:
    """Return the choice most like `value`; None if none is like it, or if two are equally so."""
    found = difflib.get_close_matches(value, choices, n=2, cutoff=0.55)
    likeness = [difflib.SequenceMatcher(None, value, choice).ratio() for choice in found]
    if not found or likeness[1:] == likeness[:1]:
        return None
    return found[0]

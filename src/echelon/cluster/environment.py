"""The only place that reads the environment."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from echelon.core.errors import UserError

if TYPE_CHECKING:
    from echelon.comm.peers import Place

_SPINS = "1000"
_PLACE = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def calm_threads() -> None:
    """Let kernel threads sleep soon when they wait for each other; call before importing torch.

    By default they spin for about a millisecond, which is quickest on an idle machine. As soon as
    anything else wants a core, the one they wait for is not running and every kernel waits in
    vain: measured here on two busy cores, 27 times slower for a small mlp, 2.4 times for a cnn.
    """
    os.environ.setdefault("GOMP_SPINCOUNT", _SPINS)


def calm_warnings() -> None:
    """Let torch's C++ parts tell errors alone; call before importing it.

    What they warn of is what members of other hosts are used to: a host without a name, a
    connection tried again. What comes of it is told by Echelon.
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


def stay_on_loopback() -> None:
    """Let gloo of this process listen on loopback alone, not on what the host's name means."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"


def joined(*, deadline: float = 120.0) -> Place | None:
    """The place that torchrun gave this process; None if it was not started by it.

    torchrun's agent serves a store at MASTER_ADDR:MASTER_PORT and says so
    (TORCHELASTIC_USE_AGENT_STORE): members only connect to it (`served`). It outlives a restart
    of the members, so what they put there is set apart by `name`. Where there is no such agent,
    as with variables set by hand or by a scheduler, member 0 serves the store at that port.
    """
    marks = ("RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID")
    mark = next((name for name in marks if name in os.environ), None)
    if mark is None:
        return None
    for name in _PLACE:
        if not os.environ.get(name):
            raise UserError(
                f"{mark} is set but {name} is not: start with torchrun, which sets "
                f"{', '.join(_PLACE)}, or unset {mark}"
            )
    count = _number("WORLD_SIZE", 1, None)
    from echelon.comm.peers import Place  # torch comes with it

    return Place(
        index=_number("RANK", 0, count - 1),
        count=count,
        host=os.environ["MASTER_ADDR"],
        port=_number("MASTER_PORT", 1, 65535),
        deadline=deadline,
        served=os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        name=f"echelon/{_attempt()}",
        interface=os.environ.get("GLOO_SOCKET_IFNAME") or None,
    )


def beside() -> tuple[int, int]:
    """Which member of this machine this process is, and of how many, as torchrun says.

    Where only a scheduler's variables are set, all are taken to be here.
    """
    if "LOCAL_RANK" not in os.environ or "LOCAL_WORLD_SIZE" not in os.environ:
        count = _number("WORLD_SIZE", 1, None)
        return _number("RANK", 0, count - 1), count
    count = _number("LOCAL_WORLD_SIZE", 1, None)
    return _number("LOCAL_RANK", 0, count - 1), count


def _attempt() -> str:
    run = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    return f"{run}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"


def _number(name: str, low: int, high: int | None) -> int:
    text = os.environ[name]
    value = int(text) if text.isdecimal() else None
    if value is None or value < low or (high is not None and value > high):
        limit = f"at least {low}" if high is None else f"{low} to {high}"
        raise UserError(f"{name} = {text!r}: it must be a whole number, {limit}")
    return value

"""Who takes part."""

from __future__ import annotations

import importlib.util
from typing import Any

from .wire_work import outward

OUTWARD = outward()
"""What goes to this address is encrypted, though it does not leave the host."""

SIDES: dict[str, tuple[str, str, list[Any], list[Any]]] = {
    "copy": ("wire_raw", "Copy", [], []),
    "step sgd": ("wire_raw", "Update", [], ["sgd"]),
    "step adam": ("wire_raw", "Update", [], ["adam"]),
    "raw tcp": ("wire_raw", "Caller", [], []),
    "memory sgd": ("wire_echelon", "Caller", [], ["memory", "sgd"]),
    "memory adam": ("wire_echelon", "Caller", [], ["memory", "adam"]),
    "tcp sgd": ("wire_echelon", "Caller", [], ["tcp", "sgd"]),
    "tcp adam": ("wire_echelon", "Caller", [], ["tcp", "adam"]),
    "tcp sgd, sealed": ("wire_echelon", "Caller", [OUTWARD], ["tcp", "sgd"]),
    "rows bare": ("wire_rows", "Bare", [], []),
    "rows memory": ("wire_rows", "Caller", [], ["memory"]),
    "rows tcp": ("wire_rows", "Caller", [], ["tcp"]),
    "plain": ("wire_channel", "Caller", [False], [False]),
    "sealed": ("wire_channel", "Caller", [True], [True]),
    "zmq": ("wire_zmq", "Caller", [], []),
    "grpc": ("wire_grpc", "Caller", [], []),
    "torch_rpc": ("wire_rpc", "Caller", ["default"], ["default"]),
    "torch_rpc cma": ("wire_rpc", "Caller", ["cma"], ["cma"]),
    "torch_rpc tcp": ("wire_rpc", "Caller", ["tcp"], ["tcp"]),
}
"""Module, its caller, and what server and caller are given."""
ALONE = {"copy", "step sgd", "step adam", "rows bare"}
NEEDS = {"zmq": "zmq", "grpc": "grpc"}


def spins(name: str) -> bool:
    """Whether its processes keep a core busy while they have nothing to do."""
    return name.startswith("torch_rpc")


def can_play(name: str) -> bool:
    if name == "tcp sgd, sealed":
        return OUTWARD is not None
    return name not in NEEDS or importlib.util.find_spec(NEEDS[name]) is not None

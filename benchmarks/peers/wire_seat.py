"""One process of one side: `python -m peers.wire_seat SIDE serve`, or `… call WHERE`.

A server says where it is on its first line. A caller takes words from its input, `exchange 3` or
`ask 1000`, and answers each with the milliseconds of every one, as JSON.
"""

from __future__ import annotations

import importlib
import json
import sys
from typing import Any

import torch

from .wire_work import Client, timed

SIDES: dict[str, tuple[str, str, list[Any], list[Any]]] = {
    "copy": ("wire_raw", "Copy", [], []),
    "step sgd": ("wire_raw", "Update", [], ["sgd"]),
    "step adam": ("wire_raw", "Update", [], ["adam"]),
    "raw tcp": ("wire_raw", "Caller", [], []),
    "memory sgd": ("wire_echelon", "Caller", [], ["memory", "sgd"]),
    "memory adam": ("wire_echelon", "Caller", [], ["memory", "adam"]),
    "tcp sgd": ("wire_echelon", "Caller", [], ["tcp", "sgd"]),
    "tcp adam": ("wire_echelon", "Caller", [], ["tcp", "adam"]),
    "rows bare": ("wire_rows", "Bare", [], []),
    "rows memory": ("wire_rows", "Caller", [], ["memory"]),
    "rows tcp": ("wire_rows", "Caller", [], ["tcp"]),
    "plain": ("wire_channel", "Caller", [False], [False]),
    "sealed": ("wire_channel", "Caller", [True], [True]),
    "zmq": ("wire_zmq", "Caller", [], []),
    "grpc": ("wire_grpc", "Caller", [], []),
    "torch_rpc": ("wire_rpc", "Caller", ["default"], ["default"]),
    "torch_rpc cma": ("wire_rpc", "Caller", ["cma"], ["cma"]),
}
"""Module, its caller, and what server and caller are given."""
ALONE = {"copy", "step sgd", "step adam", "rows bare"}


def main() -> None:
    torch.set_num_threads(1)
    side, part, *where = sys.argv[1:]
    name, caller, serving, calling = SIDES[side]
    module = importlib.import_module(f"peers.{name}")
    if part == "serve":
        module.serve(_say, *serving)
    else:
        client: Client = getattr(module, caller)(*where, *calling)
        _say("ready")
        _obey(client)


def _obey(client: Client) -> None:
    try:
        for line in sys.stdin:
            word, count = line.split()
            act = {"exchange": client.exchange, "ask": client.ask}[word]
            _say(json.dumps(timed(act, int(count))))
    finally:
        client.close()


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    main()

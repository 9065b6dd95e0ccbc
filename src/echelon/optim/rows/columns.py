"""What is kept of a table, by name: for each row, and for each id that waits for one."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from echelon.core.errors import CheckpointError
from echelon.core.rows import RowSpec
from echelon.optim.rows.reserve import Column
from echelon.optim.rows.rules import state_columns

_WAITING = {
    "waiting_ids": Column(torch.int64),
    "waiting_counts": Column(torch.int32),
    "waiting_seen": Column(torch.int32),
}
_FACTS = {"facts": Column(torch.int64)}
"""Of the whole table: seed and version."""


def columns_of(spec: RowSpec) -> dict[str, Column]:
    return {
        "ids": Column(torch.int64),
        "rows": Column(torch.float32, spec.width),
        **state_columns(spec.rule, spec.width),
        **({} if spec.expire is None else {"seen": Column(torch.int32)}),
    }


def blank(spec: RowSpec, rows: int, waiting: int) -> dict[str, Tensor]:
    """A state of so many rows, without what is in it."""
    return {
        name: torch.empty(_shape(name, column, rows, waiting), dtype=column.dtype, device="meta")
        for name, column in _all(spec).items()
    }


def check(spec: RowSpec, state: Mapping[str, Tensor]) -> None:
    """Refuse a state that is not of such a table."""
    wanted = _all(spec)
    if odd := wanted.keys() ^ state.keys():
        raise CheckpointError(
            f"the saved rows of table {spec.name!r} do not fit: they differ in "
            f"{', '.join(sorted(odd))}; was it saved with another optimizer or other options?"
        )
    rows, waiting = len(state["ids"]), len(state.get("waiting_ids", ()))
    for name, column in wanted.items():
        found, shape = state[name], _shape(name, column, rows, waiting)
        if found.dtype != column.dtype or tuple(found.shape) != shape:
            raise CheckpointError(
                f"the saved rows of table {spec.name!r} do not fit: {name} is {found.dtype} "
                f"{tuple(found.shape)}, not {column.dtype} {shape}"
            )


def _all(spec: RowSpec) -> dict[str, Column]:
    return columns_of(spec) | (_WAITING if spec.admit > 1 else {}) | _FACTS


def _shape(name: str, column: Column, rows: int, waiting: int) -> tuple[int, ...]:
    size = 2 if name in _FACTS else waiting if name in _WAITING else rows
    return (size,) if column.width is None else (size, column.width)

"""The tables of a model: rows that are no parameters, with updates of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

from torch import Tensor, nn

from echelon.core.config import OptimizerSection
from echelon.core.errors import TaskError
from echelon.core.types import Batch, Sparse
from echelon.models.table import Table
from echelon.optim import gradients
from echelon.optim.tables import RowGradients, Rows, merged


def open_tables(model: nn.Module, optimizer: OptimizerSection | None) -> None:
    """Give every table that has none a store in this process."""
    for table in tables_of(model):
        if table.store is None:
            table.store = Rows(table.spec(optimizer))


def tables_of(model: nn.Module) -> list[Table]:
    """Each once, in the model's order."""
    found: dict[str, Table] = {}
    for module in model.modules():
        if isinstance(module, Table) and found.setdefault(module.name, module) is not module:
            raise TaskError(f"two tables are called {module.name!r}: give each its own name")
    return list(found.values())


def lookups(
    forward: Callable[[nn.Module, Batch], Any], model: nn.Module, batch: Batch
) -> Sequence[tuple[Table, Tensor | Sparse]]:
    """What the model will look up for a batch, if it has a method `lookups` that says so.

    That one takes what the model itself would be called with, and so it is called as the model is.
    """
    told = getattr(model, "lookups", None)
    if told is None:
        return ()

    def ask(*inputs: Any, **others: Any) -> None:
        raise _Told(told(*inputs, **others))  # what is done with the model's answer is left out

    try:
        forward(cast(nn.Module, ask), batch)
    except _Told as found:
        return found.pairs
    return ()


class _Told(Exception):
    def __init__(self, pairs: Sequence[tuple[Table, Tensor | Sparse]]) -> None:
        super().__init__()
        self.pairs = pairs


def remote_state(model: nn.Module) -> dict[str, Tensor]:
    """The rows that are kept elsewhere, under the names they would have in the model's state."""
    stores: dict[int, dict[str, Tensor]] = {}
    found: dict[str, Tensor] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, Table) and module.store is not None and module.store.remote:
            if id(module) not in stores:
                stores[id(module)] = module.store.state()
            found |= {f"{path}.{key}": value for key, value in stores[id(module)].items()}
    return found


class RowUpdates:
    """The rows' part of an update: gradients that were left by backward, until they are pushed."""

    def __init__(self, model: nn.Module) -> None:
        self.tables = tables_of(model)
        self._found: list[RowGradients | None] | None = None

    def gradients(self) -> list[Tensor]:
        """One tensor for each table with a gradient. The same ones until `clear`."""
        return [found.sums for found in self.found() if found is not None]

    def found(self) -> list[RowGradients | None]:
        """For each table, the sums over all micro-batches."""
        if self._found is None:
            self._found = [_summed(table) for table in self.tables]
        return self._found

    def push(self, factor: float, version: int) -> None:
        """Make the update of every table; `clear` follows."""
        for table, found in zip(self.tables, self.found(), strict=True):
            assert table.store is not None, "tables are opened when the model is built"
            if found is not None:
                table.store.push(*found, factor=factor, version=version)

    def first_non_finite(self) -> str | None:
        """The first table with a gradient that is not finite."""
        named = [
            (table.name, found.sums)
            for table, found in zip(self.tables, self.found(), strict=True)
            if found is not None
        ]
        return gradients.first_non_finite(named)

    def clear(self) -> None:
        """Drop what was pushed, or will never be."""
        for table in self.tables:
            table.drop()
        self._found = None


def _summed(table: Table) -> RowGradients | None:
    parts = [RowGradients(*found) for found in table.take()]
    return merged(parts) if parts else None

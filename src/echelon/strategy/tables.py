"""The embedding tables of a model: their rows are no parameters and have updates of their own.

`open_tables` gives every table a store in this process. `RowUpdates` collects the row gradients
that backward leaves in the tables, and pushes them to the stores when the optimizer makes its step.
"""

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
    """Give every table without a store one in this process."""
    for table in tables_of(model):
        if table.store is None:
            table.store = Rows(table.spec(optimizer))


def tables_of(model: nn.Module) -> list[Table]:
    """Return the model's tables, each once, in the model's order."""
    found: dict[str, Table] = {}
    for module in model.modules():
        if isinstance(module, Table) and found.setdefault(module.name, module) is not module:
            raise TaskError(f"two tables are called {module.name!r}: give each its own name")
    return list(found.values())


class RowUpdates:
    """The row gradients of one update: left in the tables by backward, until they are pushed."""

    def __init__(self, model: nn.Module) -> None:
        self.tables = tables_of(model)
        self._found: list[RowGradients | None] | None = None

    def gradients(self) -> list[Tensor]:
        """Return one tensor for each table with a gradient; the same ones until `clear`."""
        return [found.sums for found in self.found() if found is not None]

    def found(self) -> list[RowGradients | None]:
        """Return the sums over all micro-batches for each table, or None without a gradient."""
        if self._found is None:
            self._found = [_summed(table) for table in self.tables]
        return self._found

    def push(self, factor: float, version: int) -> None:
        """Push the update of every table to its store; `clear` follows."""
        for table, found in zip(self.tables, self.found(), strict=True):
            assert table.store is not None, "tables are opened when the model is built"
            if found is not None:
                table.store.push(*found, factor=factor, version=version)

    def first_non_finite(self) -> str | None:
        """Return the first table with a gradient that is not finite, or None."""
        named = [
            (table.name, found.sums)
            for table, found in zip(self.tables, self.found(), strict=True)
            if found is not None
        ]
        return gradients.first_non_finite(named)

    def clear(self) -> None:
        """Drop gradients that were pushed or are not needed any more."""
        for table in self.tables:
            table.drop()
        self._found = None


def _summed(table: Table) -> RowGradients | None:
    parts = [RowGradients(*found) for found in table.take()]
    return merged(parts) if parts else None


def lookups(
    forward: Callable[[nn.Module, Batch], Any], model: nn.Module, batch: Batch
) -> Sequence[tuple[Table, Tensor | Sparse]]:
    """Return the rows that the model will look up for a batch, if it has a method `lookups`.

    That method takes the same arguments as the model itself. Only `forward` knows them, so it is
    called with a stand-in for the model, which passes its arguments to `lookups`.
    """
    method = getattr(model, "lookups", None)
    if method is None:
        return ()

    def ask(*inputs: Any, **others: Any) -> None:
        # Raised, because `forward` would go on with the model's output.
        raise _Lookups(method(*inputs, **others))

    try:
        forward(cast(nn.Module, ask), batch)
    except _Lookups as found:
        return found.pairs
    return ()


class _Lookups(Exception):
    def __init__(self, pairs: Sequence[tuple[Table, Tensor | Sparse]]) -> None:
        super().__init__()
        self.pairs = pairs


def remote_state(model: nn.Module) -> dict[str, Tensor]:
    """Return the rows of remote tables under the names they would have in the model's state."""
    stores: dict[int, dict[str, Tensor]] = {}
    found: dict[str, Tensor] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, Table) and module.store is not None and module.store.remote:
            if id(module) not in stores:
                stores[id(module)] = module.store.state()
            found |= {f"{path}.{key}": value for key, value in stores[id(module)].items()}
    return found

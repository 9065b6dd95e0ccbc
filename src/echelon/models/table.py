"""Embedding tables without a vocabulary: any int64 id has a row, created when it is first seen.

    ids ─▶ distinct ids ─▶ store.pull ─▶ rows, a leaf of the graph ─▶ a vector for every id
                                           └─ backward leaves in its `grad` one sum per distinct id

A `RowStore` keeps the rows, in this process or on parameter servers. Rows are not parameters of the
model: an update pushes their gradients to the store, which applies the table's own rule.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from echelon.core.config.sections import OptimizerSection
from echelon.core.errors import TaskError
from echelon.core.interfaces import RowStore
from echelon.core.types import RowRule, RowSpec, Sparse

Bag = Literal["sum", "mean"]
Distinct = tuple[Tensor, Tensor, Tensor]


class Table(nn.Module):
    """Ids [...] → vectors [..., width]; with `bag`, ids [B, L] → one vector [B, width] each.

    `rule` updates the rows; by default it is the row-wise form of the job's optimizer. `admit` and
    `expire` leave out ids that are rare, and delete ids that no longer occur (see `RowSpec`). An id
    equal to `padding` has a vector of zeros, and does not count in a bag.
    """

    def __init__(
        self,
        name: str,
        width: int,
        *,
        bag: Bag | None = None,
        std: float = 0.05,
        admit: int = 1,
        expire: int | None = None,
        rule: RowRule | None = None,
        padding: int | None = None,
        seed: int | None = None,
    ) -> None:
        super().__init__()
        if seed is None:  # drawn like the initial weights of other layers
            seed = int(torch.randint(1 << 62, ()))
        self.name, self.width, self.bag, self.padding = name, width, bag, padding
        self._options = {"std": std, "admit": admit, "expire": expire, "seed": seed}
        self._rule = rule
        self._looked: list[Looked] = []
        self._expected: list[tuple[Tensor, Distinct]] = []
        self.store: RowStore | None = None

    def spec(self, optimizer: OptimizerSection | None) -> RowSpec:
        """Describe the table for its store; `optimizer` is None if the task has its own."""
        rule = self._rule
        if rule is None:
            if optimizer is None:
                raise TaskError(
                    f"the task brings its own optimizer, which knows nothing of the rows of table "
                    f"{self.name!r}: give the table a rule"
                )
            rule = RowRule.of(optimizer, self.name)
        return RowSpec(name=self.name, width=self.width, rule=rule, **self._options)

    def forward(self, ids: Tensor | Sparse, offsets: Tensor | None = None) -> Tensor:
        values: Tensor | None = None
        if isinstance(ids, Sparse):
            offsets, values, ids = ids.offsets, ids.values, ids.indices
        self._check(ids, offsets)
        distinct, where, counts = self._distinct(ids)
        rows, padding = self._rows(distinct, counts, ids.device)
        if self.bag is None:
            return F.embedding(where, rows, padding_idx=padding)
        return F.embedding_bag(
            where,
            rows,
            offsets,
            mode=self.bag,
            per_sample_weights=None if values is None else values.to(rows.dtype),
            include_last_offset=values is not None,
            padding_idx=padding,
        )

    def expect(self, ids: Tensor | Sparse) -> None:
        """Announce ids of the next batch, so that a remote store can fetch their rows ahead."""
        assert self.store is not None, "tables are opened when the model is built"
        wanted = ids.indices if isinstance(ids, Sparse) else ids
        distinct = _distinct(wanted)
        self._expected.append((wanted, distinct))
        self.store.expect(distinct[0])

    def expect_nothing(self) -> None:
        """Forget all announced ids."""
        self._expected = []

    def _distinct(self, ids: Tensor) -> Distinct:
        """Return the distinct ids; reuse the result of `expect` if these ids were announced."""
        if self.training:
            while self._expected:
                wanted, distinct = self._expected.pop(0)
                if wanted is ids or torch.equal(wanted, ids):
                    return distinct
        return _distinct(ids)

    def take(self) -> list[Distinct]:
        """Return (ids, sums of gradients, counts) of all passes since the last call."""
        looked, self._looked = self._looked, []
        return [gradients for each in looked if (gradients := each.gradients()) is not None]

    def drop(self) -> None:
        """Discard the gradients of all passes since the last `take`."""
        self._looked = []

    def _rows(self, ids: Tensor, counts: Tensor, device: torch.device) -> tuple[Tensor, int | None]:
        if self.store is None:
            raise TaskError(f"table {self.name!r} has no store: train the model with Echelon")
        rows = self.store.pull(ids).to(device)
        padding = self._padding_among(ids)
        if padding is not None:
            rows[padding] = 0
        if self.training and torch.is_grad_enabled():
            rows.requires_grad_()
            self._looked.append(Looked(ids, rows, counts, padding))
        return rows, padding

    def _padding_among(self, ids: Tensor) -> int | None:
        if self.padding is None:
            return None
        at = int(torch.searchsorted(ids, self.padding))
        return at if at < len(ids) and int(ids[at]) == self.padding else None

    def _check(self, ids: Tensor, offsets: Tensor | None) -> None:
        if ids.dtype not in (torch.int64, torch.int32):
            raise TaskError(f"table {self.name!r} takes ids of type int64, not {ids.dtype}")
        if self.bag is None and offsets is not None:
            raise TaskError(f"table {self.name!r} takes bags of ids only with bag='sum' or 'mean'")

    def extra_repr(self) -> str:
        return f"{self.name!r}, width={self.width}" + (f", bag={self.bag!r}" if self.bag else "")

    # Rows in this process are part of the model's state, under the names that the store gives them.

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.store is not None and not self.store.remote:
            for key, value in self.store.state().items():
                destination[prefix + key] = value

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: Any,  # noqa: ARG002 (torch's signature)
        strict: bool,  # noqa: ARG002
        missing_keys: list[str],
        unexpected_keys: list[str],  # noqa: ARG002
        error_msgs: list[str],
    ) -> None:
        found = {
            key.removeprefix(prefix): value
            for key, value in state_dict.items()
            if key.startswith(prefix)
        }
        if not found:
            missing_keys.append(prefix + "rows")
        elif self.store is None:
            error_msgs.append(f"table {self.name!r} has no store to load rows into")
        else:
            self.store.load(found)


class Looked(NamedTuple):
    """The rows that one forward pass read: distinct ids, their rows, how often each occurred."""

    ids: Tensor
    rows: Tensor
    """A leaf of the graph, whose `grad` is set by backward."""
    counts: Tensor
    padding: int | None

    def gradients(self) -> tuple[Tensor, Tensor, Tensor] | None:
        """Return ids, sums of gradients and counts, without padding; None before backward."""
        if self.rows.grad is None:
            return None
        everything = (self.ids, self.rows.grad.cpu(), self.counts)
        if self.padding is None:
            return everything
        kept = torch.arange(len(self.ids)) != self.padding
        ids, sums, counts = (values[kept] for values in everything)
        return ids, sums, counts


def _distinct(ids: Tensor) -> Distinct:
    """Return the sorted distinct ids, the index of each of `ids` among them, and their counts."""
    flat = ids.detach().reshape(-1).to("cpu", torch.int64).numpy()
    distinct, where, counts = np.unique(flat, return_inverse=True, return_counts=True)
    places = torch.from_numpy(where).view(ids.shape).to(ids.device)
    return torch.from_numpy(distinct), places, torch.from_numpy(counts)

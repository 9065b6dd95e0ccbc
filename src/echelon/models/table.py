"""Vectors of categories without a vocabulary: any whole number has a row, made on first sight.

    ids ─▶ distinct ids ─▶ store.pull ─▶ rows, a leaf of the graph ─▶ a vector for every id
                                           └─ backward leaves in its `grad` one sum per distinct id

Where the rows are kept is the store's affair: in this process, or on parameter servers. They are no
parameters of the model: an update is a push of their gradients, and the rows' own rule applies it.
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


class Looked(NamedTuple):
    """What one forward pass read: distinct ids, their rows, and how often each occurred."""

    ids: Tensor
    rows: Tensor
    """A leaf: its `grad` is there after backward."""
    counts: Tensor
    padding: int | None

    def gradients(self) -> tuple[Tensor, Tensor, Tensor] | None:
        """Ids, sums, counts; without those of the padding."""
        if self.rows.grad is None:
            return None
        found = (self.ids, self.rows.grad.cpu(), self.counts)
        if self.padding is None:
            return found
        others = torch.arange(len(self.ids)) != self.padding
        ids, sums, counts = (values[others] for values in found)
        return ids, sums, counts


class Table(nn.Module):
    """Ids [...] → vectors [..., width]; with `bag`, ids [B, L] → one vector [B, width] each.

    `rule` is how rows learn; without one it is the row-wise form of the job's optimizer. `admit`
    and `expire` keep out ids that are rare, and forget those that are gone (see `RowSpec`). Ids
    equal to `padding` have zeros for a vector, and count for nothing in a bag.
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
        if seed is None:  # from torch's generator, as other layers' first weights
            seed = int(torch.randint(1 << 62, ()))
        self.name, self.width, self.bag, self.padding = name, width, bag, padding
        self._options = {"std": std, "admit": admit, "expire": expire, "seed": seed}
        self._rule = rule
        self._looked: list[Looked] = []
        self._expected: list[tuple[Tensor, Distinct]] = []
        self.store: RowStore | None = None

    def spec(self, optimizer: OptimizerSection | None) -> RowSpec:
        """What the store has to know; `optimizer` is the job's, if rows can follow it."""
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
        """The next batch will look these up: where rows are kept elsewhere, they are asked for."""
        assert self.store is not None, "tables are opened when the model is built"
        wanted = ids.indices if isinstance(ids, Sparse) else ids
        found = _distinct(wanted)
        self._expected.append((wanted, found))
        self.store.expect(found[0])

    def expect_nothing(self) -> None:
        """Whatever was expected is over."""
        self._expected = []

    def _distinct(self, ids: Tensor) -> Distinct:
        """As it was found when these ids were expected, if they were."""
        if self.training:
            while self._expected:
                wanted, found = self._expected.pop(0)
                if wanted is ids or torch.equal(wanted, ids):
                    return found
        return _distinct(ids)

    def take(self) -> list[Distinct]:
        """(ids, sums of gradients, counts) of every pass since the last time that got gradients."""
        looked, self._looked = self._looked, []
        return [found for each in looked if (found := each.gradients()) is not None]

    def drop(self) -> None:
        """Forget the passes since the last time."""
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

    # The rows are part of the model's state, under the names the store gives them.

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


def _distinct(ids: Tensor) -> Distinct:
    """Distinct ids in order, the place of each of `ids` among them, and how often they occur."""
    flat = ids.detach().reshape(-1).to("cpu", torch.int64).numpy()
    distinct, where, counts = np.unique(flat, return_inverse=True, return_counts=True)
    places = torch.from_numpy(where).view(ids.shape).to(ids.device)
    return torch.from_numpy(distinct), places, torch.from_numpy(counts)

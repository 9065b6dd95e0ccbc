"""Categories and numbers → scores: wide & deep (Cheng et al. 2016), or DLRM (Naumov et al. 2019).

The wide part memorizes: it is a linear model with one weight per category. The deep part
generalizes: it feeds a vector per category to an MLP. DLRM adds the dot products of all pairs of
vectors. Shapes: B samples, F fields, K numbers per category's vector.
"""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Annotated, Literal, Self

import torch
import torch.nn.functional as F
from pydantic import Field, PositiveInt, model_validator
from torch import Tensor, nn

from echelon.core.config.sections import Section
from echelon.core.errors import ConfigError, DataError
from echelon.core.hashing import keys
from echelon.core.types import RowRule
from echelon.models.layers import (
    ActivationName,
    InitName,
    NormName,
    Rate,
    chain,
    dense_block,
    initialise_,
)
from echelon.models.registry import InputFacts
from echelon.models.table import Table

VECTOR_STD = 0.05
Widths = Annotated[tuple[PositiveInt, ...], Field(min_length=1)]


class TableOptions(Section):
    """Rows for categories that are made when they are first seen, instead of a vocabulary's."""

    admit: PositiveInt = 1
    """A category has a row when it was trained on this many times; zeros stand for it before."""
    expire: PositiveInt | None = None
    """A row is forgotten when its category was in none of this many updates."""
    rule: RowRule | None = None
    """How rows learn; the row-wise form of the job's optimizer if not given."""


class DLRMOptions(Section):
    """Vectors of categories, how they meet, and the layers above."""

    width: PositiveInt = 16
    """Numbers in the vector of a category."""
    wide: bool = True
    """Whether there is a wide part beside the deep one."""
    interaction: Literal["concat", "dot"] = "concat"
    """How vectors meet: side by side (wide & deep), or each with each (DLRM)."""
    bottom: Widths | None = None
    """For `dot`: width of each layer that turns the numbers into a vector; one of 64."""
    hidden: Widths = (128, 64)
    """Width of each layer above."""
    activation: ActivationName = "relu"
    norm: NormName = "none"
    dropout: Rate = 0.0
    """Part of each hidden layer's values that training leaves out."""
    init: InitName = "he"
    table: TableOptions | None = None
    """Keep categories in tables of rows; on the servers, if there are any. {} is enough."""

    @model_validator(mode="after")
    def _has_effect(self) -> Self:
        if self.bottom is not None and self.interaction != "dot":
            raise ValueError(f"model.bottom has no effect on interaction {self.interaction!r}")
        return self


class DLRM(nn.Module):
    """Numbers [B, dense] and category ids [B, F] → scores [B, outputs]."""

    sizes: Tensor
    starts: Tensor

    def __init__(
        self, fields: tuple[int, ...], dense: int, outputs: int, options: DLRMOptions
    ) -> None:
        super().__init__()
        o = options
        self.open = o.table is not None
        self.register_buffer("sizes", torch.tensor(fields), persistent=False)
        self.register_buffer("starts", _starts(fields, self.open), persistent=False)
        self.vectors = (
            nn.Embedding(sum(fields), o.width)
            if o.table is None
            else Table("vectors", o.width, std=VECTOR_STD, **dict(o.table))
        )
        self.meet = (Dot if o.interaction == "dot" else Concat)(len(fields), dense, o)
        self.deep = chain(*_layers([self.meet.outputs, *o.hidden], o))
        self.head = nn.Linear(o.hidden[-1], outputs)
        initialise_(self, o.init, o.activation)
        if isinstance(self.vectors, nn.Embedding):
            nn.init.normal_(self.vectors.weight, std=VECTOR_STD)
        self.wide = Wide(sum(fields), dense, outputs, o.table) if o.wide else None

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        if not self.open and ids.is_cpu and not torch.compiler.is_compiling():
            self._check(ids)  # on a GPU the check would wait for the device
        rows_BF = ids + self.starts
        scores: Tensor = self.head(self.deep(self.meet(dense, self.vectors(rows_BF))))
        return scores if self.wide is None else scores + self.wide(dense, rows_BF)

    def lookups(self, dense: Tensor, ids: Tensor) -> list[tuple[Table, Tensor]]:  # noqa: ARG002
        """Return the ids that `forward` will look up in each table; rows can be fetched ahead."""
        rows_BF = ids + self.starts
        tables = [self.vectors, *([] if self.wide is None else [self.wide.categories])]
        return [(table, rows_BF) for table in tables if isinstance(table, Table)]

    def _check(self, ids: Tensor) -> None:
        """Refuse ids out of range: a too large id would be read as one of the next field."""
        bad = (ids < 0) | (ids >= self.sizes)
        if bool(bad.any()):
            sample, field = bad.nonzero()[0].tolist()
            raise DataError(
                f"categorical field {field} has ids 0 to {self.sizes[field] - 1}, "
                f"but a sample has {ids[sample, field]}"
            )


def _starts(fields: tuple[int, ...], open_ended: bool) -> Tensor:
    """Return where each field starts in the table that all fields share, for one lookup of all.

    Where ids may be any number, the starts are random 64-bit words, so that fields hardly overlap.
    """
    if open_ended:
        return torch.from_numpy(keys(len(fields), 0xF1E1D5).view("int64"))
    return torch.tensor([0, *accumulate(fields[:-1])])


def _layers(widths: list[int], o: DLRMOptions) -> list[nn.Sequential]:
    return [dense_block(a, b, o.activation, o.norm, o.dropout) for a, b in pairwise(widths)]


class Wide(nn.Module):
    """A linear model: one weight per category and per number, all starting at 0."""

    def __init__(
        self, categories: int, dense: int, outputs: int, table: TableOptions | None
    ) -> None:
        super().__init__()
        self.categories = (
            nn.Parameter(torch.zeros(categories, outputs))
            if table is None
            else Table("wide", outputs, bag="sum", std=0.0, **dict(table))
        )
        self.numbers = nn.Parameter(torch.zeros(outputs, dense)) if dense else None

    def forward(self, dense: Tensor, rows: Tensor) -> Tensor:
        scores: Tensor = (
            self.categories(rows)
            if isinstance(self.categories, Table)
            else F.embedding_bag(rows, self.categories, mode="sum")
        )
        return scores if self.numbers is None else scores + F.linear(dense, self.numbers)


class Concat(nn.Module):
    """The vectors and the numbers, concatenated."""

    def __init__(self, fields: int, dense: int, o: DLRMOptions) -> None:
        super().__init__()
        self.outputs = fields * o.width + dense
        self.dense = dense

    def forward(self, dense: Tensor, vectors: Tensor) -> Tensor:
        flat = vectors.flatten(1)
        return torch.cat([dense, flat], dim=1) if self.dense else flat


class Dot(nn.Module):
    """The dot products of all pairs of vectors; the numbers form one more vector."""

    pairs: Tensor

    def __init__(self, fields: int, dense: int, o: DLRMOptions) -> None:
        super().__init__()
        count = fields + bool(dense)
        if count < 2:
            raise ConfigError(
                "model.interaction = 'dot': there is one field and no number, so nothing to pair",
                path=("model", "interaction"),
            )
        bottom = o.bottom or (64,)
        self.bottom = chain(*_layers([dense, *bottom, o.width], o)) if dense else None
        row, column = torch.tril_indices(count, count, -1)
        self.register_buffer("pairs", row * count + column, persistent=False)
        self.outputs = len(self.pairs) + (o.width if dense else 0)

    def forward(self, dense: Tensor, vectors: Tensor) -> Tensor:
        if self.bottom is None:
            return self._dots(vectors)
        number_BK = self.bottom(dense)
        vectors = torch.cat([number_BK.unsqueeze(1), vectors], dim=1)
        return torch.cat([number_BK, self._dots(vectors)], dim=1)

    def _dots(self, vectors: Tensor) -> Tensor:
        return torch.bmm(vectors, vectors.mT).flatten(1).index_select(1, self.pairs)


Options = DLRMOptions


def from_facts(options: DLRMOptions, facts: InputFacts) -> DLRM:
    return DLRM(facts.fields, facts.dense, facts.outputs, options)

"""Several processes: how they are arranged and what each strategy wants to know."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from echelon.core.config.base import Section

Axis = Literal["data", "sharded", "tensor", "pipeline"]
ScheduleKind = Literal["gpipe", "1f1b", "interleaved_1f1b", "zero_bubble"]
Cut = Literal["columns", "rows"]


class SyncSection(Section):
    """What members do to stay alike."""

    batch_norm: Literal["synchronised", "local"] = "synchronised"
    """Whether batch norm sees the samples of all members, as one process would, or its own."""
    skip_init: tuple[str, ...] = ()
    """Parameters, by name or pattern (`head.*`), that are not copied from member 0 at the start."""
    deadline: PositiveFloat = 120.0
    """Seconds a member waits for another before it gives up and says for whom."""


class ShardedSection(Section):
    """What is divided among the members, beside the data."""

    level: Literal["optimizer", "gradients", "parameters"] = "parameters"
    """The optimizer's state; gradients as well; parameters as well."""


class PipelineSection(Section):
    """How a model becomes stages, and batches go through them."""

    schedule: ScheduleKind = "1f1b"
    micro: PositiveInt | None = None
    """Micro-batches on their way at once; four per stage if the batch can be cut so."""
    split: tuple[str, ...] = ()
    """The layer each stage after the first begins with; by measured cost if not given."""


class TensorSection(Section):
    """How layers are cut."""

    plan: dict[str, Cut] = Field(default_factory=dict)
    """Layer name or pattern → `columns` (outputs divided) or `rows` (inputs divided)."""


Mesh = dict[Axis, Annotated[int, Field(gt=0)]]

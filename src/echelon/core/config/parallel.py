"""Several processes: how they are arranged and what each strategy wants to know."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PositiveFloat, PositiveInt, ValidationInfo

from echelon.core.config.base import Section

Axis = Literal["data", "sharded", "tensor", "pipeline"]
ScheduleKind = Literal["gpipe", "1f1b", "interleaved_1f1b", "zero_bubble"]
Cut = Literal["columns", "rows"]


def _spaced(value: Any, info: ValidationInfo) -> Any:
    """YAML reads `{data:2}` as one key without a value."""
    if isinstance(value, dict):
        for key, held in value.items():
            name, colon, rest = str(key).partition(":")
            if held is None and colon:
                raise ValueError(
                    f"{info.field_name} = {{{key}}}: YAML wants a space after the colon, "
                    f"{{{name}: {rest}}}"
                )
    return value


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
    """Micro-batches on their way at once, each of one sample at least; four per stage if not given
    and the batch can be cut so."""
    split: tuple[str, ...] = ()
    """The layer each stage after the first begins with; by measured cost if not given."""


class TensorSection(Section):
    """How layers are cut."""

    plan: Annotated[dict[str, Cut], BeforeValidator(_spaced)] = Field(default_factory=dict)
    """Layer name or pattern → `columns` (outputs divided) or `rows` (inputs divided)."""


Mesh = Annotated[dict[Axis, Annotated[int, Field(gt=0)]], BeforeValidator(_spaced)]

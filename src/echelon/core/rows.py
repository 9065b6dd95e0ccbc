"""What a table of rows is: the part that trainers and servers have to agree on."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from echelon.core.config.base import Section, SettingError
from echelon.core.config.optim import Beta, OptimizerSection
from echelon.core.errors import ConfigError

RuleName = Literal["sgd", "adagrad", "adam"]
_RULES: dict[str, RuleName] = {
    "sgd": "sgd",
    "adagrad": "adagrad",
    "adam": "adam",
    "adamw": "adam",
}
_EPS = {"sgd": 1e-8, "adagrad": 1e-10, "adam": 1e-8}
WIDEST = 1 << 16


class RowRule(Section):
    """How a row learns. State is kept for each row, not for each number of it.

    Penalties act on a row when it is in a batch, and not while it is not.
    """

    name: RuleName
    lr: PositiveFloat
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    eps: PositiveFloat = 1e-8
    l1: NonNegativeFloat = 0.0
    l2: NonNegativeFloat = 0.0
    weight_decay: NonNegativeFloat = 0.0

    @classmethod
    def of(cls, section: OptimizerSection, table: str) -> Self:
        """The row-wise form of a job's optimizer."""
        name = _RULES.get(section.name)
        if name is None:
            raise ConfigError(
                f"optimizer {section.name!r} has no form for the rows of table {table!r}: choose "
                f"one of {', '.join(_RULES)}, or give the table its own",
                ("optimizer", "name"),
            )
        return cls(
            name=name,
            lr=section.lr,
            betas=section.betas or (0.9, 0.999),
            eps=section.eps or _EPS[name],
            l1=section.l1,
            l2=section.l2,
            weight_decay=section.weight_decay,
        )


class RowSpec(Section):
    """A table whose rows are made when they are first seen."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.\-]{1,200}$")]
    width: Annotated[int, Field(ge=1, le=WIDEST)]
    """Numbers in a row."""
    seed: Annotated[int, Field(ge=0, lt=1 << 63)]
    """A row's first values depend on this, on `name` and on its id, and on nothing else."""
    std: NonNegativeFloat = 0.05
    """Spread of the first values; 0 begins with zeros."""
    admit: PositiveInt = 1
    """A row is made when its id has been trained on this many times; it reads as zeros before."""
    expire: PositiveInt | None = None
    """A row is forgotten when its id was in none of this many updates."""
    rule: RowRule

    @model_validator(mode="after")
    def _in_bounds(self) -> Self:
        if self.admit >= 1 << 31:
            raise SettingError(f"admit = {self.admit}: must be below {1 << 31}", "admit")
        return self

"""What the data looks like, as far as a model has to know."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["vectors", "images", "tokens", "fields"]


@dataclass(frozen=True, slots=True)
class InputFacts:
    """One sample: a vector or an image of `shape`, a row of tokens, or categories and numbers."""

    shape: tuple[int, ...] = ()
    """Without the batch: (features,), (height, width), (channels, height, width) or (length,)."""
    outputs: int = 1
    """Scores wanted: as many as classes, or 1 for a number or a yes/no."""
    vocabulary: int | None = None
    """How many different tokens there are, where samples are texts; token 0 is padding."""
    fields: tuple[int, ...] = ()
    """How many categories each categorical field has."""
    dense: int = 0
    """How many numbers go with the categorical fields."""
    sparse: bool = False
    """Whether vectors come as `Sparse` rows."""

    @property
    def kind(self) -> Kind:
        if self.vocabulary is not None:
            return "tokens"
        if self.fields:
            return "fields"
        return "images" if len(self.shape) in (2, 3) else "vectors"

    @property
    def image(self) -> tuple[int, int, int]:
        """Channels, height and width."""
        channels, height, width = (1, *self.shape)[-3:]
        return channels, height, width

    def __str__(self) -> str:
        if self.kind == "tokens":
            return f"texts of {self.vocabulary} different tokens"
        if self.kind == "fields":
            return f"{len(self.fields)} categorical fields and {self.dense} numbers"
        size = "×".join(str(side) for side in self.shape)
        return f"{self.kind} of {size} values"

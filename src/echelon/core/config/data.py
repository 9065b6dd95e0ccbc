"""Where the samples come from and how they are read."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from echelon.core.config.base import Section, SettingError

Format = Literal[
    "auto",
    "shards",
    "csv",
    "tsv",
    "jsonl",
    "parquet",
    "numpy",
    "idx",
    "images",
    "text",
    "libsvm",
    "criteo",
    "movielens",
]
Fraction = Annotated[float, Field(gt=0, lt=1)]


class AugmentSection(Section):
    """Changes made to each training batch, drawn from (seed, epoch, position)."""

    crop: NonNegativeInt = 0
    """Pad images by this many pixels and cut a window of the old size at random."""
    flip: bool = False
    """Mirror images left to right, every second one."""
    cutout: NonNegativeInt = 0
    """Side of the square that is blanked out of each image."""
    mixup: Annotated[float, Field(ge=0)] = 0.0
    """Blend samples pairwise, with weights from Beta(mixup, mixup)."""


class DataSection(Section):
    """A shipped data set by `name`, or files at `path`."""

    name: str | None = None
    """A data set that comes with scikit-learn: digits, breast_cancer, wine, diabetes; or clicks."""
    path: str | None = None
    """A file or a folder; a folder may hold train and test (or valid) parts."""
    valid_path: str | None = None
    """The held-out part, where it is a file of its own."""
    format: Format = "auto"
    target: str | None = None
    """Name of the column to predict; `label`, `target`, `y` or `class` if not given."""
    text: str = "text"
    """Name of the text column, for text tasks."""
    columns: tuple[str, ...] | None = None
    """Which columns to use; all but the target if not given."""
    held_out: Fraction | None = None
    """Part of the samples kept for validation where the data has no held-out part; 0.2, and of
    a language model's text the last 0.1, if not given."""
    normalise: bool = True
    """Scale inputs to mean 0 and deviation 1, by figures of the training part alone."""
    augment: AugmentSection = AugmentSection()

    tokens: Literal["words", "characters", "bytes"] | None = None
    """What a text is cut into; words, or characters for a language model, if not given."""
    vocabulary: PositiveInt = 30_000
    """At most this many different tokens, the most frequent ones."""
    length: PositiveInt | None = None
    """Texts are cut to this many tokens; for a language model, the context."""

    prefetch: NonNegativeInt = 2
    """Chunks of batches made ready ahead of the loop; 0 makes them in the loop itself."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of a shipped data set, such as `rows` of clicks."""

    @model_validator(mode="after")
    def _one_origin(self) -> Self:
        if self.name is not None and self.path is not None:
            raise SettingError("data has both a name and a path: keep one", "path", "name")
        if self.valid_path is not None and self.path is None:
            raise SettingError("data.valid_path goes with data.path", "valid_path", "path")
        return self

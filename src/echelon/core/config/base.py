"""What every section of a job has in common."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from echelon.core.errors import ConfigError, KeyPath


class Section(BaseModel):
    """A part of a job: no unknown keys, no silent change of type, no change afterwards."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        validate_default=True,
        use_attribute_docstrings=True,
        allow_inf_nan=False,
    )


class SettingError(ValueError):
    """Raised in a section's validator: settings that do not go together.

    `keys` are those the message is about, dotted, as the section itself calls them; the first is
    where it is best mended.
    """

    def __init__(self, message: str, *keys: str) -> None:
        super().__init__(message)
        self.keys: tuple[KeyPath, ...] = tuple(tuple(key.split(".")) for key in keys)


class Contradiction(ConfigError):
    """A `ConfigError` about several settings at once."""

    def __init__(self, message: str, paths: tuple[KeyPath, ...]) -> None:
        super().__init__(message, paths[0])
        self.paths = paths

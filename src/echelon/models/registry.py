"""Models by name: their options, which data they take, and how they are built.

    job.model ─▶ model_choice ─▶ name, values ─▶ options(name, values) ─▶ checked options
    data ─▶ InputFacts ───────────────────────▶ build(name, options, facts) ─▶ nn.Module

To add a family, write its file in this folder with `Options` and `from_facts`, and add its row to
`_TAKES`. torch is imported when a model is built.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast

from echelon.core.config import Job
from echelon.core.config.loading import checked
from echelon.core.config.sections import Section
from echelon.core.errors import ConfigError, unknown

if TYPE_CHECKING:
    from torch import nn


Kind = Literal["vectors", "images", "tokens", "fields"]


@dataclass(frozen=True, slots=True)
class InputFacts:
    """What a model has to know of the data to be sized for it.

    A sample is a vector or an image of `shape`, a row of tokens, or categories with numbers.
    """

    shape: tuple[int, ...] = ()
    """Without the batch: (features,), (height, width), (channels, height, width) or (length,)."""
    outputs: int = 1
    """Number of scores: one per class, or 1 for a number or a yes/no."""
    vocabulary: int | None = None
    """Number of different tokens, if samples are texts; token 0 is padding."""
    fields: tuple[int, ...] = ()
    """Number of categories of each categorical field."""
    dense: int = 0
    """Number of numeric fields beside the categorical ones."""
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
        """Channels, height and width of an image; 1 channel if `shape` has none."""
        channels, height, width = (1, *self.shape)[-3:]
        return channels, height, width

    def __str__(self) -> str:
        if self.kind == "tokens":
            return f"texts of {self.vocabulary} different tokens"
        if self.kind == "fields":
            return f"{len(self.fields)} categorical fields and {self.dense} numbers"
        size = "×".join(str(side) for side in self.shape)
        return f"{self.kind} of {size} values"


def names() -> list[str]:
    return sorted(_TAKES)


def options(name: str, values: Mapping[str, Any]) -> Section:
    """Return the checked options of model `name`."""
    return checked(_family(name).Options, values, at=("model",))


def build(name: str, options: Section, facts: InputFacts) -> nn.Module:
    """Build model `name`, sized for the data: it takes the data's samples and returns scores."""
    family = _family(name)
    assert isinstance(options, family.Options), f"{type(options).__name__} is not for {name}"
    if facts.kind not in _TAKES[name]:
        fitting = [other for other in names() if facts.kind in _TAKES[other]]
        raise ConfigError(
            f"model {name!r} takes {' or '.join(_TAKES[name])}, but the data are {facts} "
            f"(models that fit: {', '.join(fitting)})",
            path=("model", "name"),
        )
    return family.from_facts(options, facts)


def schema() -> dict[str, Any]:
    """Return the JSON schema of a job's `model`: one form for each name."""
    return {"oneOf": [_schema(name) for name in names()]}


# The data that each model takes. Each name is a module beside this one.
_TAKES: dict[str, tuple[Kind, ...]] = {
    "softmax": ("vectors", "images"),
    "mlp": ("vectors", "images"),
    "cnn": ("images",),
    "alexnet": ("images",),
    "resnet": ("images",),
    "textcnn": ("tokens",),
    "gpt": ("tokens",),
    "dlrm": ("fields",),
}


class _Family(Protocol):
    """The module of a model family."""

    Options: type[Section]

    def from_facts(self, options: Any, facts: InputFacts) -> nn.Module: ...


def _family(name: str) -> _Family:
    if str(name) not in _TAKES:
        raise ConfigError(unknown("model", str(name), _TAKES), path=("model", "name"))
    return cast(_Family, importlib.import_module(f"echelon.models.{name}"))


def _schema(name: str) -> dict[str, Any]:
    found = _family(name).Options.model_json_schema()
    parts = found.pop("$defs", {})
    properties = {"name": {"const": name}, **_put_in(found["properties"], parts)}
    return {**found, "title": name, "properties": properties, "required": ["name"]}


def _put_in(form: Any, parts: Mapping[str, Any]) -> Any:
    """Return a schema with references replaced by the parts they refer to.

    The schema of a job contains this one, and there its references would lead nowhere.
    """
    if isinstance(form, list):
        return [_put_in(item, parts) for item in form]
    if not isinstance(form, dict):
        return form
    if "$ref" in form:
        part = parts[form["$ref"].rpartition("/")[2]]
        form = part | {key: value for key, value in form.items() if key != "$ref"}
    return {key: _put_in(value, parts) for key, value in form.items()}


_USUAL = {"text_classify": "textcnn", "language_model": "gpt", "click_rate": "dlrm"}
"""The default model of a task; `mlp` for all others."""


def model_choice(job: Job) -> tuple[str, dict[str, Any]]:
    """Return the name of a job's model, by default the usual one of its task, and its options."""
    values = dict(job.model)
    return values.pop("name", _USUAL.get(job.task, "mlp")), values

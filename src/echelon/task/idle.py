"""Settings that a task would not look at: they are refused, so that nobody believes in them."""

from __future__ import annotations

from echelon.core.config import DataSection, Job
from echelon.core.errors import ConfigError
from echelon.task.choice import model_choice

_TEXT = ("tokens", "vocabulary", "text", "length")
_IDLE = {
    "classify": _TEXT,
    "regress": (*_TEXT, "augment"),
    "click_rate": (*_TEXT, "augment"),
    "text_classify": ("augment", "columns", "normalise"),
    "language_model": ("augment", "columns", "normalise", "target", "text"),
}
_DENSE = ("alexnet", "cnn", "mlp", "resnet", "softmax")
_FITTING = {
    "classify": _DENSE,
    "regress": _DENSE,
    "click_rate": ("dlrm",),
    "text_classify": ("textcnn",),
    "language_model": ("gpt",),
}


def refuse_idle(job: Job) -> None:
    """Of a built-in task's data, all that it does not look at has to be as usual."""
    for key in _IDLE[job.task]:
        if getattr(job.data, key) != getattr(DataSection(), key):
            raise ConfigError(f"data.{key} has no effect on task {job.task!r}", ("data", key))


def refuse_misfit(job: Job) -> None:
    """A built-in task's model takes its kind of data and gives its kind of scores."""
    name, _ = model_choice(job)
    if name not in _FITTING[job.task]:
        raise ConfigError(
            f"model {name!r} does not fit task {job.task!r} "
            f"(models that fit: {', '.join(_FITTING[job.task])})",
            ("model", "name"),
        )


def check_python(job: Job) -> None:
    """A `Task` from Python brings model and data itself."""
    if job.model:
        raise ConfigError("the task brings its own model: remove `model`", ("model",))
    for key in DataSection.model_fields:
        if key != "prefetch" and getattr(job.data, key) != getattr(DataSection(), key):
            raise ConfigError(
                f"the task brings its own data: data.{key} has no effect on it", ("data", key)
            )

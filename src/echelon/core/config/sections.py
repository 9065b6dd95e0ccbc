"""The sections of a job: every setting, its default and its limits.

The sections come in the order in which `Job` (job.py) lists them:

    data                         DataSection, with AugmentSection
    optimizer, schedule, clip    OptimizerSection, ScheduleSection, ClipSection
    mesh, sync                   Mesh, SyncSection: how several processes are arranged
    sharded, pipeline, tensor,   ShardedSection, PipelineSection, TensorSection,
      parameter_server             ParameterServerSection: a section for each strategy
    elastic                      ElasticSection: workers that join and leave
    evaluate, stop, checkpoint,  EvaluateSection, StopSection, CheckpointSection,
      health, track                HealthSection, TrackSection: everything besides the updates

The section `model` is missing here: each model family defines its own options in
`echelon.models`.

A section refuses unknown keys, and values of the wrong type. Its validators refuse settings that
contradict each other or have no effect, by raising `SettingError` with the keys concerned;
loading.py turns that into an error with file and line. The docstring of a field is its description
in the JSON schema that `echelon config schema` prints.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationInfo,
    model_validator,
)

from echelon.core.errors import ConfigError, KeyPath

# What all sections have in common


class Section(BaseModel):
    """A part of a job: refuses unknown keys, never converts a type silently, is immutable."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        validate_default=True,
        use_attribute_docstrings=True,
        allow_inf_nan=False,
    )


class SettingError(ValueError):
    """Settings that do not go together; raised by a section's validators.

    `keys` are the settings concerned, dotted and relative to the section. The first is the
    setting to change.
    """

    def __init__(self, message: str, *keys: str) -> None:
        super().__init__(message)
        self.keys: tuple[KeyPath, ...] = tuple(tuple(key.split(".")) for key in keys)


class Contradiction(ConfigError):
    """A `ConfigError` about several settings at once."""

    def __init__(self, message: str, paths: tuple[KeyPath, ...]) -> None:
        super().__init__(message, paths[0])
        self.paths = paths


# data

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


# optimizer, schedule, clip

OptimizerName = Literal["sgd", "momentum", "nesterov", "adagrad", "rmsprop", "adam", "adamw"]
Beta = Annotated[float, Field(ge=0, lt=1)]


class OptimizerSection(Section):
    """The update rule."""

    name: OptimizerName = "adamw"
    lr: PositiveFloat = 1e-3
    momentum: Beta | None = None
    """For momentum, nesterov (0.9 if not given) and rmsprop (0 if not given)."""
    betas: tuple[Beta, Beta] | None = None
    """For adam and adamw; (0.9, 0.999) if not given."""
    eps: PositiveFloat | None = None
    l1: NonNegativeFloat = 0.0
    """Adds l1·sign(w) to the gradient."""
    l2: NonNegativeFloat = 0.0
    """Adds l2·w to the gradient."""
    weight_decay: NonNegativeFloat = 0.0
    """Shrinks w by lr·weight_decay·w beside the gradient step (decoupled, as in AdamW)."""
    decay: Literal["matrices", "all"] = "matrices"
    """What l1, l2 and weight_decay act on: all but biases and norms, or everything."""

    @model_validator(mode="after")
    def _has_effect(self) -> Self:
        idle = {
            "momentum": self.name not in ("momentum", "nesterov", "rmsprop"),
            "betas": self.name not in ("adam", "adamw"),
            "eps": self.name in ("sgd", "momentum", "nesterov"),
        }
        _refuse_idle(self, "optimizer", idle)
        return self


ScheduleName = Literal["constant", "step", "cosine", "linear", "plateau"]


class ScheduleSection(Section):
    """How the learning rate changes over the run."""

    name: ScheduleName = "constant"
    warmup: NonNegativeInt = 0
    """Steps over which the rate rises from nothing to its full value."""
    steps: PositiveInt | None = None
    """Where linear and cosine end; the end of the run if not given."""
    every: PositiveInt | None = None
    """For step: multiply by `factor` every so many steps."""
    factor: Annotated[float, Field(gt=0, lt=1)] = 0.1
    """For step and plateau."""
    floor: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """The smallest factor of the learning rate."""
    patience: NonNegativeInt = 3
    """For plateau: evaluations in a row that need not improve `stop.metric`; the next one without
    an improvement lowers the rate, as in torch."""

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if self.name == "step" and self.every is None:
            raise SettingError(
                "schedule 'step' needs schedule.every (steps between two drops)", "name", "every"
            )
        idle = {
            "every": self.name != "step",
            "steps": self.name not in ("linear", "cosine"),
            "factor": self.name not in ("step", "plateau"),
            "floor": self.name == "constant",
            "patience": self.name != "plateau",
        }
        _refuse_idle(self, "schedule", idle)
        return self


class ClipSection(Section):
    """Keep gradients small, by global norm or value by value."""

    norm: PositiveFloat | None = None
    value: PositiveFloat | None = None

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        if self.norm is not None and self.value is not None:
            raise SettingError("clip has both a norm and a value: keep one", "value", "norm")
        return self


# mesh, sync

Axis = Literal["data", "sharded", "tensor", "pipeline"]


def _check_spaces(value: Any, info: ValidationInfo) -> Any:
    """Refuse `{data:2}`, which YAML reads as a single key without a value."""
    if isinstance(value, dict):
        for key, item in value.items():
            name, colon, rest = str(key).partition(":")
            if item is None and colon:
                raise ValueError(
                    f"{info.field_name} = {{{key}}}: YAML wants a space after the colon, "
                    f"{{{name}: {rest}}}"
                )
    return value


Mesh = Annotated[dict[Axis, Annotated[int, Field(gt=0)]], BeforeValidator(_check_spaces)]


class SyncSection(Section):
    """What members do to stay alike."""

    batch_norm: Literal["synchronised", "local"] = "synchronised"
    """Whether batch norm sees the samples of all members, as one process would, or its own."""
    skip_init: tuple[str, ...] = ()
    """Parameters, by name or pattern (`head.*`), that are not copied from member 0 at the start."""
    deadline: PositiveFloat = 120.0
    """Seconds a member waits for another before it gives up and says for whom."""


# sharded, pipeline, tensor


class ShardedSection(Section):
    """What is divided among the members, beside the data."""

    level: Literal["optimizer", "gradients", "parameters"] = "parameters"
    """The optimizer's state; gradients as well; parameters as well."""


ScheduleKind = Literal["gpipe", "1f1b", "interleaved_1f1b", "zero_bubble"]


class PipelineSection(Section):
    """How a model becomes stages, and batches go through them."""

    schedule: ScheduleKind = "1f1b"
    micro: PositiveInt | None = None
    """Micro-batches on their way at once, each of one sample at least; four per stage if not given
    and the batch can be cut so."""
    split: tuple[str, ...] = ()
    """The layer each stage after the first begins with; by measured cost if not given."""


Cut = Literal["columns", "rows"]


class TensorSection(Section):
    """How layers are cut."""

    plan: Annotated[dict[str, Cut], BeforeValidator(_check_spaces)] = Field(default_factory=dict)
    """Layer name or pattern → `columns` (outputs divided) or `rows` (inputs divided)."""


# parameter_server: `staleness` alone leads from synchronous (0) to asynchronous (none)


def _parse_staleness(value: Any) -> Any:
    """Read `none`, which people write where YAML expects `null`."""
    if value is None or value == "none":
        return None
    if type(value) is int and value >= 0:
        return value
    raise ValueError(
        f"parameter_server.staleness = {value!r}: input should be a whole number from 0 on, or "
        f"'none'"
    )


class MeritSection(Section):
    """Whether updates are judged by what they do to held-out samples."""

    policy: Literal["none", "reject", "weigh"] = "none"
    """`reject`: of a trainer whose gradients do not agree with held-out samples, as others' do,
    nothing is applied. `weigh`: beside that, the less they agree the less they count."""
    every: PositiveInt = 4
    """Each trainer measures every so many of its gradients."""
    samples: PositiveInt = 128
    """Held-out samples that are looked at each time."""

    @model_validator(mode="after")
    def _has_effect(self) -> Self:
        for key in ("every", "samples"):
            if self.policy == "none" and getattr(self, key) != type(self).model_fields[key].default:
                raise SettingError(
                    f"merit.{key} has no effect where nobody is judged (policy 'none')",
                    key,
                    "policy",
                )
        return self


class ParameterServerSection(Section):
    """Where the weights live, and which gradients make an update."""

    servers: PositiveInt = 1
    """Processes that hold a part of the weights and the optimizer's state each."""
    replicas: Literal[0, 1] = 0
    """1: each server has a twin that takes over when it is lost, with nothing lost. 0: the run then
    goes back to its last checkpoint."""
    staleness: Annotated[NonNegativeInt | None, BeforeValidator(_parse_staleness)] = 0
    """How many updates may lie between the weights a gradient was computed on and those it is
    applied to; `none`: any number."""
    quorum: PositiveInt | Literal["all"] | None = None
    """How many trainers' gradients make one update; if not given, all where staleness is 0, else
    one."""
    plane: Literal["auto", "memory", "tcp"] = "auto"
    """How gradients and weights travel; `auto`: shared memory on one machine, TCP between them."""
    weights: Literal["pinned", "live"] = "pinned"
    """`pinned`: a trainer computes on the weights of one version. `live`: on the servers' own
    memory, where that is on its machine: nothing is copied, but others' updates may come in the
    middle of a step, as in Hogwild."""
    address: str = "127.0.0.1"
    """Where the servers listen; trainers of other machines need one that they can reach."""
    compensate: NonNegativeFloat = 0.0
    """Delay compensation: how much of the weights' movement since a gradient was computed is taken
    into account, by the square of the gradient."""
    scale: Literal["none", "staleness"] = "none"
    """`staleness`: the learning rate of an update is divided by 1 + its staleness."""
    merit: MeritSection = MeritSection()

    @property
    def together(self) -> bool:
        """Whether every update is made of all trainers' gradients, on the same weights."""
        return self.staleness == 0 and self.quorum in ("all", None)

    def pushes(self, members: int) -> int:
        """Return how many trainers' gradients make one update if there are `members` trainers."""
        if isinstance(self.quorum, int):
            return min(self.quorum, members)
        return members if self.together else 1

    @model_validator(mode="after")
    def _has_effect(self) -> Self:
        if self.quorum == "all" and self.staleness != 0:
            staleness = "none" if self.staleness is None else self.staleness
            raise SettingError(
                f"parameter_server.staleness = {staleness} has no effect where the "
                f"quorum is 'all': each update waits for every trainer",
                "staleness",
                "quorum",
            )
        idle = {"compensate": self.compensate > 0, "scale": self.scale != "none"}
        for key, given in idle.items():
            if given and self.staleness == 0:
                raise SettingError(
                    f"parameter_server.{key} has no effect where staleness is 0", key, "staleness"
                )
        self._can_live()
        _check_address("parameter_server", self.address)
        if self.plane == "memory" and self.address != "127.0.0.1":
            raise SettingError(
                f"parameter_server.address = {self.address!r} has no effect on plane 'memory', "
                f"which is for trainers of this machine",
                "address",
                "plane",
            )
        return self

    def _can_live(self) -> None:
        """Refuse settings that need weights of one version: live weights are of no version."""
        if self.weights == "pinned":
            return
        against = {
            "staleness": self.staleness == 0,
            "quorum": self.quorum not in (None, 1),
            "replicas": self.replicas > 0,
            "compensate": self.compensate > 0,
            "merit": self.merit.policy != "none",
            "plane": self.plane == "tcp",
        }
        for key, given in against.items():
            if given:
                raise SettingError(
                    f"parameter_server.weights = 'live' does not go with this {key}: it is for "
                    f"trainers of one machine that each make updates of their own, without twins, "
                    f"compensation or merit",
                    "weights",
                    key,
                )


# elastic


class ElasticSection(Section):
    """What happens when a member is lost, and who may join."""

    enabled: bool | None = None
    """Whether those who are left go on when a member is lost; by default wherever the strategy can
    (`all_reduce`, `sharded`, `parameter_server`)."""
    min_workers: PositiveInt = 1
    """With fewer members than this the run waits for others to join."""
    wait: PositiveFloat = 600.0
    """Seconds it waits for them before it ends."""
    balance: bool = True
    """Whether each member's part of a batch follows its speed."""
    address: str = "127.0.0.1"
    """Where the coordinator listens; members of other machines need one that they can reach."""

    @model_validator(mode="after")
    def _can_be_reached(self) -> Self:
        _check_address("elastic", self.address)
        return self

    @model_validator(mode="after")
    def _has_effect(self) -> Self:
        given = [key for key in self.model_dump(exclude_defaults=True) if key != "enabled"]
        if self.enabled is False and given:
            raise SettingError(
                f"elastic.{given[0]} has no effect where elastic.enabled is false",
                given[0],
                "enabled",
            )
        return self


# evaluate, stop, checkpoint, health, track

Every = Literal["epoch", "never"] | Annotated[int, Field(gt=0)]


class EvaluateSection(Section):
    """When and how the held-out part is looked at."""

    every: Every = "epoch"
    """`epoch`, a number of steps, or `never`."""
    batch_size: PositiveInt | None = None
    """The training batch size, but at least 256, if not given."""


class StopSection(Section):
    """Ends a run before its last epoch."""

    metric: str = "loss"
    """A validation figure: `loss` or one of the task's metrics."""
    mode: Literal["auto", "min", "max"] = "auto"
    """Whether smaller or larger is better; `auto`: smaller for a loss or an error."""
    target: float | None = None
    """Stop when the metric is this good."""
    patience: PositiveInt | None = None
    """Early stopping: evaluations without improvement before the run ends."""
    min_delta: NonNegativeFloat = 0.0
    """What counts as an improvement."""


class CheckpointSection(Section):
    """Cuts to come back to."""

    every: Every = "epoch"
    """`epoch`, a number of steps, or `never` (only at the end)."""
    keep: PositiveInt = 2
    """How many of the latest are kept, beside the best."""
    best: bool = True
    """Keep the one with the best `stop.metric` too."""


class HealthSection(Section):
    """Watches over gradients."""

    every: PositiveInt = 100
    """Steps between two looks at each layer's gradient."""
    non_finite: Literal["stop", "skip"] = "stop"
    """What to do with a non-finite update; it is never applied."""
    vanishing: NonNegativeFloat = 1e-7
    """Warn when a layer's gradient norm is below this part of the largest layer's."""
    exploding: NonNegativeFloat = 1e3
    """Warn when a layer's gradient norm is above this multiple of its weight's norm."""


class TrackSection(Section):
    """Where the run is recorded and what is told."""

    folder: str = "runs"
    """Holds one folder per run and the store of all runs."""
    every: PositiveInt = 50
    """Steps between two recorded points."""
    exporters: tuple[Literal["tensorboard", "mlflow", "wandb"], ...] = ()
    """Where the figures go besides."""
    report: bool = True
    """Write an HTML report at the end."""

    @model_validator(mode="after")
    def _no_repeats(self) -> Self:
        if len(set(self.exporters)) != len(self.exporters):
            raise SettingError(
                f"track.exporters names one twice: {list(self.exporters)}", "exporters"
            )
        return self


# Checks that several sections share


def _refuse_idle(
    section: OptimizerSection | ScheduleSection, at: str, idle: dict[str, bool]
) -> None:
    """Refuse settings that differ from their default but have no effect under `section.name`."""
    for key, has_no_effect in idle.items():
        default = type(section).model_fields[key].default
        if has_no_effect and getattr(section, key) != default:
            raise SettingError(f"{at}.{key} has no effect on {section.name!r}", key, "name")


_ALL_ADDRESSES = ("", "0.0.0.0", "::")


def _check_address(section: str, address: str) -> None:
    """Refuse an address that means "all of this machine": other machines cannot connect to it."""
    if address in _ALL_ADDRESSES:
        raise SettingError(
            f"{section}.address = {address!r} is no address to join at: give the one of this "
            f"machine that members can reach",
            "address",
        )

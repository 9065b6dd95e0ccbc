"""Weights on servers: one dial from synchronous to asynchronous."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import (
    BeforeValidator,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    model_validator,
)

from echelon.core.config.base import Section, SettingError
from echelon.core.config.elastic import dialled


def _bound(value: Any) -> Any:
    """`none` is what people write where YAML wants `null`."""
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
    staleness: Annotated[NonNegativeInt | None, BeforeValidator(_bound)] = 0
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
        """Whether every update is made by all trainers, on the same weights."""
        return self.staleness == 0 and self.quorum in ("all", None)

    def pushes(self, members: int) -> int:
        """How many trainers' gradients make an update where there are so many trainers."""
        if isinstance(self.quorum, int):
            return min(self.quorum, members)
        return members if self.together else 1

    @model_validator(mode="after")
    def _has_effect(self) -> Self:
        if self.quorum == "all" and self.staleness != 0:
            raise SettingError(
                f"parameter_server.staleness = {_told(self.staleness)} has no effect where the "
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
        dialled("parameter_server", self.address)
        if self.plane == "memory" and self.address != "127.0.0.1":
            raise SettingError(
                f"parameter_server.address = {self.address!r} has no effect on plane 'memory', "
                f"which is for trainers of this machine",
                "address",
                "plane",
            )
        return self

    def _can_live(self) -> None:
        """Live weights are those of no version: nothing that needs one goes with them."""
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


def _told(staleness: int | None) -> str:
    return "none" if staleness is None else str(staleness)

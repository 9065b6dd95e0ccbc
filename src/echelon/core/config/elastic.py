"""Members that come and go."""

from __future__ import annotations

from typing import Self

from pydantic import PositiveFloat, PositiveInt, model_validator

from echelon.core.config.base import Section, SettingError

_ALL_ADDRESSES = ("", "0.0.0.0", "::")


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
    def _can_be_dialled(self) -> Self:
        dialled("elastic", self.address)
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


def dialled(section: str, address: str) -> None:
    """Others are told where to go: an address that means "all of mine" leads nowhere."""
    if address in _ALL_ADDRESSES:
        raise SettingError(
            f"{section}.address = {address!r} is no address to join at: give the one of this "
            f"machine that members can reach",
            "address",
        )

"""Members that come and go."""

from __future__ import annotations

from pydantic import PositiveFloat, PositiveInt

from echelon.core.config.base import Section


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

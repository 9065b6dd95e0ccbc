"""What the servers are told of a job: plain data, the same from every trainer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from echelon.core.types import Numerics, Parallel, RowSpec


def rules(numerics: Numerics, parallel: Parallel, tables: Sequence[RowSpec] = ()) -> dict[str, Any]:
    section = parallel.servers
    return {
        "optimizer": numerics.optimizer.model_dump(mode="json"),
        "clip": numerics.clip.model_dump(mode="json"),
        "batch": numerics.batch,
        "tables": [table.model_dump(mode="json") for table in tables],
        "staleness": section.staleness,
        "quorum": section.quorum or ("all" if section.together else 1),
        "together": section.together,
        "replicas": section.replicas,
        "live": section.weights == "live",
        "compensate": section.compensate,
        "scale": section.scale,
        "merit": section.merit.policy,
        "balance": parallel.balance,
        **parallel.plan,
    }

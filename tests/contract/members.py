"""Real processes that train together, and are compared with one that trains alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from echelon.cluster.supervisor import launch
from echelon.cluster.workers import Member
from echelon.comm.group import Group

DEADLINE = 60.0


def run(count: int, work: Callable[[Group], Any]) -> Any:
    """What `work` gave back in member 0 (plain data); an error in any member is raised here."""

    def body(member: Member) -> dict[str, Any]:
        torch.set_num_threads(1)
        group = Group(member.place)
        group.pulse = member.pulse
        try:
            return {"found": work(group)}
        finally:
            group.close()

    return launch(count, body, deadline=DEADLINE)["found"]

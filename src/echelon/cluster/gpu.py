"""Which GPU a member computes on."""

from __future__ import annotations

import torch

from echelon.core.config import Job
from echelon.core.errors import ConfigError


def take_gpu(job: Job, local: int) -> None:
    """Let `cuda` mean a GPU of this member's own: `local` counts the members of this machine.

    Called in the member's process: asking for GPUs before a fork would spoil them for it.
    """
    found = torch.cuda.device_count()
    if found == 0 or not job.device.startswith(("auto", "cuda")):
        return
    if ":" in job.device:
        raise ConfigError(
            f"device {job.device!r} is one GPU, and {job.workers} members need one each: "
            f"write device: cuda",
            ("device",),
        )
    if local >= found:
        raise ConfigError(
            f"member {local} of this machine has no GPU of its own, for there are {found}: "
            f"use fewer workers, or device: cpu",
            ("workers",),
        )
    torch.cuda.set_device(local)

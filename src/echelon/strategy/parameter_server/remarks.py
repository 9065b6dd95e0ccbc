"""What a person should know before trainers and servers begin."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from echelon.comm.ps.layout import Layout, Partition
from echelon.core.types import Parallel
from echelon.strategy.alike import left_alone

OWN_STATISTICS = (
    "batch norm sees each trainer's own samples, for trainers make updates apart, and all evaluate "
    "with the statistics of the first (sync.batch_norm: local says that this is meant)"
)


def remarks(
    model: nn.Module, layout: Layout, parallel: Parallel, *, tables: bool, held_out: int
) -> Iterator[str]:
    """`tables`: whether servers hold rows beside; `held_out`: samples that there are."""
    section = parallel.servers
    if not section.together and parallel.sync.batch_norm == "synchronised" and _normalises(model):
        yield OWN_STATISTICS
    trained = [slot.name for slot in layout.slots]
    if skipped := left_alone(trained, parallel.sync.skip_init):
        yield (
            f"sync.skip_init: {skipped[0]!r} is trained"
            f"{f', and {len(skipped) - 1} more' if skipped[1:] else ''}: it lives on the servers, "
            f"the same for all, and begins as the first trainer made it"
        )
    partition = Partition(layout, section.servers)
    idle = sum(not partition.ranges(shard) for shard in range(section.servers))
    if idle and not tables:
        yield (
            f"parameter_server.servers = {section.servers}: the model is so small that {idle} of "
            f"them hold none of its weights"
        )
    wanted = section.merit.samples
    if section.merit.policy != "none" and wanted > held_out:
        yield (
            f"parameter_server.merit.samples = {wanted}: there are {held_out} held-out samples, "
            f"and gradients are judged by those"
        )


def _normalises(model: nn.Module) -> bool:
    return any(isinstance(module, _BatchNorm) for module in model.modules())

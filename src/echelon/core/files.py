"""Tensors that lie in a file, because a process should not have to hold them.

Whoever makes such a file maps it; whoever writes a checkpoint puts the file itself there, and does
not copy what is in it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

START = ".spool-"
"""How the names of such files begin."""


def file_of(tensor: Tensor) -> Path | None:
    """The file that a tensor lies in, all of it in one piece."""
    name = None if tensor.device.type != "cpu" else tensor.untyped_storage().filename
    if name is None or not tensor.is_contiguous():
        return None
    path = Path(name)
    return path if path.name.startswith(START) else None

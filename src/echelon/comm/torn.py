"""Signs that another member is gone, where torch raises no class of its own for it."""

from __future__ import annotations

_SIGNS = ("gloo/transport", "Connection closed by peer", "Connection reset by peer", "NCCL error")


def is_torn(error: BaseException) -> bool:
    """Whether this is torch's way to say that a connection to another member broke."""
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS)

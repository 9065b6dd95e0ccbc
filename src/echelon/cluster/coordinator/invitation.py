"""The join string of a run: where its coordinator listens, and the key to it."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

from echelon.core.errors import UserError

KEY_BYTES = 32
_SCHEME = "echelon"
_FORM = f"{_SCHEME}://HOST:PORT/KEY, where KEY is {2 * KEY_BYTES} hexadecimal digits"


def join_string(host: str, port: int, key: bytes) -> str:
    """Whoever has it can take part in the run."""
    assert len(key) == KEY_BYTES, f"a key of {len(key)} bytes"
    return f"{_SCHEME}://{f'[{host}]' if ':' in host else host}:{port}/{key.hex()}"


def read_join_string(text: str) -> tuple[str, int, bytes]:
    """Host, port and key."""
    try:
        parts = urlsplit(text.strip())
        host, port = parts.hostname, parts.port
    except ValueError:  # a port out of range, brackets without an end
        raise UserError(_refusal(text)) from None
    key = parts.path.removeprefix("/")
    whole = not (parts.query or parts.fragment or parts.username or parts.password)
    right = parts.scheme == _SCHEME and host and port and whole
    if not right or not re.fullmatch(f"[0-9a-fA-F]{{{2 * KEY_BYTES}}}", key):
        raise UserError(_refusal(text))
    assert host is not None
    assert port is not None
    return host, port, bytes.fromhex(key)


def _refusal(text: str) -> str:
    # The key may be the part that is right: it is not for the screen or a log.
    shown = re.sub(r"[0-9a-fA-F]{16,}", "…", text.strip())[:80]
    return f"{shown!r} is not a join string: it has the form {_FORM}"

"""What members other than 0 print, line by line and with their number in front.

Member 0 prints it, for it alone knows where its progress bar is (a bar that is being drawn takes
over `sys.stderr`). Once member 0 has ended the supervisor does. All goes to stderr: stdout
belongs to results.
"""

from __future__ import annotations

import os
import selectors
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress

_CHUNK = 1 << 16
"""All that a pipe holds."""
_JOIN_SECONDS = 1.0


class Relay:
    """Reads the pipes of several members (non-blocking) and prints whole lines."""

    def __init__(self, sources: Mapping[int, int]) -> None:
        self.sources = {descriptor: member for member, descriptor in sources.items()}
        self._partial = dict.fromkeys(sources.values(), b"")

    def read(self, descriptor: int) -> bool:
        """Print what is there; returns whether more may come."""
        try:
            chunk = os.read(descriptor, _CHUNK)
        except BlockingIOError:
            return True
        *lines, self._partial[descriptor] = (self._partial[descriptor] + chunk).split(b"\n")
        for line in lines:
            self._print(descriptor, line)
        return bool(chunk)

    def finish(self) -> None:
        """Print what is still in the pipes, and lines that were never ended."""
        for descriptor in self.sources:
            self.read(descriptor)
            if rest := self._partial[descriptor]:
                self._print(descriptor, rest)
                self._partial[descriptor] = b""

    def _print(self, descriptor: int, line: bytes) -> None:
        text = line.decode(errors="replace").rstrip("\r")
        with suppress(OSError, ValueError):  # where stderr is closed, there is nobody to tell
            print(f"[{self.sources[descriptor]}] {text}", file=sys.stderr, flush=True)


class RelayThread:
    """A relay beside the work of member 0; it sleeps while nobody prints."""

    def __init__(self, relay: Relay) -> None:
        self._relay = relay
        self._stop = os.eventfd(0)
        self._thread: threading.Thread | None = None
        if relay.sources:
            self._thread = threading.Thread(target=self._work, name="echelon-relay", daemon=True)
            self._thread.start()

    def close(self) -> None:
        if self._thread is not None:
            os.eventfd_write(self._stop, 1)
            self._thread.join(_JOIN_SECONDS)

    def _work(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._stop, selectors.EVENT_READ)
            for descriptor in self._relay.sources:
                selector.register(descriptor, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select():
                    if key.fd == self._stop:
                        self._relay.finish()
                        return
                    if not self._relay.read(key.fd):
                        selector.unregister(key.fd)

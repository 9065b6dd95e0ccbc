"""The liaison's thread: one connection to the coordinator, made anew when it breaks."""

from __future__ import annotations

import os
import select
import threading
import time
from contextlib import suppress
from typing import Any, Protocol

from echelon.cluster.coordinator.backlog import Backlog
from echelon.cluster.coordinator.call import Call, Refused, RunOver
from echelon.cluster.coordinator.frames import BadFrame, Message
from echelon.cluster.coordinator.roster import BEAT
from echelon.core.errors import PeerError

_COMMITS = 0.1
"""Seconds between two frames of records, so that quick steps are not slowed by telling of them."""
_SOONEST, _LATEST = 0.02, 0.5
"""Seconds between two attempts to connect."""
_GONE = 5.0
"""Seconds for which a connection may be refused."""
_LAST = 20.0
"""Seconds in which an attempt to connect is over."""


class Party(Protocol):
    """On whose behalf the conversation is held."""

    @property
    def arrival(self) -> dict[str, Any] | None:
        """What to say of having left a generation, as long as the next is awaited."""
        ...

    @property
    def tells_records(self) -> bool:
        """Whether it is this member that reports updates."""
        ...

    def introduce(self, call: Call) -> None: ...

    def beat(self) -> dict[str, Any]: ...

    def heard(self, message: Message) -> None: ...

    def over(self, why: str) -> None:
        """There is nobody to talk to any more."""
        ...


class Conversation:
    """Says what is to be said, hears what is said, and holds the line."""

    def __init__(
        self,
        address: tuple[str, int],
        key: bytes,
        deadline: float,
        backlog: Backlog,
        party: Party,
    ) -> None:
        self._address, self._key, self._deadline = address, key, deadline
        self._backlog, self._party = backlog, party
        self._stopping = threading.Event()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._awake = False
        self._arrived: dict[str, Any] | None = None
        """What was sent of it over the present connection."""
        self._beats_at = self._commits_at = 0.0
        self._call: Call | None = None
        self._thread = threading.Thread(target=self._run, name="echelon-liaison", daemon=True)

    def start(self) -> None:
        """Connect, be welcomed, and go on in a thread."""
        try:
            self._connect(first=True)
        except BaseException:
            self.close()
            raise
        self._thread.start()

    def wake(self) -> None:
        """There is something to say. Costs next to nothing if that is known."""
        if not self._awake:
            self._awake = True
            os.eventfd_write(self._wake, 1)

    def stop(self) -> None:
        """Say nothing more; may be called by the thread itself."""
        self._stopping.set()

    def close(self) -> None:
        self.stop()
        if self._wake < 0 or threading.current_thread() is self._thread:
            return
        self.wake()
        if self._thread.is_alive():
            self._thread.join(_LAST)
        self._hang_up()
        handle, self._wake = self._wake, -1
        os.close(handle)

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                try:
                    self._talk()
                except (OSError, BadFrame):
                    self._hang_up()
                    if not self._stopping.is_set():
                        self._connect()
        except RunOver as error:
            self._party.over(error.why)
        except PeerError as error:
            self._party.over(str(error))
        except Exception as error:  # a callback's, so a bug: nobody is to wait for us in vain
            self._party.over(f"the liaison broke down: {error!r}")
            raise
        finally:
            self._hang_up()

    def _talk(self) -> None:
        call = self._call
        assert call is not None
        poll = select.poll()
        poll.register(call.socket, select.POLLIN)
        poll.register(self._wake, select.POLLIN)
        while not self._stopping.is_set():
            pause = self._say(call, time.monotonic())
            ready = [] if call.has_early else poll.poll(1000 * pause)
            if any(handle == self._wake for handle, _ in ready):
                os.eventfd_read(self._wake)
                self._awake = False  # in this order: what is added from here on wakes again
            if call.has_early or any(handle != self._wake for handle, _ in ready):
                for message in call.receive():
                    self._party.heard(message)

    def _say(self, call: Call, now: float) -> float:
        """Send what is due; returns in how many seconds there is more."""
        if now >= self._beats_at:
            self._beats_at = now + BEAT
            call.send("beat", **self._party.beat())
        arrival = self._party.arrival
        records = self._party.tells_records and now >= self._commits_at
        for frame in self._backlog.frames(records=records or arrival is not None):
            call.send(**frame)
            if frame["kind"] == "commits":
                self._commits_at = now + _COMMITS
        if arrival is not None and arrival is not self._arrived:
            call.send("arrived", **arrival)
        self._arrived = arrival
        until = self._beats_at
        if self._backlog.waits(records=self._party.tells_records):
            until = min(until, self._commits_at)
        return max(0.0, until - now)

    def _connect(self, *, first: bool = False) -> None:
        """Try for as long as the deadline allows: the coordinator may be starting again."""
        began, pause = time.monotonic(), _SOONEST
        while not self._stopping.is_set():
            try:
                self._call = call = Call(self._address, self._key)
                self._party.introduce(call)
            except (Refused, RunOver):
                raise
            except (OSError, BadFrame) as error:
                self._hang_up()
                if first and isinstance(error, ConnectionRefusedError):
                    host, port = self._address
                    raise RunOver(f"nobody listens at {host}:{port}") from None
                self._check(began, error)
                self._stopping.wait(pause)
                pause = min(2 * pause, _LATEST)
            else:
                self._backlog.reconnected()
                self._arrived, self._beats_at, self._commits_at = None, 0.0, 0.0
                return

    def _check(self, began: float, error: Exception) -> None:
        # Its socket outlives a coordinator: where nobody listens, nobody will. Whoever was there
        # before waits a little all the same: there may be a network in between.
        gone = isinstance(error, ConnectionRefusedError)
        patience = min(_GONE, self._deadline) if gone else self._deadline
        if time.monotonic() - began > patience:
            host, port = self._address
            raise PeerError(
                f"the coordinator at {host}:{port} could not be reached for {patience:g} s: {error}"
            )

    def _hang_up(self) -> None:
        call, self._call = self._call, None
        if call is not None:
            with suppress(OSError):
                call.close()

"""Frames, join strings, the backlog of a member, and the post of a coordinator."""

from __future__ import annotations

import errno
import selectors
import socket
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echelon.cluster.coordinator import join_string, read_join_string
from echelon.cluster.coordinator.client import read_generation
from echelon.cluster.coordinator.connections import UNSENT, Line, Switchboard
from echelon.cluster.coordinator.effects import Outbox
from echelon.cluster.coordinator.protocol import (
    RECORDS,
    TEXT,
    BadFrame,
    Decoder,
    Message,
    check,
    common_part,
    encode,
    encode_with,
    one_line,
)
from echelon.cluster.coordinator.server import Post
from echelon.cluster.coordinator.session import Backlog, Item
from echelon.core.errors import UserError
from echelon.data.journal import JournalError

KEY = bytes(range(32))


@given(
    st.lists(
        st.dictionaries(st.text(max_size=5), st.integers() | st.text(), max_size=3), max_size=6
    ),
    st.lists(st.integers(1, 9), max_size=60),
)
def test_frames_come_out_as_they_went_in_however_they_are_cut(
    fields: list[dict[str, Any]], sizes: list[int]
) -> None:
    messages = [{**named, "kind": "x"} for named in fields]
    data = b"".join(encode(**message) for message in messages)
    decoder, found, at = Decoder(), [], 0
    for size in [*sizes, len(data)]:
        found += list(decoder.feed(data[at : at + size]))
        at += size
    assert found == messages


def test_a_frame_with_a_common_part_is_a_frame() -> None:
    parts = encode_with(common_part({"members": [1, 2]}), "generation", index=1)
    expected = {"kind": "generation", "index": 1, "members": [1, 2]}
    assert list(Decoder().feed(b"".join(parts))) == [expected]


def test_a_frame_that_is_too_long_is_not_sent() -> None:
    with pytest.raises(BadFrame, match="over the limit of 1,048,576"):
        encode("x", text="a" * (1 << 20))


def test_text_is_made_fit_for_frames() -> None:
    assert one_line("a\n b\t\x1bc") == "a b ?c"
    assert len(one_line("x" * 5000)) == TEXT
    check({"kind": "rolled_back", "version": 0, "why": one_line("x" * 5000)})


@pytest.mark.parametrize("host", ["127.0.0.1", "node-7.cluster", "::1"])
def test_a_join_string_is_read_as_it_was_written(host: str) -> None:
    assert read_join_string(f" {join_string(host, 4711, KEY)}\n") == (host, 4711, KEY)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "node:4711",
        f"http://node:4711/{KEY.hex()}",
        f"echelon://node/{KEY.hex()}",
        f"echelon://node:99999/{KEY.hex()}",
        f"echelon://:4711/{KEY.hex()}",
        f"echelon://[::1:4711/{KEY.hex()}",
        "echelon://node:4711/abc",
        f"echelon://node:4711/{KEY.hex()}?x=1",
        f"echelon://me@node:4711/{KEY.hex()}",
    ],
)
def test_a_join_string_that_is_none_is_refused_in_one_line_without_its_key(text: str) -> None:
    with pytest.raises(
        UserError, match=r"is not a join string: it has the form echelon://"
    ) as error:
        read_join_string(text)
    assert "\n" not in str(error.value)
    assert KEY.hex() not in str(error.value)


def records(*versions: int) -> list[tuple[int, int, int, int, int]]:
    return [(0, v, v + 1, v, v) for v in versions]


def test_records_travel_together_and_are_kept_until_they_are_acknowledged() -> None:
    backlog = Backlog()
    backlog.report(1, records(1, 2))
    backlog.report(1, records(3))
    backlog.put(Item("rolled_back", {"version": 0, "why": "x"}))
    backlog.report(2, records(4))
    assert [frame["kind"] for frame in backlog.frames(records=False)] == ["rolled_back"]
    frames = backlog.frames(records=True)
    assert [(f["generation"], len(f["records"]), f["seq"]) for f in frames] == [
        (1, 3, 2),
        (2, 1, 3),
    ]
    assert backlog.frames(records=True) == []
    backlog.acknowledged(2)
    backlog.report(2, records(5))
    backlog.reconnected()
    again = backlog.frames(records=True)
    assert [(f["records"][0][3], f["seq"]) for f in again] == [(4, 3), (5, 4)]


def test_who_does_not_lead_forgets_what_is_on_record() -> None:
    backlog = Backlog()
    for version in range(1, 5):
        backlog.report(1, records(version))
    backlog.on_record(3)
    assert [frame["records"][0][3] for frame in backlog.frames(records=True)] == [4]
    backlog.forget_records()
    backlog.reconnected()
    assert not backlog.waits(records=True)


def test_what_an_expelled_member_did_is_not_its_to_tell_but_its_leave_is() -> None:
    backlog = Backlog()
    backlog.report(1, records(1))
    backlog.put(Item("lease", {}))
    last = backlog.put(Item("leave", {}))
    backlog.expelled()
    assert backlog.holds(last)
    assert [frame["kind"] for frame in backlog.frames(records=True)] == ["leave"]


def test_more_records_than_a_frame_takes_are_sent_in_several() -> None:
    backlog = Backlog()
    backlog.report(1, records(*range(1, 2 * RECORDS + 2)))
    assert [len(f["records"]) for f in backlog.frames(records=True)] == [RECORDS, RECORDS, 1]


def test_a_generation_that_lacks_something_is_refused() -> None:
    with pytest.raises(BadFrame, match="lacks something"):
        read_generation({"kind": "generation", "number": 1})


def test_one_that_does_not_read_is_noticed_before_it_costs_much_memory() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()),
    ):
        connection, _ = listener.accept()
        with connection:
            line = Line(connection, "x", 0.0)
            part, put = bytes(1 << 20), 0
            while not line.is_clogged:
                line.put(part, part)
                line.flush()
                put += 2 * len(part)
                assert put < UNSENT + (64 << 20), "the kernel holds some of it, but not that much"
            assert line.has_unsent


class Tired(socket.socket):
    """Has no descriptor left for the first who comes."""

    awake = False

    def accept(self) -> tuple[socket.socket, Any]:
        if not self.awake:
            self.awake = True
            raise OSError(errno.EMFILE, "Too many open files")
        return super().accept()


class Deaf:
    """Hears nothing of interest."""

    def take(self, now: float, line: Line, message: Message) -> None: ...

    def read_up(self, now: float) -> None: ...

    def hung_up(self, now: float, line: Line) -> None: ...


def test_without_descriptors_those_who_come_wait_and_are_let_in_later(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with Tired() as listener, selectors.DefaultSelector() as selector:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        with socket.create_connection(listener.getsockname()):
            board = Switchboard(listener, selector, Deaf())
            counts = []
            for _ in range(2):
                board.tick(time.monotonic())
                for key, events in selector.select(30):
                    key.data(events)
                counts.append(len(board.lines))
            board.close_all()
    assert counts == [0, 1]
    assert "could not be accepted: Too many open files" in capsys.readouterr().err


class Full:
    """A journal on a disk that is full for a while."""

    def __init__(self) -> None:
        self.full = True
        self.kinds: list[str] = []
        self.synced = 0

    def add(self, kind: str, **_fields: Any) -> None:
        if self.full:
            raise JournalError("journal.jsonl: cannot be written: No space left on device")
        self.kinds.append(kind)

    def sync(self) -> None:
        self.synced += 1
        if self.full:
            raise JournalError("journal.jsonl: cannot be synced: Input/output error")

    def close(self) -> None: ...


def test_a_full_disk_delays_what_is_written_and_loses_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    journal, outbox = Full(), Outbox()
    post = Post(journal, outbox)
    outbox.note("generation")
    outbox.note("committed")
    for now in range(3):
        assert post.write(float(now)) is False
    assert capsys.readouterr().err.count("nothing is answered until it can be written") == 1
    journal.full = False
    assert post.write(3.0) is True
    assert journal.kinds == ["generation", "committed"]
    post.sync()
    post.sync()
    assert journal.synced == 1, "what matters is brought to disk, once"
    outbox.note("committed")
    assert post.write(4.0)
    post.sync()
    assert journal.synced == 1
    post.tick(100.0)
    assert journal.synced == 2
    outbox.note("finished")
    assert post.write(5.0)
    journal.full = True
    post.sync()
    assert "Input/output error" in capsys.readouterr().err


def test_a_disk_that_stays_full_ends_the_coordinator() -> None:
    journal, outbox = Full(), Outbox()
    post = Post(journal, outbox)
    outbox.note("committed")
    post.write(0.0)
    with pytest.raises(JournalError, match="No space left"):
        post.write(61.0)

"""Frames and join strings: what is written is read, and what is neither is refused."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echelon.cluster.coordinator import join_string, read_join_string
from echelon.cluster.coordinator.client import read_generation
from echelon.cluster.coordinator.protocol import (
    TEXT,
    BadFrame,
    Decoder,
    check,
    common_part,
    encode,
    encode_with,
    one_line,
)
from echelon.core.errors import UserError

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


def test_a_generation_that_lacks_something_is_refused() -> None:
    with pytest.raises(BadFrame, match="lacks something"):
        read_generation({"kind": "generation", "number": 1})


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

"""Segments: shared memory from a peer is checked before it is used."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from echelon.comm import shared_memory
from echelon.comm.channel import Segment
from echelon.core.errors import PeerError


def test_it_is_zeros_and_cannot_change_its_size() -> None:
    segment = Segment.create(5000)
    try:
        assert segment.tensor.shape == (5000,)
        assert not segment.tensor.any()
        with pytest.raises(PermissionError):
            os.ftruncate(segment.descriptor, 100)
    finally:
        segment.close()


def test_a_file_is_no_memory(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(4096))
    with pytest.raises(PeerError, match="not of shared memory"):
        Segment.from_descriptor(os.open(path, os.O_RDWR), 4096)


@pytest.mark.parametrize(
    "seals", [0, fcntl.F_SEAL_SHRINK, 15], ids=["none", "may grow", "read only"]
)
def test_memory_that_is_not_sealed_as_it_should_be_is_refused(seals: int) -> None:
    descriptor = os.memfd_create("echelon-test", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    os.ftruncate(descriptor, 4096)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    with pytest.raises(PeerError, match="may still change its size, or may not be written"):
        Segment.from_descriptor(descriptor, 4096)


def test_a_segment_has_a_size() -> None:
    with pytest.raises(ValueError, match="a segment of 0 bytes"):
        Segment.create(0)


def test_more_than_the_host_has_is_refused_before_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shared_memory, "_free", lambda: 8191)
    with pytest.raises(PeerError, match="no shared memory of 8,192 bytes: 8,191 are free"):
        Segment.create(8192)
    Segment.create(8191).close()


def test_what_is_free_is_known() -> None:
    assert 1 << 20 < shared_memory._free() < 1 << 50

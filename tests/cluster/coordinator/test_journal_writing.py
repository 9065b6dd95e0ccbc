"""The coordinator's journal on a full disk: entries are delayed, not lost."""

from __future__ import annotations

from typing import Any

import pytest

from echelon.cluster.coordinator.effects import Outbox
from echelon.cluster.coordinator.server import Post
from echelon.data.journal import JournalError


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

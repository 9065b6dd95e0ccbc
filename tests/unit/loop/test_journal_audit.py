"""The audit refuses a journal without a beginning."""

from __future__ import annotations

from pathlib import Path

import pytest

from echelon.core.errors import DataError
from echelon.loop.journal import audit


@pytest.mark.parametrize("text", ["", '{"kind":"begu'], ids=["empty", "cut off"])
def test_a_journal_without_a_beginning_is_damaged(tmp_path: Path, text: str) -> None:
    (tmp_path / "journal.jsonl").write_text(text)
    with pytest.raises(DataError, match=r"journal\.jsonl: the journal has no beginning"):
        audit(tmp_path, checkpoint=False)

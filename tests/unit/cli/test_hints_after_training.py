"""The commands proposed after a run can be copied, and they have an effect."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import nn

from echelon.cli.train import _hints
from echelon.loop import Result


def _hinted(folder: Path, reason: str = "3 epochs done") -> str:
    model = nn.Identity()
    result = Result("mine-0001", "done", reason, 3, 9, 0.1, {}, None, folder, None, model)
    return "\n".join(_hints(result))


def test_the_usual_folder_is_not_named_even_where_it_is_given_in_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "folder" not in _hinted(Path("runs/mine-0001"))
    assert "folder" not in _hinted(tmp_path / "runs" / "mine-0001")
    assert "track.folder=" in _hinted(tmp_path / "elsewhere" / "mine-0001")


@pytest.mark.parametrize(
    ("reason", "key"),
    [
        ("3 epochs done", "epochs"),
        ("40 steps done", "steps"),
        ("0.5 minutes are over", "minutes"),
        ("no better for 5 evaluations", "epochs"),
    ],
)
def test_a_longer_run_raises_what_ended_this_one(reason: str, key: str) -> None:
    assert f"--resume mine-0001 {key}=…" in _hinted(Path("runs/mine-0001"), reason)

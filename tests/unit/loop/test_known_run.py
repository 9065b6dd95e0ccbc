"""An error names the setting that a resumed run must not change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from echelon.core.config import job_from
from echelon.core.errors import RunError
from echelon.loop import KnownRun, check_resume

BEGAN: dict[str, Any] = {"optimizer": {"name": "adam", "lr": 0.1}, "model": {"name": "mlp"}}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (
            {"optimizer": {"name": "adam", "lr": 0.2}},
            "optimizer.lr = 0.1: it cannot go on with 0.2",
        ),
        (
            {"model": {"name": "mlp", "hidden": [8]}},
            "model.hidden = None: it cannot go on with [8]",
        ),
        ({"seed": 4}, "seed = 0: it cannot go on with 4"),
    ],
)
def test_the_setting_that_differs_is_told_and_no_other(
    tmp_path: Path, change: dict[str, Any], told: str
) -> None:
    began = job_from(BEGAN)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(began.model_dump(mode="json")))
    known = KnownRun("mine-0001", tmp_path, began, {})
    check_resume(known, job_from(BEGAN | {"batch_size": 7, "epochs": 3}))
    with pytest.raises(RunError) as caught:
        check_resume(known, job_from(BEGAN | change))
    assert str(caught.value) == f"run 'mine-0001' began with {told}"

"""Members that are cut off and not given up: no frame may be lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from echelon.cluster.coordinator import Reporter
from tests.cluster.shared import wait_for

from .real import Coordinator, Trainer, arrive_together


@pytest.mark.timeout(120)
def test_what_was_said_while_cut_off_is_said_again(tmp_path: Path) -> None:
    with (
        Coordinator(tmp_path, expected=2) as coordinator,
        Trainer(coordinator, 0) as zero,
        Trainer(coordinator, 1) as one,
    ):
        arrive_together(zero, one)
        reporter = Reporter(coordinator.address, coordinator.key)
        try:
            # Shorter than what counts as silence: nobody is given up.
            wait_for(lambda: reporter.drop(0, 1.0))
            zero.liaison.report([[0, 0, 64, 1, 1]])
            wait_for(lambda: coordinator.written("committed"))
            zero.liaison.report([[0, 64, 128, 2, 2]])
            wait_for(lambda: len(coordinator.written("committed")) == 2)
        finally:
            reporter.close()
        assert coordinator.written("lost") == []

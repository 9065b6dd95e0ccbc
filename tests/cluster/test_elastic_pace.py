"""A slow member costs its share and not the run, and is named."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.cluster.elastic import ENDLESS, SAMPLES, proved, running

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("forked_commands")]

# The first process to ask is the slow one: 2 ms per sample instead of half of one.
SLOW = """
import os, time

def pace():
    try:
        os.close(os.open("slow", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return 0.0005
    return 0.002

PACE = None

def forward(model, batch):
    global PACE
    PACE = PACE or pace()
    time.sleep(PACE * len(batch["x"]))
    return model(batch["x"])
"""


def test_a_slow_member_gets_less_to_do_and_is_named(tmp_path: Path) -> None:
    with running(tmp_path, *ENDLESS, workers=2, forward=SLOW) as run:
        divided = run.wait("shares")
        run.reach(divided["version"] + 60)
        _, errors = run.stop()
    slow = min(range(2), key=divided["shares"].__getitem__)
    assert 0.1 < divided["shares"][slow] < 0.4
    assert sum(divided["shares"]) == pytest.approx(1)
    told, *_ = re.findall(r"member (\d) is ([\d.]+) times slower than the others", errors)
    assert int(told[0]) == slow
    assert float(told[1]) > 1.5
    (row,) = [line for line in proved(tmp_path) if re.match(r"[123] ", line)][:1]
    by = [int(found.replace(",", "")) for found in re.findall(r"\d: ([\d,]+)", row)]
    assert sum(by) == SAMPLES
    assert by[slow] < 0.45 * SAMPLES

"""Heartbeats are cheap to write and are read correctly across processes."""

from __future__ import annotations

import time
import timeit
from contextlib import closing
from typing import Any

from echelon.cluster.health import Pulses
from echelon.cluster.supervisor import launch
from echelon.cluster.workers import Member


def test_what_is_written_is_read() -> None:
    with closing(Pulses(2)) as pulses:
        pulses.describe(1, "compute")
        pulses.beat(1, 7)
        assert (pulses.read(1).step, pulses.read(1).doing) == (7, "compute")
        assert pulses.read(1).where == "at step 7 (compute)"
        assert pulses.read(0).where == "before its first step"
        pulses.beat(0, 1234)
        assert pulses.read(0).where == "at step 1,234"
        assert pulses.read(1).moment <= pulses.read(0).moment


def test_a_long_text_is_cut_and_a_short_one_replaces_it() -> None:
    with closing(Pulses(2)) as pulses:
        pulses.describe(0, "é" * 200)
        assert set(pulses.read(0).doing) == {"é"}
        pulses.describe(0, "save")
        assert pulses.read(0).doing == "save"
        assert pulses.read(1).doing == ""


def test_a_pulse_costs_about_a_microsecond() -> None:
    def work(member: Member) -> dict[str, Any]:
        clock = timeit.Timer(lambda: member.pulse(5, "x"), timer=time.thread_time)
        return {"seconds": min(clock.repeat(20, 1000)) / 1000}

    assert launch(1, work, deadline=5)["seconds"] < 10e-6  # 0.4 µs on an idle machine

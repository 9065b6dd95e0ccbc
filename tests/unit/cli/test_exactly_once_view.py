"""The proof of exactly-once as `echelon runs ledger` prints it."""

from __future__ import annotations

import dataclasses
import io
from typing import Any

from rich.console import Console

from echelon.cli.runs import show_ledger
from echelon.data.proof import Account, EpochAccount, Happening


def epoch(number: int, **changed: Any) -> EpochAccount:
    whole = EpochAccount(
        epoch=number,
        samples=1000,
        once=1000,
        left_out=0,
        twice=0,
        never=0,
        first=10 * number + 1,
        last=10 * number + 10,
        finished=True,
        members={0: 500, 1: 500},
        twice_at=[],
        never_at=[],
    )
    return dataclasses.replace(whole, **changed)


def shown(epochs: list[EpochAccount], **changed: Any) -> list[str]:
    account = Account(
        run="digits-0001",
        samples=1000,
        batch_size=100,
        version=1234,
        status="done",
        taken_over=0,
        epochs=epochs,
        generations=2,
        happenings=[],
    )
    out = io.StringIO()
    show_ledger(Console(file=out, width=200), dataclasses.replace(account, **changed))
    return [line.rstrip() for line in out.getvalue().splitlines()]


def test_epochs_are_rows() -> None:
    lines = shown([epoch(0), epoch(1, once=400, never=600, finished=False, last=14)], status=None)
    assert lines[0] == "digits-0001  not finished  version 1,234"
    assert lines[1] == "1,000 samples · batches of 100 · 2 generations"
    header = "EPOCH SAMPLES ONCE TWICE NEVER LEFT OUT VERSIONS BY MEMBER"
    assert " ".join(lines[3].split()) == header
    assert " ".join(lines[4].split()) == "0 1,000 1,000 0 0 0 1 – 10 0: 500 · 1: 500"
    assert lines[5].split()[-2:] == ["under", "way"]
    assert lines[-1] == "exactly once: 1 epoch finished · epoch 1 under way"


def test_many_epochs_that_went_alike_share_a_row() -> None:
    lines = shown([epoch(n) if n != 50 else epoch(n, members={0: 1000}) for n in range(100)])
    rows = [line for line in lines if "500" in line or "1: " in line or "0: 1,000" in line]
    assert [row.split("  ")[0] for row in rows] == ["0 – 49", "50", "51 – 99"]
    assert "1 – 500" in rows[0]
    assert lines[-1] == "exactly once: 100 epochs finished"


def test_what_happened_has_its_cost() -> None:
    happenings = [
        Happening("lost", 5.0, 50, 1, "killed: signal 9", 0.8, 1),
        Happening("lost", 6.0, 60, 2, "frozen [T]", None, None),
        Happening("rolled_back", 7.0, 70, None, "every holder is gone", 2.5, 12),
        Happening("rolled_back", 8.0, 80, None, "resumed", 0.0, 0),
        Happening("coordinator", 9.0, 90, None, "started again as process 9"),
        Happening("joined", 10.0, 100, 3, "process 77 on b"),
        Happening("resumed", 11.0, 110, None, "2 workers"),
    ]
    text = shown([epoch(0)], happenings=happenings)
    start = text.index("what happened") + 1
    rows = [" ".join(line.split()[1:]) for line in text[start : start + 7]]
    assert rows == [
        "version 50 member 1 lost killed: signal 9 1 update made again, 0.8 s lost",
        "version 60 member 2 lost frozen [T] not made good yet",
        "version 70 rolled back every holder is gone 12 updates made again, 2.5 s lost",
        "version 80 rolled back resumed",
        "version 90 coordinator started again as process 9",
        "version 100 member 3 joined process 77 on b",
        "version 110 resumed 2 workers",
    ]


def test_of_many_happenings_the_latest_are_shown() -> None:
    many = [Happening("stalled", 5.0, n, 1, f"text {n}") for n in range(100)]
    lines = shown([epoch(0)], happenings=many)
    assert "… 40 before" in lines
    assert not any("text 39" in line for line in lines)
    assert any("text 40" in line for line in lines)


def test_the_verdict_names_what_is_wrong_or_was_left_out() -> None:
    lines = shown([epoch(0, once=900, twice=100)], problems=["epoch 0: 100 samples twice", "b"])
    assert lines[-3:] == ["not exactly once:", "  epoch 0: 100 samples twice", "  b"]
    lines = shown([epoch(0, once=900, left_out=100, first=None, last=None)], taken_over=7)
    assert lines[2] == "there was no journal up to version 7: a checkpoint is believed"
    assert "–" in lines[5]
    assert lines[-1].endswith("left out: 100 (their updates were not finite)")


def test_a_run_that_has_committed_nothing_has_a_verdict_too() -> None:
    assert shown([], status=None, version=0)[-1] == "exactly once: 0 epochs finished"

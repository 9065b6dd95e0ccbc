"""What trainers and servers did, in a report."""

from __future__ import annotations

from echelon.track.report.nodes import nodes

TRAINER = {
    "staleness_0": 30.0,
    "staleness_2": 10.0,
    "applied": 40.0,
    "refused": 3.0,
    "duplicates": 1.0,
    "bytes_pushed": 2_500_000.0,
    "bytes_pulled": 800.0,
    "wait_seconds": 1.25,
}


def test_a_table_has_a_row_for_every_trainer_and_server() -> None:
    found = {"trainers": {"0": TRAINER, "1": {}}, "servers": {"0": {"rounds": 41.0}}}
    trainers, servers = nodes(found)
    assert trainers.count("<tr>") == 3
    first = ["0", "40", "0.50", "2", "2 MB", "800 B", "1.2 s", "3", "1"]
    assert "".join(f"<td>{text}</td>" for text in first) in trainers
    assert "<td>41</td>" in servers


def test_what_is_not_known_is_nothing() -> None:
    trainers, _ = nodes({"trainers": {"<b>": {}}})
    assert "&lt;b&gt;" in trainers
    assert "0 B" in trainers

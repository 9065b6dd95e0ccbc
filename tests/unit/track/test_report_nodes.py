"""What trainers and servers did, in a report and on the command line."""

from __future__ import annotations

from echelon.track.report.page import nodes
from echelon.track.views import node_rows

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
FIRST = ["0", "40", "0.50", "0: 30, 2: 10", "2 MB", "800 B", "1.2 s", "3", "1"]


def test_a_table_has_a_row_for_every_trainer_and_server() -> None:
    found = {"trainers": {"0": TRAINER, "1": {}}, "servers": {"0": {"rounds": 41.0}}}
    trainers, servers = nodes(found)
    assert trainers.count("<tr>") == 3
    assert "".join(f"<td>{text}</td>" for text in FIRST) in trainers
    assert "<td>41</td>" in servers


def test_what_is_not_known_is_nothing_and_what_is_shared_is_not_sent() -> None:
    trainers, _ = nodes({"trainers": {"<b>": {}}})
    assert "&lt;b&gt;" in trainers
    assert trainers.count("<td>in memory</td>") == 2


def test_merit_is_told_where_trainers_are_judged() -> None:
    judged = TRAINER | {"merit": 0.5, "rejected": 7.0}
    trainers, _ = node_rows({"trainers": {"0": judged, "1": TRAINER}})
    assert trainers.heads[-2:] == ("merit", "rejected")
    assert trainers.rows == [[*FIRST, "0.50", "7"], ["1", *FIRST[1:], "–", "0"]]

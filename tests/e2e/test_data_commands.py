"""`echelon data inspect`, `verify` and `reshard` as a person types them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from echelon.data import write_shards

from .command import echelon, last_json
from .test_mistakes import asked, refused

ROWS = "age,text,label\n" + "".join(
    f"{n % 50 or ''},word{n}\x1b[31m [red]{n % 7}[/red],{'yes' if n % 4 else 'no'}\n"
    for n in range(400)
)


@pytest.fixture
def prepared(tmp_path: Path) -> Path:
    for part, rows in (("train", 900), ("valid", 90)):
        columns = {"x": np.random.default_rng(0).normal(size=(rows, 5)), "y": np.arange(rows) % 3}
        write_shards(tmp_path / "prepared" / part, [columns], rows_per_shard=300)
    return tmp_path


def test_inspect_tells_what_is_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text(ROWS)
    done = echelon("data", "inspect", "x.csv", "--html", "x.html", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("x.csv  400 records, 3 columns, csv, ")
    assert lines[2].split()[:7] == ["age", "int64", "2.0", "%", "49", "1", "25"]
    assert "yes  300  75.0 %" in done.stdout
    assert "[red]" in done.stdout  # text, not markup
    assert "\x1b" not in done.stdout  # and nothing that a terminal obeys
    assert lines[-1] == "x.html: written"
    assert (tmp_path / "x.html").read_text().startswith("<!doctype html>")


def test_inspect_speaks_to_programs(tmp_path: Path, prepared: Path) -> None:
    (tmp_path / "x.log").write_text("1\t2\n3\t4\n")
    said = ["data", "inspect", "x.log", "header=false", "--format", "tsv", "--json"]
    (part,) = last_json(asked(*said, folder=tmp_path))["parts"]
    assert [column["name"] for column in part["columns"]] == ["column0", "column1"]
    parts = last_json(asked("data", "inspect", "prepared", "--json", folder=prepared))["parts"]
    assert [(part["name"], part["records"]) for part in parts] == [("train", 900), ("valid", 90)]
    assert parts[0]["classes"] == [[0, 300], [1, 300], [2, 300]]


def test_verify_finds_what_was_damaged(prepared: Path) -> None:
    whole = asked("data", "verify", "prepared", folder=prepared)
    assert whole.returncode == 0, whole.stderr
    assert whole.stdout.startswith("prepared: whole: 2 sets, 4 shards, 990 records, ")
    for number in (0, 2):
        path = prepared / "prepared" / "train" / f"shard-0000{number}.arrow"
        content = bytearray(path.read_bytes())
        content[2000] ^= 0xFF
        path.write_bytes(content)
    damaged = asked("data", "verify", "prepared", folder=prepared)
    assert damaged.returncode == 1
    assert damaged.stderr.startswith(
        "damaged: prepared/train/shard-00000.arrow: corrupt: checksum of block 0 is wrong; "
        "one of columns 'x', 'y', records 0–299 "
    )
    assert damaged.stderr.endswith("(the first of 2 damages in 2 files; --json lists all)\n")
    listed = asked("data", "verify", "prepared", "--json", folder=prepared)
    assert listed.returncode == 1
    assert len(json.loads(listed.stdout)["findings"]) == 2


def test_reshard_keeps_the_records(prepared: Path) -> None:
    done = asked("data", "reshard", "prepared", "-n", "2", "--to", "new", folder=prepared)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("new: 2 sets of 2 shards, 990 records, ")
    assert asked("data", "verify", "new", folder=prepared).returncode == 0
    old, new = (
        last_json(asked("data", "inspect", name, "--json", folder=prepared))["parts"]
        for name in ("prepared", "new")
    )
    assert [part["examples"] for part in old] == [part["examples"] for part in new]
    in_place = asked("data", "reshard", "prepared", "--shards", "1", "--overwrite", folder=prepared)
    assert in_place.returncode == 0, in_place.stderr
    assert len(list((prepared / "prepared" / "train").glob("*.arrow"))) == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["inspect", "nowhere"], "nowhere: there is no such file or folder"),
        (["inspect", "x.csv", "--label", "lable"], "'lable' is unknown; did you mean 'label'?"),
        (["inspect", "x.csv", "--format", "cvs"], "format 'cvs' is unknown; did you mean 'csv'?"),
        (["inspect", "x.csv", "header"], "'header' is no option of a reader: write NAME=VALUE"),
        (["inspect", "x.csv", "header=[1"], "'header=[1': its value is not YAML"),
        (["inspect", "x.csv", "--html", "no/x.html"], "--html no/x.html: there is no folder no"),
        (["verify", "nowhere"], "nowhere: there is no such folder"),
        (["verify", "x.csv"], "x.csv: is a file, not a folder of shards"),
        (["reshard", "prepared", "--shards", "2"], "say where the new shards go (--to)"),
        (["reshard", "prepared", "-n", "0", "--to", "n"], "shards is 0: it must be at least 1"),
        (["reshard", "prepared", "-n", "91", "--to", "n"], "90 records cannot be cut into 91"),
    ],
)
def test_mistakes_are_one_line(prepared: Path, words: list[str], said: str) -> None:
    (prepared / "x.csv").write_text(ROWS)
    assert said in refused("data", *words, folder=prepared)
    assert not (prepared / "n").exists()

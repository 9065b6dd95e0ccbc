"""Prepared data is inspected, verified and resharded as a whole, with its description."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from echelon.core.errors import DataError
from echelon.data.inspect import inspect, verify
from echelon.data.prepare import prepare
from echelon.data.prepare.encoders import open_prepared
from echelon.data.shards.reshard import reshard


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as `echelon data prepare` makes it."""
    folder = tmp_path_factory.mktemp("made")
    rows = "".join(f"{n},{'abc'[n % 3]}\n" for n in range(90))
    (folder / "raw.csv").write_text("n,label\n" + rows + "1,b\n")
    prepare(
        {
            "read": str(folder / "raw.csv"),
            "clean": [{"kind": "duplicates", "columns": ["n"]}],
            "split": {"by": "ratio", "train": 0.8, "valid": 0.2, "test": 0},
            "features": [{"kind": "classes", "from": "label", "to": "y"}],
            "keep": ["n"],
            "write": {"folder": str(folder / "prepared"), "shards": 3},
        },
        workers=1,
    )
    return folder / "prepared"


@pytest.fixture
def prepared(made: Path, tmp_path: Path) -> Path:
    """A resharded copy, which must behave like the original in every test."""
    reshard(made, 2, tmp_path / "prepared")
    return tmp_path / "prepared"


def test_cut_anew_it_is_as_whole_and_as_usable_as_before(made: Path, prepared: Path) -> None:
    for folder, shards in ((made, 3), (prepared, 2)):
        found = verify(folder)
        assert found.findings == []
        assert (found.sets, found.shards, found.records) == (2, 2 * shards, 90)
        facts = open_prepared(folder).facts["splits"]
        assert {name: split["shards"] for name, split in facts.items()} == {
            "train": shards,
            "valid": shards,
        }
    before, after = open_prepared(made), open_prepared(prepared)
    assert before.learnt("y") == after.learnt("y")
    assert before.facts["counts"] == after.facts["counts"]
    assert before.facts["digest"] != after.facts["digest"]


def test_inspect_tells_how_it_was_prepared(prepared: Path) -> None:
    profile = inspect(prepared)
    assert [part.name for part in profile.parts] == ["train", "valid"]
    assert profile.preparation is not None
    assert profile.preparation.startswith("prepared from 91 records; taken out: 1 ")
    assert profile.preparation.endswith("; 90 kept")
    assert profile.parts[0].label == "y"


def test_what_was_learnt_is_verified_too(prepared: Path) -> None:
    (path,) = (prepared / "learnt").rglob("*.json")
    path.write_text(path.read_text() + " ")
    (prepared / "quarantine.jsonl").unlink()
    told = {Path(f.file).name: f.message for f in verify(prepared).findings}
    assert told[path.name].endswith(f"{path.name}: corrupt: its checksum is wrong")
    assert told["quarantine.jsonl"].endswith("cannot be read: No such file or directory")
    assert len(told) == 2


def test_manifests_that_are_gone_are_damages(prepared: Path) -> None:
    for split in ("train", "valid"):
        (prepared / split / "manifest.json").unlink()
    found = verify(prepared)
    assert (found.sets, found.files) == (0, 2)


def test_facts_that_cannot_be_read_are_a_damage_and_stop_a_reshard(prepared: Path) -> None:
    path = prepared / "prepared.json"
    for content, said in (("{", "cannot be read as JSON"), ("{}", "it has no checksums")):
        path.write_text(content)
        (finding,) = verify(prepared).findings
        assert said in finding.message
        assert said in str(inspect(prepared).preparation)
        with pytest.raises(DataError, match=said):
            reshard(prepared, 1, overwrite=True)


@pytest.mark.parametrize("anew", [False, True])
def test_facts_that_were_changed_are_a_damage_and_are_not_loaded(
    made: Path, prepared: Path, anew: bool
) -> None:
    folder = prepared if anew else shutil.copytree(made, prepared.with_name("copy"))
    path = folder / "prepared.json"
    facts = json.loads(path.read_text())
    path.write_text(json.dumps(facts))  # laid out otherwise, it says the same
    assert verify(folder).findings == []
    assert open_prepared(folder).counts["kept"] == 90
    facts["counts"]["kept"] = 91
    path.write_text(json.dumps(facts))
    (learnt,) = (folder / "learnt").rglob("*.json")
    learnt.write_text(learnt.read_text() + " ")
    said = f"{path}: corrupt: it is not as it was written, its checksum is wrong"
    first, second = verify(folder).findings
    assert (first.file, first.message) == (str(path), said)
    assert second.file == str(learnt)
    for use in (open_prepared, lambda folder: reshard(folder, 1, overwrite=True)):
        with pytest.raises(DataError) as error:
            use(folder)
        assert str(error.value) == said


def test_facts_of_before_have_no_digest_and_are_loaded(prepared: Path) -> None:
    path = prepared / "prepared.json"
    facts = json.loads(path.read_text())
    del facts["sha256"]
    path.write_text(json.dumps(facts))
    assert verify(prepared).findings == []
    assert open_prepared(prepared).facts == facts
    reshard(prepared, 1, overwrite=True)
    assert "sha256" in open_prepared(prepared).facts


@pytest.mark.parametrize("name", ["../raw.csv", "/etc/hostname"])
def test_facts_do_not_lead_outside(name: str, prepared: Path) -> None:
    path = prepared / "prepared.json"
    facts = json.loads(path.read_text())
    facts["checksums"][name] = "0"
    del facts["sha256"]
    path.write_text(json.dumps(facts))
    (finding,) = verify(prepared).findings
    assert finding.message.endswith(f"names a file outside of the folder: {name!r}")

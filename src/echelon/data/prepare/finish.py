"""The last pass: write what describes the shards, so that `out/` can be renamed into place.

    out/
      prepared.json              what was done: recipe, inputs, counts of records, checksums
      train/, valid/, test/      shards (written before) and their manifest with statistics
      learnt/clean-N, feature-N  what steps and features need to encode new records
      quarantine.jsonl           records that were taken out, with file, line and reason
      noted.jsonl                flagged records, if there are any

Every file is flushed to disk; prepared.json is written last. `prepare` renames the folder.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from echelon.core.errors import DataError
from echelon.core.files import fsync, sha256_file, write_atomic
from echelon.data.formats.cutting import DAMAGED
from echelon.data.formats.records import Source
from echelon.data.prepare import workdir
from echelon.data.prepare.encoders import FORMAT, LEARNT, NOTED, QUARANTINE, VERSION
from echelon.data.prepare.engine import Engine
from echelon.data.prepare.passes import Work
from echelon.data.prepare.ranking import SPLITS
from echelon.data.prepare.workdir import FILE as UNREAD
from echelon.data.prepare.workdir import READ, Desk, added, unpack
from echelon.data.prepare.write import OUT, name_of
from echelon.data.prepare.write import STAGE as SCATTER
from echelon.data.shards.layout import MANIFEST, PREPARED, Field, Manifest, ShardEntry, sealed
from echelon.data.shards.statistics import Statistics


def finish(engine: Engine, sources: Sequence[Source], digest: str) -> dict[str, Any]:
    """Write everything beside the shards; return the content of prepared.json."""
    work, desk = engine.work, engine.desk
    out = desk.stage(OUT)
    splits = {name: _manifest(desk, name) for name in SPLITS if (out / name).is_dir()}
    checksums = {f"{name}/{MANIFEST}": sha256_file(out / name / MANIFEST) for name in splits}
    for path in [*_quarantine(work, out), *_learnt(work, out)]:
        checksums[str(path.relative_to(out))] = sha256_file(path)
    facts = sealed(
        {
            "format": FORMAT,
            "version": VERSION,
            "recipe": _recipe(work),
            "inputs": [_input(source) for source in sources],
            "columns": {name: str(kind) for name, kind in work.outline.raw.items()},
            "counts": _counts(work),
            "damaged": _damaged(work),
            "splits": {
                name: {"rows": it.rows, "shards": len(it.shards), "bytes": it.bytes}
                for name, it in splits.items()
            },
            "learnt": sorted(path.name for path in (out / LEARNT).iterdir()),
            "checksums": checksums,
            "digest": digest,
        }
    )
    write_atomic(
        out / PREPARED, json.dumps(facts, ensure_ascii=False, indent=1) + "\n", durable=True
    )
    fsync(out)
    return facts


def check_place(folder: Path, digest: str, *, overwrite: bool) -> bool:
    """Return whether the folder already holds the data of this digest.

    Raise DataError if it holds something else that must not be replaced.
    """
    if not folder.exists():
        return False
    if not folder.is_dir():
        raise DataError(f"{folder}: is a file; prepared data needs a folder")
    if not any(folder.iterdir()):
        return False
    try:
        known = json.loads((folder / PREPARED).read_text(encoding="utf-8"))
        same = known.get("digest") == digest
    except FileNotFoundError:
        raise DataError(f"{folder}: holds other files; prepare into a folder of its own") from None
    except (OSError, ValueError, AttributeError):
        same = False
    if not same and not overwrite:
        raise DataError(
            f"{folder}: holds data of another recipe or of other inputs; "
            f"say --overwrite (overwrite=True) to replace it"
        )
    return same and not overwrite


def _manifest(desk: Desk, split: str) -> Manifest:
    """Write the manifest of a split, with the merged statistics of its shards."""
    schema = tuple(Field.from_json(plain) for plain in desk.recall("fields") or ())
    statistics = Statistics(schema)
    entries = []
    for facts in desk.recall(f"shards-{split}") or ():
        entry = ShardEntry.from_json(facts)
        entries.append(entry)
        number = int(entry.file.removeprefix("shard-").removesuffix(".arrow"))
        assert entry.file == name_of(number)
        path = desk.path(f"shards-{split}", number, "statistics")
        statistics.merge(unpack(path.read_bytes()))
    manifest = Manifest(schema, tuple(entries), statistics.summary())
    folder = desk.root / OUT / split
    write_atomic(folder / MANIFEST, json.dumps(manifest.to_json(), indent=1), durable=True)
    fsync(folder)
    return manifest


def _quarantine(work: Work, out: Path) -> list[Path]:
    """Write the quarantined records and, if there are any, the flagged ones; return the files."""
    stages = [segment.stage for segment in work.segments]
    _gather(work, out / NOTED, stages, "noted")
    _gather(work, out / QUARANTINE, [*stages, SCATTER], "jsonl")
    if not (out / NOTED).stat().st_size:
        (out / NOTED).unlink()
        return [out / QUARANTINE]
    return [out / QUARANTINE, out / NOTED]


def _gather(work: Work, path: Path, stages: Sequence[str], suffix: str) -> None:
    """Concatenate the files of all blocks, and of each block in the order of the stages."""
    with path.open("wb") as file:
        for number in range(len(work.desk.recall(work.segments[0].stage) or ())):
            for stage in stages:
                file.write(work.desk.path(stage, number, suffix).read_bytes())
    fsync(path)


def _learnt(work: Work, out: Path) -> list[Path]:
    """Write what steps and features have learnt; return the files."""
    (out / LEARNT).mkdir(exist_ok=True)
    for what, rows in (("clean", work.steps), ("feature", work.features)):
        for at in range(len(rows)):
            known = work.learnt_of(what, at)
            if known:
                workdir.save(out / LEARNT / f"{what}-{at}", known)
    files = sorted(path for path in (out / LEARNT).rglob("*") if path.is_file())
    for path in files:
        fsync(path)
    return files


def _recipe(work: Work) -> dict[str, Any]:
    """Return the recipe as written, without the output folder, because a folder may be moved."""
    values = work.recipe.values()
    values["write"] = {key: value for key, value in values["write"].items() if key != "folder"}
    return values


def _input(source: Source) -> dict[str, Any]:
    found = {"file": source.file, "format": source.format, "bytes": source.size}
    return found | ({"split": source.split} if source.split else {})


def _counts(work: Work) -> dict[str, Any]:
    """Return what became of all records that were read."""
    out: dict[str, int] = {}
    done: dict[str, int] = {}
    noted: dict[str, int] = {}
    read = 0
    for stage in [*(segment.stage for segment in work.segments), SCATTER]:
        for facts in work.desk.recall(stage) or ():
            added(out, facts["out"])
            added(done, facts.get("counts", {}))
            added(noted, facts.get("noted", {}))
            read += facts.get("read", 0)
    written = {
        name: sum(facts["rows"] for facts in work.desk.recall(f"shards-{name}") or ())
        for name in SPLITS
    }
    kept = read - sum(out.values())
    return {
        "read": read,
        "out": out,
        "changed": done,
        "noted": noted,
        "kept": kept,
        "written": written,
    }


def _damaged(work: Work) -> list[dict[str, Any]]:
    """Return the files that are empty or damaged, in order, and how many records are doubtful.

    Damage to a compressed stream shows only at its end, or where it cannot be decoded any more.
    What was read before that may be garbled, so these records are counted as doubtful.
    """
    found: dict[str, dict[str, Any]] = {}
    before: dict[str, int] = {}
    for facts in work.desk.recall(work.segments[0].stage) or ():
        file, fault = facts["file"], facts.get("fault")
        unread = sum(facts["out"].get(step, 0) for step in (READ, UNREAD))
        before[file] = before.get(file, 0) + facts["read"] - unread
        if fault is None:
            continue
        told = found.setdefault(file, {"file": file, "reason": fault})
        if fault.startswith(DAMAGED) and before[file]:
            told |= {"reason": fault, "doubtful": before[file]}
    return list(found.values())

"""A checkpoint of large tables goes through whoever writes it, and does not stay there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from echelon.checkpoint import Shelf, Writer
from echelon.comm.ps import row_files
from echelon.comm.ps.client import Servers
from echelon.comm.ps.layout import Layout
from echelon.comm.ps.rows import RemoteTables
from echelon.core.config import OptimizerSection
from echelon.core.errors import CheckpointError, NonFiniteError
from echelon.core.types import RowRule, RowSpec

from . import serving

pytestmark = pytest.mark.timeout(120)
COUNT, WIDTH = 120_000, 64
SPECS = [
    RowSpec(name="large", width=WIDTH, seed=1, rule=RowRule(name="adagrad", lr=1.0)),
    RowSpec(name="odd", width=2, seed=1, rule=RowRule(name="sgd", lr=1.0), admit=2, expire=9),
]
MOST = 20e6
"""Bytes: the large table has 32 MB."""


def values(ids: Tensor) -> Tensor:
    return (ids % 1001).float().unsqueeze(1) + torch.arange(WIDTH)


@pytest.fixture
def tables(tmp_path: Path) -> Iterator[RemoteTables]:
    found = serving.alone(2).directory()
    servers = Servers(found.shards, found.key, 0, deadline=found.deadline)
    servers.tables = RemoteTables(SPECS)
    section = OptimizerSection(name="sgd", lr=0.1).model_dump(mode="json")
    dumped = [spec.model_dump(mode="json") for spec in SPECS]
    weight = nn.Parameter(torch.zeros(4))
    servers.set_up(
        Layout.of(["weight"], [weight], [True]), {"optimizer": section, "tables": dumped}
    )
    ids, few = torch.arange(COUNT), torch.tensor([3, 1 << 50])
    none, facts = torch.zeros(2, dtype=torch.int32), torch.tensor([1, 7])
    large = {"ids": ids, "rows": values(ids), "square": ids.float(), "facts": facts}
    odd = {"ids": few, "rows": torch.ones(2, 2), "seen": none + 1, "facts": facts}
    odd |= {"waiting_ids": few + 1, "waiting_counts": none + 1, "waiting_seen": none + 1}
    servers.tables.load(0, large)
    servers.tables.load(1, odd)
    servers.upload({"model": {"weight": weight.detach()}, "version": 0})
    servers.tables.spool.folder = tmp_path / "cuts"
    yield servers.tables
    servers.tables.spool.close()
    servers.close()


def cut(tables: RemoteTables) -> dict[str, dict[str, dict[str, Tensor]]]:
    tables.begin_cut()
    state = {f"{at}.{key}": v for at in range(2) for key, v in tables.state(at).items()}
    return {"strategy": {"model": state}}


def memory() -> int:
    """Bytes that belong to this process alone, and to no file."""
    lines = Path("/proc/self/status").read_text().splitlines()
    [line] = [line for line in lines if line.startswith("RssAnon:")]
    return int(line.split()[1]) * 1024


def test_it_takes_little_memory_and_is_looked_at_all_the_same(
    tables: RemoteTables, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tables.spool.folder
    assert folder is not None
    seen, add = [], row_files.InFile.add

    def watched(self: row_files.InFile, part: dict[str, Tensor]) -> None:
        add(self, part)
        seen.append(memory())

    monkeypatch.setattr(row_files.InFile, "add", watched)
    shelf, before = Shelf(folder, keep=1), memory()
    with Writer(shelf) as writer:
        for version in (1, 2, 3):
            writer.save(version, cut(tables))
            seen.append(memory())
        writer.flush()
        seen.append(memory())
    assert max(seen) - before < MOST
    assert len(list(folder.glob(".spool-*"))) == 4, "those of the last cut but one are gone"
    found = shelf.load("3")["strategy"]["model"]
    assert memory() - before < MOST
    order = found["0.ids"].argsort()
    assert torch.equal(found["0.ids"][order], torch.arange(COUNT))
    assert torch.equal(found["0.rows"][order], values(torch.arange(COUNT)))
    assert torch.equal(found["0.square"][order], torch.arange(COUNT).float())
    assert sorted(found["1.ids"].tolist()) == [3, 1 << 50]
    assert sorted(found["1.waiting_ids"].tolist()) == [4, (1 << 50) + 1]
    check_what_is_in_files(tables, shelf, folder)


def check_what_is_in_files(tables: RemoteTables, shelf: Shelf, folder: Path) -> None:
    state = cut(tables)
    tables.spool.close()  # the name is gone, what is in the file is not
    assert not list(folder.glob(".spool-*"))
    writer = Writer(shelf)
    writer.save_now(1, state)
    spooled = folder / "step-0000000001" / "spooled-0.bin"
    spooled.write_bytes(spooled.read_bytes()[:-1] + b"\1")
    with pytest.raises(CheckpointError, match=r"corrupt: spooled-0\.bin fails its checksum"):
        shelf.load("1")
    state["strategy"]["model"]["0.rows"][-1, 5] = torch.nan
    with pytest.raises(NonFiniteError, match=r"'0\.rows' is not finite"):
        writer.save_now(2, state)
    tables.spool.folder = Path("/proc/nowhere")
    found = cut(tables)["strategy"]["model"]["0.rows"]
    assert found.shape == (COUNT, WIDTH), "in memory, if it has to be"

"""Imports point one way; reading the import statements shows it."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import echelon

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "echelon"
LEVELS: list[set[str]] = [
    {"core"},
    {"data", "models", "optim", "comm", "track"},
    {"task", "server", "strategy", "checkpoint"},
    {"loop"},
    {"cluster", "plan", "tune", "shrink", "serve", "monitor"},
    {"api"},
    {"cli"},
]
RANK = {name: rank for rank, names in enumerate(LEVELS) for name in names}
FRONT = {"__init__", "__main__"}
FILES = sorted(SOURCE.rglob("*.py"))


def room(path: Path) -> str:
    """The subpackage a file belongs to; `api` is a file of its own."""
    first = path.relative_to(SOURCE).parts[0]
    return first.removesuffix(".py")


def imported_rooms(path: Path) -> set[str]:
    """Which rooms of echelon a file imports, at its top or inside its functions."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module == "echelon":
            names = [f"echelon.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        else:
            continue
        found |= {name.split(".")[1] for name in names if name.startswith("echelon.")}
    return found & RANK.keys()


def test_every_room_has_its_level() -> None:
    rooms = {room(path) for path in FILES} - FRONT
    assert rooms <= RANK.keys(), "a new subpackage needs a place in LEVELS and in the design"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_imports_point_one_way(path: Path) -> None:
    here = room(path)
    if here in FRONT:
        return
    back = {name for name in imported_rooms(path) - {here} if RANK[name] >= RANK[here]}
    assert not back, f"{path.name} in {here} imports {sorted(back)}, which is not below it"


def test_only_cluster_reads_the_environment() -> None:
    for path in FILES:
        if room(path) != "cluster":
            text = path.read_text(encoding="utf-8")
            assert "os.environ" not in text, path
            assert "getenv" not in text, path


def test_nothing_unpickles() -> None:
    for path in FILES:
        text = path.read_text(encoding="utf-8")
        assert "import pickle" not in text, path
        assert "torch.load(" not in text, path


def test_what_is_exported_is_what_is_visible() -> None:
    assert sorted(echelon.__all__) == dir(echelon)
    for name in echelon.__all__:
        assert getattr(echelon, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _ = echelon.trian


def test_importing_echelon_does_not_import_torch() -> None:
    script = "import sys, echelon, echelon.cli.main; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "False"


def test_the_torch_build_is_the_pinned_one() -> None:
    import torch

    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8").split()
    assert "torch==2.13.0" in pins
    assert torch.__version__.split("+")[0] == "2.13.0"

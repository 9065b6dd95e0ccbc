"""The rules of the source tree: which way imports point, and what only one package may do."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from itertools import zip_longest
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
ENTRY_POINTS = {"echelon", "echelon.__main__"}
SMALL = 40
"""Lines below which a module with a single importer belongs into that importer."""

Graph = dict[str, set[str]]


def module_of(path: Path) -> str:
    parts = ("echelon", *path.relative_to(SOURCE).with_suffix("").parts)
    return ".".join(parts).removesuffix(".__init__")


PATHS = {module_of(path): path for path in sorted(SOURCE.rglob("*.py"))}
TEXTS = {module: path.read_text(encoding="utf-8") for module, path in PATHS.items()}
PACKAGES = {module for module, path in PATHS.items() if path.name == "__init__.py"}


@functools.cache
def imports() -> Graph:
    """Which modules of Echelon each module imports: at its top, in functions, for type checkers."""
    return {module: set(imported_by(ast.parse(text))) - {module} for module, text in TEXTS.items()}


def imported_by(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in PATHS)
        elif isinstance(node, ast.ImportFrom) and node.module in PATHS:
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield name if name in PATHS else node.module


def cycles(graph: Graph) -> list[list[str]]:
    """The groups of modules that reach each other, by repeatedly removing all others."""
    left = {module: set(others) for module, others in graph.items()}
    while ends := [m for m, others in left.items() if not others & left.keys()]:
        for module in ends:
            del left[module]
    while starts := left.keys() - set().union(*left.values()):
        for module in starts:
            del left[module]
    groups = {
        frozenset(m for m in reached(left, start) if start in reached(left, m)) for start in left
    }
    return sorted(sorted(group) for group in groups if len(group) > 1)


def reached(graph: Graph, start: str) -> set[str]:
    found: set[str] = set()
    new = [start]
    while new:
        for other in graph.get(new.pop(), set()) - found:
            found.add(other)
            new.append(other)
    return found


def mutual_siblings(graph: Graph) -> list[str]:
    """Pairs of packages in the same folder whose modules import each other."""
    edges = set()
    for module, others in graph.items():
        for other in others:
            left, right = module.split("."), other.split(".")
            pairs = zip_longest(left, right)
            depth = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
            if depth is not None:
                edges.add((".".join(left[: depth + 1]), ".".join(right[: depth + 1])))
    return sorted(
        f"{left} ↔ {right}"
        for left, right in edges
        if left < right and (right, left) in edges and {left, right} <= PACKAGES
    )


def level(module: str) -> int:
    return RANK[module.split(".")[1]]


def test_every_package_has_its_level() -> None:
    top = {module.split(".")[1] for module in PATHS.keys() - ENTRY_POINTS}
    assert top <= RANK.keys(), "a new package needs a place in LEVELS and in ARCHITECTURE.md"


def test_imports_point_one_way() -> None:
    wrong = [
        f"{module} imports {other}, which is not below it"
        for module, others in imports().items()
        if module not in ENTRY_POINTS
        for other in others - ENTRY_POINTS
        if other.split(".")[1] != module.split(".")[1] and level(other) >= level(module)
    ]
    assert not wrong, "\n".join(wrong)


def test_no_files_import_each_other_in_a_circle() -> None:
    assert cycles(imports()) == []


def test_a_circle_of_imports_is_found() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set(), "e": {"f"}, "f": {"e"}}
    assert cycles(graph) == [["b", "c"], ["e", "f"]]


def test_no_sibling_packages_import_each_other() -> None:
    assert mutual_siblings(imports()) == []


def test_packages_that_import_each_other_are_found() -> None:
    graph = {
        "echelon.data.shards.read": {"echelon.data.formats.text"},
        "echelon.data.formats.text": {"echelon.data.shards.write"},
    }
    assert mutual_siblings(graph) == ["echelon.data.formats ↔ echelon.data.shards"]


def test_no_small_file_has_a_single_importer_beside_it() -> None:
    """Such a file is clearer inside the file that imports it."""
    importers: dict[str, set[str]] = defaultdict(set)
    for module, others in imports().items():
        for other in others:
            importers[other].add(module)
    small = [
        module
        for module in PATHS.keys() - PACKAGES
        if TEXTS[module].count("\n") < SMALL
        and [m.rpartition(".")[0] for m in importers[module]] == [module.rpartition(".")[0]]
    ]
    assert small == []


def test_architecture_md_names_files_that_exist() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`([\w/]+\.py)`", text))
    paths = {f"/{path.relative_to(ROOT)}" for path in [*SOURCE.rglob("*.py"), Path(__file__)]}
    missing = [name for name in named if not any(path.endswith(f"/{name}") for path in paths)]
    assert len(named) > 40
    assert missing == []


def test_only_cluster_reads_the_environment() -> None:
    for module, text in TEXTS.items():
        if not module.startswith("echelon.cluster."):
            assert "os.environ" not in text, module
            assert "getenv" not in text, module


def test_only_core_files_replaces_files_and_waits_for_the_disk() -> None:
    appends = "echelon.data.journal"
    """Writes whole lines to the end of an open file."""
    measures = "echelon.track.doctor"
    """Measures how long the disk takes."""
    for module, text in TEXTS.items():
        if module not in ("echelon.core.files", appends, measures):
            assert "os.fsync" not in text, module
            assert ".rename(" not in text, module
            assert "os.replace" not in text, module


def test_nothing_unpickles() -> None:
    for module, text in TEXTS.items():
        assert "import pickle" not in text, module
        assert "torch.load(" not in text, module


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

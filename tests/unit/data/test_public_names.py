"""The public names of `echelon.data`, and what importing it does not import."""

from __future__ import annotations

import subprocess
import sys

import echelon.data
from echelon.core.interfaces import BatchSource
from echelon.data import ShardSource


def test_every_public_name_is_there() -> None:
    assert sorted(echelon.data.__all__) == list(echelon.data.__all__)
    for name in echelon.data.__all__:
        assert getattr(echelon.data, name) is not None


def test_a_folder_of_shards_is_a_source() -> None:
    assert issubclass(ShardSource, BatchSource)


def test_it_does_not_import_what_few_need() -> None:
    code = (
        "import sys, echelon.data\n"
        "print([name for name in ('sklearn', 'PIL', 'pandas', 'pyarrow.parquet') "
        "if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"

"""What was learnt, written to files and sent between processes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from echelon.core.errors import DataError
from echelon.data.prepare.workdir import load, pack, save, unpack

LEARNT = {
    "mean": np.array([1.5, np.nan], np.float32),
    "count": np.zeros((0, 3), np.int64),
    "words": pa.array(["ä", "b"]),
    "plain": {"a": [1, None, "x"]},
}


def kept_in_files(learnt: dict[str, Any]) -> dict[str, Any]:
    save(Path("kept"), learnt)
    return load(Path("kept"))


def sent(learnt: dict[str, Any]) -> dict[str, Any]:
    return unpack(pack(learnt))


@pytest.mark.parametrize("through", [kept_in_files, sent])
def test_learnt_values_survive_files_and_messages(
    through: Callable[[dict[str, Any]], dict[str, Any]],
) -> None:
    found = through(LEARNT)
    assert found.keys() == LEARNT.keys()
    np.testing.assert_array_equal(found["mean"], LEARNT["mean"])
    assert (found["count"].shape, found["count"].dtype) == ((0, 3), np.int64)
    assert found["words"].to_pylist() == ["ä", "b"]
    assert found["plain"] == LEARNT["plain"]


def test_torn_files_of_learnt_values_are_refused() -> None:
    save(Path("kept"), LEARNT)
    Path("kept/learnt.safetensors").write_bytes(b"torn")
    with pytest.raises(DataError, match="kept: what was learnt cannot be read"):
        load(Path("kept"))

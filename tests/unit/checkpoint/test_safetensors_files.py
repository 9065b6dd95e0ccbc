"""The safetensors files of a checkpoint are the ones that the library writes and reads."""

from __future__ import annotations

import zlib
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from echelon.checkpoint import files
from echelon.checkpoint.files import write_tensors
from echelon.core.errors import CheckpointError


def go_on() -> None:
    """Never gives up."""


def test_the_file_is_the_one_safetensors_would_write(tmp_path: Path) -> None:
    state = {
        "b/wéight": torch.randn(3, 5),
        "a": torch.randn(7),
        "scalar": torch.tensor(2.0),
        "empty": torch.empty(0, 4),
    }
    write_tensors(tmp_path / "ours", state, go_on)
    save_file(state, tmp_path / "theirs")
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


def test_every_kind_of_number_comes_back(tmp_path: Path) -> None:
    state = {
        str(kind): torch.tensor([0, 1, 1, 0, 1]).to(kind) for kind in files._SAFETENSORS_DTYPES
    }
    write_tensors(tmp_path / "all", state, go_on)
    back = load_file(tmp_path / "all")
    assert back.keys() == state.keys()
    for name, tensor in state.items():
        assert back[name].dtype == tensor.dtype
        assert torch.equal(back[name].view(torch.uint8), tensor.view(torch.uint8)), name


def test_size_and_checksum_are_those_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "PIECE", 1000)
    state = {"w": torch.randn(1234), "v": torch.randn(30, 20).T}
    size, checksum = write_tensors(tmp_path / "file", state, go_on)
    data = (tmp_path / "file").read_bytes()
    assert (size, checksum) == (len(data), zlib.crc32(data))
    assert torch.equal(load_file(tmp_path / "file")["v"], state["v"])


def test_a_kind_without_a_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"'w' is torch\.complex128, which cannot be saved"):
        write_tensors(tmp_path / "file", {"w": torch.zeros(1, dtype=torch.complex128)}, go_on)

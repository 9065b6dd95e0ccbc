"""Vectors of a transformer in a folder."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from echelon.core.config.loading import checked
from echelon.core.errors import DataError, MissingExtra
from echelon.data.prepare.recipe import feature_kind
from echelon.data.prepare.text import embeddings

TEXTS = ["a good film", "bad", None, "a film that is so long that it has to be cut somewhere"]
WORDS = ["a", "good", "film", "bad", "that", "is", "so", "long", "it", "has", "to", "be", "cut"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with weights drawn at random."""
    transformers = pytest.importorskip("transformers")
    import torch

    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("model")
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    (folder / "vocab.txt").write_text("\n".join(vocabulary))
    transformers.BertTokenizer(str(folder / "vocab.txt")).save_pretrained(folder)
    config = transformers.BertConfig(
        vocab_size=len(vocabulary),
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=32,
    )
    transformers.BertModel(config).save_pretrained(folder)
    return folder


def feature(folder: Path, **settings: Any) -> Any:
    given = {"kind": "sentences", "from": "text", "to": "x", "model": str(folder), "length": 8}
    return checked(feature_kind("sentences"), given | settings)


def test_vectors_do_not_depend_on_their_batch(folder: Path) -> None:
    import torch
    from transformers import AutoModel, AutoTokenizer

    block = {"text": pa.array(TEXTS)}
    made = feature(folder, batch=2).encode(block, {})["x"]
    assert made.shape == (4, 8)
    assert made.dtype == np.float32
    tokeniser, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder)
    for text, vector in zip(TEXTS, made, strict=True):
        ready = tokeniser(text or "", truncation=True, max_length=8, return_tensors="pt")
        with torch.inference_mode():
            states = model(**ready).last_hidden_state[0]
        np.testing.assert_allclose(vector, states.mean(0).numpy(), atol=1e-5)
    first = feature(folder, pool="first", unit=True).encode(block, {})["x"]
    np.testing.assert_allclose(np.linalg.norm(first, axis=1), 1, atol=1e-5)
    assert not np.allclose(first, made)


def test_a_folder_without_a_model_is_refused(folder: Path, tmp_path: Path) -> None:
    names = {"text": pa.utf8()}
    feature(folder).check(names)
    with pytest.raises(DataError, match=r"is no folder of a model: it has no config\.json"):
        feature(tmp_path).check(names)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(DataError, match="the model cannot be loaded: "):
        feature(tmp_path).encode({"text": pa.array(["a"])}, {})


def test_it_needs_an_extra(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    embeddings._loaded.cache_clear()
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingExtra, match=r"'sentences' needs an extra: .*transformers"):
        feature(folder).encode({"text": pa.array(["a"])}, {})

"""Texts as vectors of a transformer that the user has in a folder."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from pydantic import PositiveInt

from echelon.core.errors import DataError, MissingExtra
from echelon.data.prepare.columns import Array, Columns, Values
from echelon.data.prepare.feature import Feature
from echelon.data.prepare.learnt import Learnt
from echelon.data.prepare.text.base import check_text
from echelon.data.prepare.text.flat import plain
from echelon.data.prepare.text.threads import one_thread


class Sentences(Feature):
    """Kind `sentences`: one vector per text, from the last layer of a model."""

    model: str
    """A folder as `save_pretrained` writes it: the model (safetensors) and its tokeniser."""
    pool: Literal["mean", "first"] = "mean"
    """The mean of all tokens' vectors, or the first token's."""
    length: PositiveInt = 256
    """Texts are cut to this many tokens."""
    batch: PositiveInt = 32
    """Texts that go through the model at one time."""
    unit: bool = False
    """Whether vectors are made as long as 1."""

    def check(self, names: Mapping[str, pa.DataType]) -> None:
        super().check(names)
        check_text(self, names)
        if not (Path(self.model) / "config.json").is_file():
            raise DataError(
                f"feature sentences: {self.model} is no folder of a model: it has no config.json"
            )

    def stamp(self) -> str:
        """Names, sizes and times of the model's files: to read them all takes too long."""
        files = [path for path in sorted(Path(self.model).glob("*")) if path.is_file()]
        known = [(path.name, path.stat()) for path in files]
        return " ".join(f"{name} {about.st_size} {about.st_mtime_ns}" for name, about in known)

    def encode(self, block: Columns, learnt: Learnt) -> dict[str, Values]:
        texts = plain(block[self.sources[0]]).to_pylist()
        with one_thread():
            return {self.name: self._vectors(texts)}

    def _vectors(self, texts: list[str]) -> Array:
        tokeniser, model = _loaded(str(Path(self.model).resolve()))
        out = np.zeros((len(texts), model.config.hidden_size), np.float32)
        # Texts of like length go together: little of a batch is padding.
        order = np.argsort([len(text) for text in texts], kind="stable")
        for low in range(0, len(texts), self.batch):
            some = order[low : low + self.batch]
            ready = tokeniser(
                [texts[at] for at in some],
                padding=True,
                truncation=True,
                max_length=self.length,
                return_tensors="pt",
            )
            out[some] = self._pooled(model, ready)
        return out

    def _pooled(self, model: Any, ready: Any) -> Array:
        import torch

        with torch.inference_mode():
            states = model(**ready).last_hidden_state
            if self.pool == "first":
                vectors = states[:, 0]
            else:
                there = ready["attention_mask"].unsqueeze(-1).to(states.dtype)
                vectors = (states * there).sum(1) / there.sum(1).clamp(min=1)
            if self.unit:
                vectors = torch.nn.functional.normalize(vectors, dim=1)
            found: Array = vectors.float().numpy()
            return found


@lru_cache(maxsize=1)
def _loaded(folder: str) -> tuple[Any, Any]:
    try:
        from transformers import AutoModel, AutoTokenizer
        from transformers.utils import logging
    except ImportError as error:
        raise MissingExtra("feature 'sentences'", "transformers") from error
    bars: Any = logging
    bars.disable_progress_bar()  # every worker would draw one over ours
    try:
        tokeniser = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        model = AutoModel.from_pretrained(folder, local_files_only=True, use_safetensors=True)
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        raise DataError(f"{folder}: the model cannot be loaded: {reason}") from None
    return tokeniser, model.eval()

"""Let a trained language model write."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from echelon.core.errors import UserError
from echelon.data.vocabulary import Vocabulary
from echelon.models.gpt import GPT

_SAMPLES = 3
_SAMPLE_TOKENS = 300


class Writer:
    """Goes on from a prompt, token by token."""

    def __init__(self, model: nn.Module, fitted: Mapping[str, Any]) -> None:
        if not isinstance(model, GPT):
            raise UserError("only a language model goes on from a prompt; give a file of data")
        self._model = model
        self._vocabulary = Vocabulary.from_json(fitted)

    def go_on(self, prompt: str, length: int, *, temperature: float, seed: int) -> str:
        """The prompt and `length` tokens more; the same seed writes the same text."""
        numbers = self._vocabulary.encode([prompt]).flat.tolist()
        if not numbers:
            raise UserError("the prompt is empty: give the model something to go on from")
        device = next(self._model.parameters()).device
        written = self._model.generate(
            torch.tensor([numbers], device=device),
            length,
            temperature=temperature,
            generator=torch.Generator(device).manual_seed(seed),
        )
        glue = " " if self._vocabulary.kind == "words" else ""
        return prompt + glue + self._vocabulary.decode(written[0, len(numbers) :].tolist())


def show_writing(model: nn.Module, fitted: Mapping[str, Any]) -> list[dict[str, str]]:
    """A few texts for the report, each begun with the likeliest token."""
    writer = Writer(model, fitted)
    first = str(Vocabulary.from_json(fitted).decode([2]))
    texts = (
        writer.go_on(first, _SAMPLE_TOKENS, temperature=0.8, seed=seed) for seed in range(_SAMPLES)
    )
    return [{"input": f"sample {n}", "output": text} for n, text in enumerate(texts, 1)]

"""The built-in tasks, and text generation with a trained language model.

Each task is a function of a job. It opens the data, sizes a model for it, and adds a loss, metrics
and a decoder for predictions:

    job.data ─▶ Splits (train, valid, fitted) ─▶ InputFacts ─▶ model ─▶ Task

With `fitted`, the values that an earlier run has fitted to its training data, a task opens other
data as that run did: same vocabulary, same label names, same normalization.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from echelon import models
from echelon.core.config import Job
from echelon.core.errors import DataError, UserError
from echelon.core.interfaces import Task
from echelon.core.types import Batch
from echelon.data import Splits, augment, open_dense, open_language, open_table, open_text
from echelon.data.opening.load import is_prepared
from echelon.data.opening.tasks import TargetKind
from echelon.data.text import Vocabulary
from echelon.models import InputFacts, Normalise
from echelon.models.gpt import GPT
from echelon.models.registry import model_choice
from echelon.task import losses, metrics
from echelon.task.losses import logits

Fitted = Mapping[str, Any] | None
Builder = Callable[[Job, Fitted], Task]


def classify(job: Job, fitted: Fitted = None) -> Task:
    """Vectors or images → one of several classes."""
    splits = _opened(job, fitted, target="class")
    facts = InputFacts(
        shape=splits.shape, outputs=len(splits.labels), sparse=splits.fitted.get("sparse", False)
    )
    return _task(
        job,
        splits,
        _normalised(job, facts, splits.fitted),
        loss=losses.cross_entropy,
        metrics=_class_metrics(splits),
        augment=augment.from_section(job.data.augment),
        decode=_class_decoder(splits.labels),
    )


def regress(job: Job, fitted: Fitted = None) -> Task:
    """Vectors or images → a number."""
    splits = _opened(job, fitted, target="number")
    facts = InputFacts(shape=splits.shape, outputs=1, sparse=splits.fitted.get("sparse", False))
    return _task(
        job,
        splits,
        _normalised(job, facts, splits.fitted),
        loss=losses.squared_error,
        metrics={"rmse": metrics.RMSE(), "r2": metrics.R2()},
        decode=_number_decoder,
    )


def text_classify(job: Job, fitted: Fitted = None) -> Task:
    """Texts → one of several classes."""
    if is_prepared(job.data, fitted):
        splits = _prepared(job, fitted, tokens=True)
        vocabulary = splits.fitted["tokens"]
    else:
        splits = open_text(job.data, job.seed, fitted=fitted)
        vocabulary = len(splits.fitted["vocabulary"])
    facts = InputFacts(shape=splits.shape, outputs=len(splits.labels), vocabulary=vocabulary)
    return _task(
        job,
        splits,
        lambda: _model(job, facts),
        loss=losses.cross_entropy,
        metrics=_class_metrics(splits),
        decode=_class_decoder(splits.labels),
    )


def language_model(job: Job, fitted: Fitted = None) -> Task:
    """A text → what comes next in it."""
    splits = open_language(job.data, job.seed, fitted=fitted)
    facts = InputFacts(
        shape=splits.shape,
        outputs=len(splits.fitted["vocabulary"]),
        vocabulary=len(splits.fitted["vocabulary"]),
    )
    return _task(
        job,
        splits,
        lambda: _model(job, facts),
        loss=losses.cross_entropy,
        metrics={"accuracy": metrics.Accuracy()},
        samples=lambda model: show_writing(model, splits.fitted),
    )


def click_rate(job: Job, fitted: Fitted = None) -> Task:
    """Categories and numbers → the chance of a yes, through embeddings."""
    splits = open_table(job.data, job.seed, fitted=fitted)
    facts = InputFacts(
        outputs=1, fields=tuple(splits.fitted["cardinalities"]), dense=splits.shape[0]
    )
    return _task(
        job,
        splits,
        _normalised(job, facts, splits.fitted),
        loss=losses.binary_cross_entropy,
        metrics={"accuracy": metrics.Hits(), "auc": metrics.AUC()},
        forward=_call_with_ids,
        decode=_chance_decoder,
    )


BUILT_IN: dict[str, Builder] = {
    "classify": classify,
    "regress": regress,
    "text_classify": text_classify,
    "language_model": language_model,
    "click_rate": click_rate,
}


# Parts that tasks share: data, model, metrics, decoders


def _task(job: Job, splits: Splits, model: Callable[[], nn.Module], **parts: Any) -> Task:
    return Task(
        model=model,
        train=splits.train,
        valid=splits.valid,
        labels=splits.labels,
        name=job.task,
        about=splits.about,
        fitted=splits.fitted,
        **parts,
    )


def _opened(job: Job, fitted: Fitted, target: TargetKind) -> Splits:
    if not is_prepared(job.data, fitted):
        return open_dense(job.data, job.seed, target=target, fitted=fitted)
    splits = _prepared(job, fitted, tokens=False)
    if bool(splits.labels) != (target == "class"):
        have = "classes" if splits.labels else "numbers"
        raise DataError(f"{splits.about['path']}: its targets are {have}: not for {job.task!r}")
    return splits


def _prepared(job: Job, fitted: Fitted, *, tokens: bool) -> Splits:
    from echelon.data.opening.prepared import open_shards_of  # recipes take a while to import

    splits = open_shards_of(job.data, fitted)
    if ("tokens" in splits.fitted) != tokens:
        have = (
            f"numbers: {job.task!r} is for tokens, as the feature of that kind makes them"
            if tokens
            else "tokens: they are for 'text_classify'"
        )
        raise DataError(f"{splits.about['path']}: column {splits.fitted['x']!r} holds {have}")
    return splits


def _normalised(job: Job, facts: InputFacts, fitted: Mapping[str, Any]) -> Callable[[], nn.Module]:
    mean, std = fitted.get("mean"), fitted.get("std")
    if mean is None and "encoders" in fitted:  # prepared data: the recipe has scaled it already
        return lambda: _model(job, facts)

    def build() -> nn.Module:
        fits = job.data.normalise and mean is not None and std is not None
        first = Normalise(mean or 0.0, std or 1.0) if fits else Normalise(0.0, 1.0)
        return _Normalised(first, _model(job, facts))

    return build


class _Normalised(nn.Module):
    """A model with its normalization in front, so that it takes raw values when it is served."""

    def __init__(self, normalise: nn.Module, model: nn.Module) -> None:
        super().__init__()
        self.normalise = normalise
        self.model = model

    def forward(self, x: Tensor, *others: Tensor) -> Any:
        return self.model(self.normalise(x), *others)

    def lookups(self, x: Tensor, *others: Tensor) -> Any:
        """Return the lookups that the model will make in its tables, if it announces them."""
        lookups = getattr(self.model, "lookups", None)
        return () if lookups is None else lookups(x, *others)


def _model(job: Job, facts: InputFacts) -> nn.Module:
    name, values = model_choice(job)
    return models.build(name, models.options(name, values), facts)


_MOST_CLASSES_SHOWN = 100


def _class_metrics(splits: Splits) -> dict[str, Any]:
    found: dict[str, Any] = {"accuracy": metrics.Accuracy()}
    if 2 <= len(splits.labels) <= _MOST_CLASSES_SHOWN:
        found["macro_f1"] = metrics.Confusion(len(splits.labels))
    return found


def _call_with_ids(model: nn.Module, batch: Batch) -> Any:
    return model(batch["dense"], batch["ids"])


def _class_decoder(labels: tuple[str, ...]) -> Callable[[Any], list[Any]]:
    def decode(output: Any) -> list[Any]:
        chance, best = logits(output).float().softmax(-1).max(-1)
        return [
            {"label": labels[number], "probability": round(share, 6)}
            for number, share in zip(best.tolist(), chance.tolist(), strict=True)
        ]

    return decode


def _number_decoder(output: Any) -> list[Any]:
    return [{"value": value} for value in logits(output).float().reshape(-1).tolist()]


def _chance_decoder(output: Any) -> list[Any]:
    chances = logits(output).float().sigmoid().reshape(-1).tolist()
    return [{"probability": round(chance, 6)} for chance in chances]


# Text from a trained language model

_SAMPLES = 3
_SAMPLE_TOKENS = 300


class Writer:
    """A trained language model that continues prompts, token by token."""

    def __init__(self, model: nn.Module, fitted: Mapping[str, Any]) -> None:
        if not isinstance(model, GPT):
            raise UserError("only a language model goes on from a prompt; give a file of data")
        self._model = model
        self._vocabulary = Vocabulary.from_json(fitted)

    def go_on(self, prompt: str, length: int, *, temperature: float, seed: int) -> str:
        """Return the prompt and `length` more tokens. The same seed writes the same text."""
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
    """Write a few texts for the report, each beginning with the most frequent token."""
    writer = Writer(model, fitted)
    first = str(Vocabulary.from_json(fitted).decode([2]))
    texts = (
        writer.go_on(first, _SAMPLE_TOKENS, temperature=0.8, seed=seed) for seed in range(_SAMPLES)
    )
    return [{"input": f"sample {n}", "output": text} for n, text in enumerate(texts, 1)]

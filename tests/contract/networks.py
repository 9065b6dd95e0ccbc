"""The networks that every strategy has to train like one process, and data for them.

The cnn's batch norms make single precision a poor witness: the gradients of their biases nearly
cancel out, so that clipping or adam moves them by 1e-4 to 1e-3 otherwise if only the samples of a
batch come in another order. `cnn64` is the same network in double precision.
Likewise `gpt64`, for optimizers that make a step of whatever is left of a gradient of keys' biases.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from echelon import cross_entropy
from echelon.core.interfaces import Task
from echelon.core.types import Batch
from echelon.models.cnn import CNN, CNNOptions
from echelon.models.gpt import GPT, GPTOptions
from echelon.models.mlp import MLP, MLPOptions
from echelon.models.textcnn import TextCNN, TextCNNOptions
from echelon.task import prepare

SAMPLES = 50  # divides by none of the batch sizes and member counts in use
WORDS, LENGTH = 23, 8


def _built(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        torch.manual_seed(1)
        return make()

    return build


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": _built(lambda: MLP((6,), 3, MLPOptions(hidden=(16, 16), activation="tanh"))),
    "cnn": _built(
        lambda: CNN((1, 8, 8), 3, CNNOptions(channels=(4, 8), kernel=3, hidden=(8,), norm="batch"))
    ),
    "textcnn": _built(
        lambda: TextCNN(WORDS, 3, TextCNNOptions(width=8, windows=(2, 3), filters=6, dropout=0.0))
    ),
    "cnn64": _built(lambda: MODELS["cnn"]().double()),
    "gpt": _built(lambda: GPT(WORDS, LENGTH, GPTOptions(layers=4, heads=4, width=16, dropout=0.0))),
    "gpt64": _built(lambda: MODELS["gpt"]().double()),
}


def limit(name: str) -> float:
    """How far apart weights may be; processors differ in how they round, double precision too."""
    return 1e-8 if name.endswith("64") else 1e-5


def task(name: str) -> Task:
    return prepare(Task(model=MODELS[name], loss=cross_entropy, train=data(name), name=name))


def data(name: str) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(7)
    labels = torch.randint(3, (SAMPLES,), generator=draw)
    if name == "mlp":
        return {"x": torch.randn(SAMPLES, 6, generator=draw), "y": labels}
    if name.startswith("cnn"):
        kind = torch.float64 if name == "cnn64" else torch.float32
        return {"x": torch.randn(SAMPLES, 1, 8, 8, generator=draw).to(kind), "y": labels}
    tokens = torch.randint(1, WORDS, (SAMPLES, LENGTH + 1), generator=draw)
    if name == "textcnn":
        return {"x": tokens[:, :-1], "y": labels}
    return {"x": tokens[:, :-1].contiguous(), "y": tokens[:, 1:].contiguous()}


def batches(name: str, size: int = 12, count: int = 20) -> list[Batch]:
    """Batches over and over the data; the last of a pass is smaller."""
    columns, start = data(name), 0
    found: list[Batch] = []
    while len(found) < count:
        stop = min(start + size, SAMPLES)
        found.append({key: column[start:stop] for key, column in columns.items()})
        start = stop % SAMPLES
    return found


def part(batch: Batch, index: int, count: int, micro: int = 1) -> Sequence[Batch]:
    """What the loader gives a member of a batch."""
    size = len(batch["y"])
    start, stop = size * index // count, size * (index + 1) // count
    mine: dict[str, Tensor] = {key: column[start:stop] for key, column in batch.items()}  # type: ignore[misc]
    edges = [(stop - start) * at // micro for at in range(micro + 1)]
    pairs = [(a, b) for a, b in pairwise(edges) if a < b]
    return [{key: column[a:b] for key, column in mine.items()} for a, b in pairs]

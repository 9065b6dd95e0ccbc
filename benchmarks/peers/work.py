"""What every side trains: data, model, batch size, optimizer settings, number of steps."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from . import models

LR = 1e-3
DECAY = 0.01
LOG_EVERY = 50
SEED = 0
LENGTH = 128


@dataclass(frozen=True, slots=True)
class Work:
    """One row of the comparison. `y` holds one class per sample, or per place of a sequence."""

    name: str
    x: Tensor
    y: Tensor
    classes: int
    batch_size: int
    build: Callable[[], nn.Module]
    warmup: int
    steps: int
    origin: str
    loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy

    def model(self) -> nn.Module:
        """The same initial weights for every side."""
        torch.manual_seed(SEED)
        return self.build()

    def probe(self) -> tuple[Tensor, Tensor]:
        """Samples on which every side is asked, after it was timed, how well it learned."""
        return self.x[:1024], self.y[:1024]


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of every torch side."""
    return torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=DECAY, fused=True)


def loss_after(work: Work, model: nn.Module) -> float:
    """The loss of a trained model, without dropout."""
    x, y = work.probe()
    model.eval()
    with torch.no_grad():
        return float(work.loss(model(x), y))


def mlp(data: Path) -> Work:
    """Breast cancer, as it comes with scikit-learn: 569 rows, so an epoch is 18 steps."""
    del data
    from sklearn.datasets import load_breast_cancer

    table, label = load_breast_cancer(return_X_y=True)
    scaled = (table - table.mean(0)) / table.std(0)
    x, y = torch.tensor(scaled, dtype=torch.float32), torch.tensor(label)
    return Work("mlp", x, y, 2, 32, models.mlp, 180, 3600, "breast_cancer")


def mlp_long(data: Path) -> Work:
    """The same rows 32 times over: 569 steps an epoch, for who finds 18 too few to be fair."""
    once = mlp(data)
    x, y = once.x.repeat(32, 1), once.y.repeat(32)
    return replace(once, name="mlp_long", x=x, y=y, origin="breast_cancer, 32 times")


def cnn(data: Path) -> Work:
    """Fashion-MNIST where it is at hand, and otherwise images that can be told apart as well."""
    folder = data / "fashion-mnist"
    if folder.is_dir():
        image = _idx(folder / "train-images-idx3-ubyte.gz")
        label, origin = _idx(folder / "train-labels-idx1-ubyte.gz"), "fashion-mnist"
    else:
        image, label, origin = *_drawn_images(), "generated images"
    x = torch.tensor(image).unsqueeze(1).float().div_(255).sub_(0.2860).div_(0.3530)
    return Work("cnn", x, torch.tensor(label).long(), 10, 128, models.cnn, 5, 60, origin)


def gpt(data: Path) -> Work:
    """Characters of tiny shakespeare where it is at hand, and otherwise of a Markov chain."""
    file = data / "tinyshakespeare" / "input.txt.gz"
    if file.is_file():
        text, origin = gzip.decompress(file.read_bytes()), "tinyshakespeare"
        letters, token = np.unique(np.frombuffer(text, np.uint8), return_inverse=True)
        classes = len(letters)
    else:
        token, origin, classes = _drawn_text(), "generated text", 65
    rows = (len(token) - 1) // LENGTH
    x = torch.tensor(token[: rows * LENGTH]).view(rows, LENGTH)
    y = torch.tensor(token[1 : rows * LENGTH + 1]).view(rows, LENGTH)
    return Work("gpt", x, y, classes, 16, lambda: models.GPT(classes), 2, 12, origin, per_place)


def per_place(output: Tensor, y: Tensor) -> Tensor:
    """The mean over all places of all sequences."""
    return F.cross_entropy(output.flatten(0, 1), y.flatten())


WORKS: dict[str, Callable[[Path], Work]] = {
    "mlp": mlp,
    "cnn": cnn,
    "gpt": gpt,
    "mlp_long": mlp_long,
}
CLAIMED = ["mlp", "cnn", "gpt"]
"""What is run unless asked otherwise."""


def _idx(file: Path) -> np.ndarray:
    raw = gzip.decompress(file.read_bytes())
    shape = np.frombuffer(raw, ">u4", raw[3], 4)
    return np.frombuffer(raw, np.uint8, offset=4 + 4 * raw[3]).reshape(shape)


def _drawn_images(rows: int = 60_000) -> tuple[np.ndarray, np.ndarray]:
    """Ten blurred patterns under noise."""
    rng = np.random.default_rng(SEED)
    pattern = rng.integers(0, 256, (10, 7, 7)).repeat(4, 1).repeat(4, 2)
    label = rng.integers(0, 10, rows)
    noise = rng.integers(-80, 80, (rows, 28, 28), dtype=np.int16)
    return (pattern[label] + noise).clip(0, 255).astype(np.uint8), label


def _drawn_text(length: int = 1_000_000, letters: int = 65) -> np.ndarray:
    """A walk in which each letter is followed by one of four."""
    rng = np.random.default_rng(SEED)
    follows = rng.integers(0, letters, (letters, 4)).tolist()
    walk, at = [0] * length, 0
    for place, choice in enumerate(rng.integers(0, 4, length).tolist()):
        at = follows[at][choice]
        walk[place] = at
    return np.array(walk)

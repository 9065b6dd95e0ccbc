"""Photographs in ten classes, and a network of one's own: a task in a file.

The data are sheets of 32×32 tiles (`train.png`, `test.png`, 100 tiles to a row) and their labels in
`labels.npz`. What Echelon has no name for is written here, in plain torch.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import echelon
from echelon import Job, Task
from echelon.core.errors import TaskError
from echelon.data import augment, read_tiles
from echelon.models import Normalise
from echelon.task.metrics import Accuracy, Confusion

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


def build(width: int = 64, *, job: Job) -> Task:
    """The task; `width` is the number of channels of the first layer."""
    if job.data.path is None:
        raise TaskError("cifar_cnn needs data.path: a folder with train.png, test.png, labels.npz")
    folder = Path(job.data.path)
    train, valid = part(folder, "train"), part(folder, "test")
    mean, std = statistics(train["x"])
    return Task(
        model=lambda: network(mean, std, width),
        loss=echelon.cross_entropy,
        train=train,
        valid=valid,
        metrics={"accuracy": Accuracy(), "macro_f1": Confusion(len(CLASSES))},
        augment=augment.Compose((augment.Crop(4), augment.Flip())),
        labels=CLASSES,
        name="cifar_cnn",
    )


def part(folder: Path, name: str) -> dict[str, Tensor]:
    """Images as bytes [N, 3, 32, 32] and their classes."""
    images = read_tiles(folder / f"{name}.png", 32)
    labels = np.load(folder / "labels.npz")[f"y_{name}"]
    return {"x": torch.from_numpy(images), "y": torch.from_numpy(labels).long()}


def statistics(images: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and deviation of each colour."""
    values = images.float()
    return values.mean((0, 2, 3)), values.std((0, 2, 3))


def network(mean: Tensor, std: Tensor, width: int) -> nn.Module:
    """Five convolutions, each with batch norm; the image is halved three times."""
    return nn.Sequential(
        Normalise(mean, std),
        convolution(3, width),
        convolution(width, width),
        nn.MaxPool2d(2),
        convolution(width, 2 * width),
        convolution(2 * width, 2 * width),
        nn.MaxPool2d(2),
        convolution(2 * width, 4 * width),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Dropout(0.3),
        nn.Linear(4 * width, len(CLASSES)),
    )


def convolution(before: int, after: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(before, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU()
    )

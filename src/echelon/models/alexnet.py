"""AlexNet (Krizhevsky 2012), in the one-column form of 2014 that torchvision uses.

Its first layer is made for photographs of 224 pixels: an 11×11 window with a stride of 4. An image
of less than 64 pixels would shrink to nothing, so small images get a 5×5 window with stride 1.
"""

from __future__ import annotations

from pydantic import PositiveInt
from torch import nn

from echelon.core.config.sections import Section
from echelon.core.errors import ConfigError
from echelon.models.layers import (
    ActivationName,
    Images,
    InitName,
    NormName,
    Rate,
    activation,
    chain,
    dropout,
    initialise_,
    norm,
)
from echelon.models.registry import InputFacts

LARGE = 64
SMALLEST = 8


class AlexNetOptions(Section):
    """Five convolutions, three dense layers."""

    hidden: PositiveInt | None = None
    """Width of the dense layers; 4096, or 1024 for images of less than 64 pixels."""
    activation: ActivationName = "relu"
    norm: NormName = "none"
    dropout: Rate = 0.5
    """Part of the dense layers' values that training leaves out."""
    init: InitName = "he"


class AlexNet(nn.Sequential):
    """Images → five convolutions → three dense layers → a score per output."""

    def __init__(self, image: tuple[int, int, int], outputs: int, options: AlexNetOptions) -> None:
        colors, *sides = image
        if min(sides) < SMALLEST:
            raise ConfigError(
                f"model 'alexnet' needs images of at least {SMALLEST}×{SMALLEST}, "
                f"not {sides[0]}×{sides[1]}",
                path=("model", "name"),
            )
        large = min(sides) >= LARGE
        hidden = options.hidden or (4096 if large else 1024)
        places = 6 if large else 3

        def block(before: int, after: int, *window: int, pool: bool = False) -> nn.Sequential:
            pooled = nn.MaxPool2d(3 if large else 2, 2) if pool else None
            return _convolution(before, after, window, options, pooled)

        super().__init__(
            Images(),
            block(colors, 64, *((11, 4, 2) if large else (5, 1, 2)), pool=True),
            block(64, 192, 5, 1, 2, pool=True),
            block(192, 384, 3, 1, 1),
            block(384, 256, 3, 1, 1),
            block(256, 256, 3, 1, 1, pool=True),
            chain(nn.AdaptiveAvgPool2d(places), nn.Flatten()),
            _dense(256 * places**2, hidden, options),
            _dense(hidden, hidden, options),
            nn.Linear(hidden, outputs),
        )
        initialise_(self, options.init, options.activation)


def _convolution(
    before: int, after: int, window: tuple[int, ...], o: AlexNetOptions, pool: nn.Module | None
) -> nn.Sequential:
    """Return a convolution block; `window` is (kernel size, stride, padding)."""
    kernel, stride, padding = window
    bias = o.norm != "batch"
    convolution = nn.Conv2d(before, after, kernel, stride, padding, bias=bias)
    return chain(convolution, norm(o.norm, after, images=True), activation(o.activation), pool)


def _dense(inputs: int, outputs: int, o: AlexNetOptions) -> nn.Sequential:
    """Return dropout → linear → activation; unlike in `dense_block`, dropout comes first."""
    return chain(dropout(o.dropout), nn.Linear(inputs, outputs), activation(o.activation))


Options = AlexNetOptions


def from_facts(options: AlexNetOptions, facts: InputFacts) -> AlexNet:
    return AlexNet(facts.image, facts.outputs, options)

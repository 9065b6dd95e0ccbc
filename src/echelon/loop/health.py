"""Watches each layer's gradient and says when one vanishes or explodes."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from echelon.core.config import HealthSection
from echelon.optim import gradients

Notice = Callable[[int, str], None]


class LayerHealth:
    """An `Inspector`: every `every` updates it compares the layers' gradient norms.

    Each layer is reported once per kind of trouble, and again only after it has recovered.
    """

    def __init__(self, section: HealthSection, notice: Notice) -> None:
        self._section = section
        self._notice = notice
        self._sick: set[tuple[str, str]] = set()

    def due(self, version: int) -> bool:
        return version % self._section.every == 0

    def inspect(
        self, version: int, weights: Mapping[str, Tensor], grads: Mapping[str, Tensor]
    ) -> None:
        norms = gradients.layer_norms(grads.items())
        sizes = gradients.layer_norms(weights.items())
        largest = max(norms.values(), default=0.0)
        for name, norm in norms.items():
            self._judge(
                version,
                name,
                "vanishing",
                norm < self._section.vanishing * largest,
                f"gradient norm {norm:.2g}, the largest layer has {largest:.2g}",
            )
            self._judge(
                version,
                name,
                "exploding",
                norm > self._section.exploding * max(sizes[name], 1.0),
                f"gradient norm {norm:.2g}, weight norm {sizes[name]:.2g}",
            )

    def _judge(self, version: int, name: str, kind: str, sick: bool, figures: str) -> None:
        if not sick:
            self._sick.discard((name, kind))
        elif (name, kind) not in self._sick:
            self._sick.add((name, kind))
            self._notice(version, f"layer {name!r} is {kind}: {figures}")

"""A few records as they are; images as images."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from typing import Any

import numpy as np

from echelon.core.format import line
from echelon.core.html import Html, el, join
from echelon.data.inspect.profile import Example

_LARGEST = 512
_CHANNELS = (1, 3)


def examples(found: Sequence[Example]) -> Html:
    return el("div", join([_example(example) for example in found]), class_="samples")


def _example(example: Example) -> Html:
    parts = [el("div", el("dt", "record"), el("dd", f"{example.record:,}"), class_="number")]
    parts += [
        el("div", el("dt", name), el("dd", _value(value))) for name, value in example.values.items()
    ]
    return el("dl", join(parts))


def _value(value: Any) -> Html | str:
    pixels = _pixels(value)
    return line(value) if pixels is None else _image(pixels)


def _pixels(value: Any) -> np.ndarray[Any, Any] | None:
    """[H, W] or [H, W, 3] if this is an image; None if it is not."""
    if not isinstance(value, np.ndarray) or value.dtype != np.uint8 or max(value.shape) > _LARGEST:
        return None
    if value.ndim == 2:
        return value
    if value.ndim != 3:
        return None
    if value.shape[0] in _CHANNELS:
        value = value.transpose(1, 2, 0)
    return value.squeeze(-1) if value.shape[-1] == 1 else value if value.shape[-1] == 3 else None


def _image(pixels: np.ndarray[Any, Any]) -> Html:
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(pixels)).save(file, "png")
    content = base64.b64encode(file.getvalue()).decode()
    return el("img", src=f"data:image/png;base64,{content}", alt="")

"""The networks of `models` again, layer for layer, for Keras."""

from __future__ import annotations

from typing import Any

import keras
from keras import layers


def mlp(classes: int) -> Any:
    return keras.Sequential(
        [
            keras.Input((30,)),
            layers.Dense(64, activation="relu"),
            layers.Dropout(0.2),
            layers.Dense(classes),
        ]
    )


def cnn(classes: int) -> Any:
    """Channels last: the layout TensorFlow's own kernels are made for."""
    return keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            layers.Conv2D(32, 5, padding="same"),
            layers.MaxPooling2D(),
            layers.ReLU(),
            layers.Conv2D(64, 5, padding="same"),
            layers.MaxPooling2D(),
            layers.ReLU(),
            layers.Flatten(),
            layers.Dense(128, activation="relu"),
            layers.Dropout(0.5),
            layers.Dense(classes),
        ]
    )


class Place(layers.Layer):  # type: ignore[misc]
    """Adds one learned vector per place in the sequence."""

    def __init__(self, length: int, width: int) -> None:
        super().__init__()
        self.table = self.add_weight(shape=(length, width), initializer="random_normal")

    def call(self, x: Any) -> Any:
        return x + self.table


def gpt(classes: int, length: int = 128, width: int = 256, depth: int = 4, heads: int = 4) -> Any:
    token = keras.Input((length,), dtype="int32")
    x = Place(length, width)(layers.Embedding(classes, width)(token))
    for _ in range(depth):
        seen = layers.LayerNormalization(epsilon=1e-5)(x)
        attend = layers.MultiHeadAttention(heads, width // heads)
        x = x + attend(seen, seen, use_causal_mask=True)
        seen = layers.LayerNormalization(epsilon=1e-5)(x)
        seen = layers.Dense(4 * width, activation="gelu")(seen)
        x = x + layers.Dense(width)(seen)
    x = layers.LayerNormalization(epsilon=1e-5)(x)
    return keras.Model(token, layers.Dense(classes)(x))

"""A multi-layer perceptron on the flattened input: dense layers with ReLU between them."""

from __future__ import annotations

import keras
from keras import layers


def perceptron(x, units: list[int], prefix: str = "") -> keras.KerasTensor:
    """(n, k) -> (n, units[-1])."""
    for i, count in enumerate(units):
        activation = "relu" if i + 1 < len(units) else None
        x = layers.Dense(count, activation=activation, name=f"{prefix}fc{i + 1}")(x)
    return x


def build(input_shape, num_classes, hidden: list[int] = (128,), outputs: int = 1) -> keras.Model:
    """(n, *input_shape) -> logits (n, num_classes), or (n, outputs) if labels are not classes."""
    inputs = keras.Input(input_shape)
    flat = layers.Flatten(name="flatten")(inputs)
    return keras.Model(inputs, perceptron(flat, [*hidden, num_classes or outputs]), name="mlp")


def cut(model: keras.Model, ends: list[str]) -> list[keras.Model]:
    """Split a model after the layers named ``ends``, through which all data flow; the parts share its layers."""
    places = [model.input, *(model.get_layer(name).output for name in ends), model.output]
    pairs = zip(places, places[1:], strict=False)
    return [keras.Model(x, y, name=f"block{k}") for k, (x, y) in enumerate(pairs)]


def blocks(model: keras.Model) -> list[keras.Model]:
    *inner, _ = (layer.name for layer in model.layers if isinstance(layer, layers.Dense))
    return cut(model, inner)


def neutral(model: keras.Model) -> dict[str, tuple]:
    return {v.path: (v.path.replace("/", "."), None, None, tuple(v.shape)) for v in model.trainable_variables}

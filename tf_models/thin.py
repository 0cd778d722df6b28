"""Many thin dense layers in a row, 200 by default: a step is all latency, with hardly any arithmetic."""

from __future__ import annotations

import math

import keras
from keras import layers, ops

from tf_models.mlp import cut


@keras.saving.register_keras_serializable("hvd_train")
class Residual(layers.Dense):
    """x (n, width) -> x + factor dense(relu(x)). With the ReLU outside the dense layer, the means would add up."""

    def __init__(self, units: int, factor: float, **keys) -> None:
        super().__init__(units, **keys)
        self.factor = factor

    def call(self, x) -> keras.KerasTensor:
        return x + self.factor * super().call(ops.relu(x))

    def get_config(self) -> dict:
        return super().get_config() | {"factor": self.factor}


def build(input_shape, num_classes, depth: int = 200, width: int = 32) -> keras.Model:
    """(n, *input_shape) -> logits (n, num_classes).

    Each layer adds 1 / depth of the variance, so that any depth trains without normalization.
    """
    if depth < 2:
        raise ValueError(f"depth counts the first and the last layer, so it is at least 2, not {depth}")
    inputs = keras.Input(input_shape)
    x = layers.Dense(width, name="layers.0")(layers.Flatten(name="flatten")(inputs))
    for i in range(1, depth - 1):
        x = Residual(width, 1 / math.sqrt(depth), name=f"layers.{i}")(x)
    x = layers.ReLU(name="relu")(x)
    return keras.Model(inputs, layers.Dense(num_classes, name=f"layers.{depth - 1}")(x), name="thin")


def blocks(model: keras.Model) -> list[keras.Model]:
    *inner, _ = (layer.name for layer in model.layers if isinstance(layer, layers.Dense))
    return cut(model, inner)


def neutral(model: keras.Model) -> dict[str, tuple]:
    return {v.path: (v.path.replace("/", "."), None, None, tuple(v.shape)) for v in model.trainable_variables}

"""An autoencoder of dense layers: one multi-layer perceptron to a short code, another back to the input."""

import math

import keras
from keras import layers

from tf_models.mlp import neutral, perceptron

__all__ = ["build", "neutral"]


def build(input_shape, hidden: list[int] = (128,), code: int = 32) -> keras.Model:
    """(n, *input_shape) -> the same shape."""
    inputs = keras.Input(input_shape)
    x = perceptron(layers.Flatten(name="flatten")(inputs), [*hidden, code], "encoder.")
    x = perceptron(x, [*hidden[::-1], math.prod(input_shape)], "decoder.")
    return keras.Model(inputs, layers.Reshape(input_shape, name="reshape")(x), name="autoencoder")

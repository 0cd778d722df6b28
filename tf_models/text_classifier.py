"""A classifier for texts of any length: a small transformer, or with depth=0 the mean of the token embeddings."""

from __future__ import annotations

import keras
from keras import layers, ops

from tf_models.bert import block, norm
from tf_models.gpt import Tokens, neutral

__all__ = ["build", "neutral"]


@keras.saving.register_keras_serializable("hvd_train")
class FirstPositions(layers.Layer):
    """Adds the first T rows of a learned (limit, width) to x (n, T, width)."""

    def __init__(self, limit: int, **keys) -> None:
        super().__init__(**keys)
        self.limit = limit

    def build(self, input_shape) -> None:
        self.table = self.add_weight(shape=(self.limit, input_shape[-1]), initializer="normal", name="embedding")

    def call(self, x) -> keras.KerasTensor:
        return x + self.table[: ops.shape(x)[1]]

    def compute_output_shape(self, input_shape) -> tuple:
        return input_shape

    def get_config(self) -> dict:
        return super().get_config() | {"limit": self.limit}


@keras.saving.register_keras_serializable("hvd_train")
class MaskedMean(layers.Layer):
    """x (n, T, width) and shown (n, T), true for tokens of the text -> their mean, (n, width)."""

    def call(self, x, shown) -> keras.KerasTensor:  # Keras treats an argument called mask specially
        shown = ops.cast(shown[..., None], x.dtype)
        return ops.sum(x * shown, 1) / ops.maximum(ops.sum(shown, 1), 1)

    def compute_output_shape(self, x_shape, shown_shape) -> tuple:
        return x_shape[0], x_shape[2]


def build(
    input_shape,
    num_classes,
    vocabulary_size: int = 0,
    max_length: int = 0,
    width: int = 64,
    depth: int = 1,
    heads: int = 4,
    dropout: float = 0.1,
) -> keras.Model:
    """Tokens (n, T), integers, and mask (n, T), true for tokens of the text -> logits (n, num_classes).

    The mean over a text's tokens is classified. Without blocks, the order of tokens has no effect.
    """
    if not (isinstance(input_shape, dict) and set(input_shape) == {"tokens", "mask"}):
        raise ValueError(f"the text classifier needs the inputs tokens and mask (data.lengths), not {input_shape}")
    if not vocabulary_size:
        raise ValueError("the data do not say how many tokens there are: set model.vocabulary_size")
    if not isinstance(num_classes, int):
        raise ValueError(f"the text classifier needs one label of classes, not {num_classes}")
    if width % heads and depth:
        raise ValueError(f"width {width} is no multiple of heads {heads}")
    kinds = {"tokens": "int64", "mask": "bool"}
    inputs = {name: keras.Input(input_shape[name], dtype=kind, name=name) for name, kind in kinds.items()}
    x = Tokens(vocabulary_size, width, name="token")(inputs["tokens"])
    if depth:
        limit = input_shape["tokens"][0] or max_length
        x = norm(FirstPositions(limit, name="position")(x), "norm")
    x = layers.Dropout(dropout, name="dropout")(x)
    for i in range(depth):
        x = block(x, inputs["mask"], heads, dropout, f"blocks.{i}")
    x = MaskedMean(name="mean")(x, inputs["mask"])
    return keras.Model(inputs, layers.Dense(num_classes, name="head")(x), name="text_classifier")

"""A small decoder-only transformer: logits of the next token at every position (0.84 million weights on bytes)."""

from __future__ import annotations

import math

import keras
from keras import layers, ops

from tf_models.mlp import cut

HIDDEN = -3e4  # a score whose exponential is 0, in the range of float16


@keras.saving.register_keras_serializable("hvd_train")
class Tokens(layers.Layer):
    """Integers (n, T) -> (n, T, width); with ``reverse``, (n, T, width) -> logits (n, T, count) by the same table."""

    def __init__(self, count: int, width: int, **keys) -> None:
        super().__init__(**keys)
        self.count, self.width = count, width

    def build(self, input_shape) -> None:
        self.table = self.add_weight(shape=(self.count, self.width), initializer="normal", name="embedding")

    def call(self, x, reverse=False) -> keras.KerasTensor:
        if reverse:
            return ops.matmul(x, ops.transpose(self.table))
        return ops.take(self.table, x, axis=0)

    def compute_output_spec(self, x, reverse=False) -> keras.KerasTensor:
        shape = (*x.shape[:-1], self.count) if reverse else (*x.shape, self.width)
        return keras.KerasTensor(shape, self.compute_dtype)

    def get_config(self) -> dict:
        return super().get_config() | {"count": self.count, "width": self.width}


@keras.saving.register_keras_serializable("hvd_train")
class Positions(layers.Layer):
    """Adds a learned (T, width) to x (n, T, width)."""

    def build(self, input_shape) -> None:
        self.table = self.add_weight(shape=input_shape[1:], initializer="normal", name="embedding")

    def call(self, x) -> keras.KerasTensor:
        return x + self.table


@keras.saving.register_keras_serializable("hvd_train")
class CausalAttention(layers.Layer):
    """Causal: query, key, value (n, T, 3 width), last axis (3, heads, width / heads) -> (n, T, width)."""

    def __init__(self, heads: int, **keys) -> None:
        super().__init__(**keys)
        self.heads = heads

    def call(self, qkv) -> keras.KerasTensor:
        length = qkv.shape[1]
        return self.attend(qkv, ops.triu(ops.full((length, length), HIDDEN, self.wide), 1))

    @property
    def wide(self) -> str:
        """The dtype for sums: 32 bits for half precision, as in PyTorch."""
        return keras.backend.result_type(self.compute_dtype, "float32")

    def attend(self, qkv, mask) -> keras.KerasTensor:
        """``mask``: scores to add, broadcastable to (n, heads, T, T)."""
        length, width = ops.shape(qkv)[1], qkv.shape[2] // 3  # a tensor if lengths vary
        split = ops.reshape(qkv, (-1, length, 3, self.heads, width // self.heads))
        q, k, v = ops.unstack(ops.transpose(split, (2, 0, 3, 1, 4)), 3)
        scores = ops.matmul(q * (1 / math.sqrt(width // self.heads)), ops.swapaxes(k, 2, 3))
        shares = ops.softmax(ops.cast(scores, self.wide) + mask)
        mixed = ops.matmul(ops.cast(shares, self.compute_dtype), v)
        return ops.reshape(ops.transpose(mixed, (0, 2, 1, 3)), (-1, length, width))

    def compute_output_shape(self, input_shape) -> tuple:
        return (*input_shape[:2], input_shape[2] // 3)

    def get_config(self) -> dict:
        return super().get_config() | {"heads": self.heads}


def _block(x, heads: int, dropout: float, name: str) -> keras.KerasTensor:
    """(n, T, width) -> the same shape; with layer norms before attention and MLP (Radford et al. 2019)."""
    width = x.shape[-1]
    y = layers.LayerNormalization(epsilon=1e-5, name=f"{name}.norm1")(x)
    y = CausalAttention(heads, name=f"{name}.attention")(layers.Dense(3 * width, name=f"{name}.qkv")(y))
    y = layers.Dropout(dropout, name=f"{name}.dropout1")(layers.Dense(width, name=f"{name}.out")(y))
    x = layers.Add(name=f"{name}.add1")([x, y])
    y = layers.LayerNormalization(epsilon=1e-5, name=f"{name}.norm2")(x)
    y = layers.Activation(gelu, name=f"{name}.gelu")(layers.Dense(4 * width, name=f"{name}.fc1")(y))
    y = layers.Dropout(dropout, name=f"{name}.dropout2")(layers.Dense(width, name=f"{name}.fc2")(y))
    return layers.Add(name=f"{name}.add2")([x, y])


@keras.saving.register_keras_serializable("hvd_train")
def gelu(x) -> keras.KerasTensor:
    """x Phi(x). Not ``ops.gelu``: TensorFlow rounds its square root of 2 to 32 bits, an error of 5e-9 in 64 bits."""
    return 0.5 * x * (1 + ops.erf(x * math.sqrt(0.5)))


def build(
    input_shape, num_classes, width: int = 128, depth: int = 4, heads: int = 4, dropout: float = 0.0
) -> keras.Model:
    """Tokens (n, T), integers -> logits (n, T, num_classes)."""
    if len(input_shape) != 1:
        raise ValueError(f"the GPT needs samples of one axis, tokens, not of shape {tuple(input_shape)}")
    if width % heads:
        raise ValueError(f"width {width} is no multiple of heads {heads}")
    inputs, tokens = keras.Input(input_shape, dtype="int64"), Tokens(num_classes, width, name="tokens")
    x = layers.Dropout(dropout, name="dropout")(Positions(name="positions")(tokens(inputs)))
    for i in range(depth):
        x = _block(x, heads, dropout, f"blocks.{i}")
    x = layers.LayerNormalization(epsilon=1e-5, name="norm")(x)
    return keras.Model(inputs, tokens(x, reverse=True), name="gpt")


def blocks(model: keras.Model) -> list[keras.Model]:
    return cut(model, ["dropout", *(layer.name for layer in model.layers if layer.name.endswith(".add2"))])


def neutral(model: keras.Model) -> dict[str, tuple]:
    names = {"gamma": "scale", "beta": "bias"}
    table = {}
    for v in model.trainable_variables:
        layer, _, kind = v.path.rpartition("/")
        table[v.path] = (f"{layer}.{names.get(kind, kind)}", None, None, tuple(v.shape))
    return table

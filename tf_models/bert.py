"""BERT (Devlin et al. 2018), small: masked words and next sentence (6.5 million weights and 257 a word)."""

from __future__ import annotations

import keras
from keras import layers, ops

from tf_models.gpt import HIDDEN, CausalAttention, Positions, Tokens, gelu, neutral

__all__ = ["blocks", "build", "neutral"]


@keras.saving.register_keras_serializable("hvd_train")
class Attention(CausalAttention):
    """Attention between all positions, except where ``shown`` (n, T), for example the tokens, is 0: padding."""

    def call(self, qkv, shown) -> keras.KerasTensor:
        return self.attend(qkv, HIDDEN * ops.cast(ops.equal(shown, 0)[:, None, None], self.wide))

    def compute_output_shape(self, qkv_shape, shown_shape) -> tuple:
        return super().compute_output_shape(qkv_shape)


@keras.saving.register_keras_serializable("hvd_train")
class Bias(layers.Layer):
    """x (..., k) + a learned (k,)."""

    def build(self, input_shape) -> None:
        self.bias = self.add_weight(shape=input_shape[-1:], initializer="zeros", name="bias")

    def call(self, x) -> keras.KerasTensor:
        return x + self.bias


def norm(x, name: str) -> keras.KerasTensor:
    return layers.LayerNormalization(epsilon=1e-12, name=name)(x)


def block(x, shown, heads: int, dropout: float, name: str) -> keras.KerasTensor:
    """(n, T, width) and shown (n, T), 0 for padding -> (n, T, width); with layer norms after the residual sums."""
    width = x.shape[-1]
    y = Attention(heads, name=f"{name}.attention")(layers.Dense(3 * width, name=f"{name}.qkv")(x), shown)
    y = layers.Dropout(dropout, name=f"{name}.dropout1")(layers.Dense(width, name=f"{name}.out")(y))
    x = norm(layers.Add(name=f"{name}.add1")([x, y]), f"{name}.norm1")
    y = layers.Activation(gelu, name=f"{name}.gelu")(layers.Dense(4 * width, name=f"{name}.fc1")(x))
    y = layers.Dropout(dropout, name=f"{name}.dropout2")(layers.Dense(width, name=f"{name}.fc2")(y))
    return norm(layers.Add(name=f"{name}.add2")([x, y]), f"{name}.norm2")


def build(
    input_shape, num_classes, width: int = 256, depth: int = 8, heads: int = 8, dropout: float = 0.1
) -> keras.Model:
    """Tokens and segments (n, T), integers -> logits {"words": (n, T, vocabulary), "next": (n, 2)}.

    Token 0 is padding, which is masked in attention; segments are 0 for sentence A and 1 for B. "next" is computed from
    the first token. Logits of words are products with the token embeddings.
    """
    if not (isinstance(input_shape, dict) and set(input_shape) == {"tokens", "segments"}):
        raise ValueError(f"the BERT needs the inputs tokens and segments, not {input_shape}")
    if not (isinstance(num_classes, dict) and set(num_classes) == {"words", "next"}):
        raise ValueError(f"the BERT needs the labels words and next, not {num_classes}")
    if width % heads:
        raise ValueError(f"width {width} is no multiple of heads {heads}")
    inputs = {name: keras.Input(shape, dtype="int64", name=name) for name, shape in input_shape.items()}
    tokens = Tokens(num_classes["words"], width, name="token")
    segments = Tokens(2, width, name="segment")(inputs["segments"])
    x = Positions(name="position")(tokens(inputs["tokens"]))
    x = norm(layers.Add(name="add")([x, segments]), "norm")
    x = layers.Dropout(dropout, name="dropout")(x)
    for i in range(depth):
        x = block(x, inputs["tokens"], heads, dropout, f"blocks.{i}")
    y = layers.Activation(gelu, name="gelu")(layers.Dense(width, name="transform")(x))
    words = Bias(name="words")(tokens(norm(y, "transform_norm"), reverse=True))
    pooled = layers.Dense(width, activation="tanh", name="pooler")(x[:, 0])
    return keras.Model(inputs, {"words": words, "next": layers.Dense(2, name="next")(pooled)}, name="bert")


def blocks(model: keras.Model) -> list[keras.Model]:
    """Return the blocks, which pass (n, T, width + 1) on; the last column holds the tokens, 0 for padding."""
    ends = ["dropout", *(layer.name for layer in model.layers if layer.name.endswith(".norm2"))]
    places = [model.get_layer(name).output for name in ends]
    tokens = model.input["tokens"]
    parts = [keras.Model(model.input, _with_tokens(places[0], tokens), name="block0")]
    joined = keras.Input((*places[0].shape[1:-1], places[0].shape[-1] + 1))
    x, hidden = joined[..., :-1], joined[..., -1]
    for k, (before, after) in enumerate(zip(places, places[1:], strict=False), start=1):
        y = keras.Model([before, tokens], after)([x, ops.cast(hidden, "int64")])
        parts.append(keras.Model(joined, _with_tokens(y, hidden), name=f"block{k}"))
    return [*parts, keras.Model(joined, keras.Model(places[-1], model.output)(x), name="head")]


def _with_tokens(x, tokens) -> keras.KerasTensor:
    return ops.concatenate([x, ops.cast(ops.expand_dims(tokens, -1), x.dtype)], -1)

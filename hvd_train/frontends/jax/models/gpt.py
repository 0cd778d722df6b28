"""A small decoder-only transformer: logits of the next token at every position (0.84 million weights on bytes)."""

import math

import jax
import jax.numpy as jnp

from hvd_train.frontends.jax.models.mlp import Forward, Shapes, Weights, dense, of_dense


def _norm(w: Weights, name: str, x: jax.Array) -> jax.Array:
    """Normalize the last axis (Ba, Kiros and Hinton 2016)."""
    x = x - x.mean(-1, keepdims=True)
    return x / jnp.sqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-5) * w[f"{name}.scale"] + w[f"{name}.bias"]


def _attend(qkv: jax.Array, heads: int) -> jax.Array:
    """Causal: query, key, value (n, T, 3 width), last axis (3, heads, width / heads) -> (n, T, width)."""
    n, length, width = qkv.shape[0], qkv.shape[1], qkv.shape[2] // 3
    q, k, v = qkv.reshape(n, length, 3, heads, width // heads).transpose(2, 0, 3, 1, 4)
    scores = q @ k.swapaxes(2, 3) / math.sqrt(width // heads)  # (n, heads, T, T)
    shares = jax.nn.softmax(jnp.where(jnp.tri(length, dtype=bool), scores, -jnp.inf))
    return (shares @ v).transpose(0, 2, 1, 3).reshape(n, length, width)


def build(
    input_shape, num_classes, width: int = 128, depth: int = 4, heads: int = 4, dropout: float = 0.0
) -> tuple[Shapes, Forward]:
    """Tokens (n, T), integers -> logits (n, T, num_classes)."""
    if len(input_shape) != 1:
        raise ValueError(f"the GPT needs samples of one axis, tokens, not of shape {tuple(input_shape)}")
    if width % heads:
        raise ValueError(f"width {width} is no multiple of heads {heads}")
    shapes: Shapes = {"tokens.embedding": (num_classes, width), "positions.embedding": (input_shape[0], width)}
    blocks = [f"blocks.{i}" for i in range(depth)]
    for b in blocks:
        shapes |= _of_norm(f"{b}.norm1", width) | of_dense(f"{b}.qkv", width, 3 * width)
        shapes |= of_dense(f"{b}.out", width, width) | _of_norm(f"{b}.norm2", width)
        shapes |= of_dense(f"{b}.fc1", width, 4 * width) | of_dense(f"{b}.fc2", 4 * width, width)
    shapes |= _of_norm("norm", width)

    def forward(w: Weights, x: jax.Array, drop) -> jax.Array:
        x = drop(w["tokens.embedding"][x] + w["positions.embedding"], dropout)
        for b in blocks:
            y = _attend(dense(w, f"{b}.qkv", _norm(w, f"{b}.norm1", x)), heads)
            x = x + drop(dense(w, f"{b}.out", y), dropout)
            y = jax.nn.gelu(dense(w, f"{b}.fc1", _norm(w, f"{b}.norm2", x)), approximate=False)
            x = x + drop(dense(w, f"{b}.fc2", y), dropout)
        return _norm(w, "norm", x) @ w["tokens.embedding"].T

    return shapes, forward


def _of_norm(name: str, width: int) -> Shapes:
    return {f"{name}.scale": (width,), f"{name}.bias": (width,)}

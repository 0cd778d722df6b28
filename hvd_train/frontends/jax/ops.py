"""Tensor operations in JAX, for traced and for eager code."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from hvd_train.update.state import EagerCell, EagerControl


class JaxOps(EagerControl):
    round = staticmethod(jnp.round)
    sum, max = staticmethod(jnp.sum), staticmethod(jnp.max)
    reshape, dot = staticmethod(jnp.reshape), staticmethod(jnp.dot)
    sigmoid, stop_gradient = staticmethod(jax.nn.sigmoid), staticmethod(jax.lax.stop_gradient)

    def where(self, condition, a, b) -> jax.Array:
        return jnp.where(condition, a, b)

    def library_metric(self, metric, logits) -> None:
        return None

    def from_numpy(self, x) -> jax.Array:
        return jnp.array(x)

    def to_numpy(self, x) -> np.ndarray:
        return np.array(x)

    def cast(self, x, dtype) -> jax.Array:
        return jnp.asarray(x).astype(dtype)

    def dtype(self, x) -> str:
        return x.dtype.name

    def keep(self, x) -> EagerCell:
        return EagerCell(self.from_numpy(x))

    def in_blocks(self, formula, *tensors) -> Sequence[jax.Array]:
        return formula(*tensors)  # arrays cannot be changed block by block

    def topk(self, x, k) -> jax.Array:
        return jax.lax.top_k(x, k)[1]

    def above(self, x, bound) -> jax.Array:
        return jnp.flatnonzero(~(x <= bound))

    def take(self, x, indices) -> jax.Array:
        return x[indices]

    def concat(self, parts, axis=0) -> jax.Array:
        return jnp.concatenate(list(parts), axis)

    def split(self, x, sizes) -> Sequence[jax.Array]:
        return jnp.split(x, np.cumsum(sizes)[:-1])

    def scatter(self, length, indices, values, *, same_bits=True) -> jax.Array:
        return jnp.zeros(length, values.dtype).at[indices].add(values)

    def matmul(self, a, b, *, transpose_a=False, transpose_b=False) -> jax.Array:
        return (a.T if transpose_a else a) @ (b.T if transpose_b else b)

    def minus_product(self, x, a, b) -> jax.Array:
        return x - a @ b.T

    def orthonormal(self, x) -> jax.Array:
        return jnp.linalg.qr(x)[0]

    def move_towards(self, cells, x, share) -> None:
        for cell, one in zip(cells, x, strict=True):
            cell.write(cell.read() + share * (one - cell.read()))

    def clip(self, x, limit) -> jax.Array:
        return jnp.clip(x, -limit, limit)

    def add_at(self, x, start, part) -> jax.Array:
        return x.at[start : start + len(part)].add(part)

    def to_bytes(self, x) -> jax.Array:
        return x.view(jnp.uint8)

    def from_bytes(self, x, dtype) -> jax.Array:
        return x.view(dtype)

    def nbytes(self, x) -> int:
        return x.nbytes

    def stack(self, parts) -> jax.Array:
        return jnp.stack([jnp.asarray(x) for x in parts])

    def cross_entropy(self, logits, labels, present=None) -> jax.Array:
        return -self.take_last(jax.nn.log_softmax(logits), labels)

    def softplus(self, x) -> jax.Array:
        return jnp.logaddexp(x, 0.0)

    def argmax(self, x) -> jax.Array:
        return jnp.argmax(x, -1)

    def take_last(self, x, indices) -> jax.Array:
        return jnp.take_along_axis(x, indices[..., None], -1)[..., 0]

    def row_means(self, x) -> jax.Array:
        return x.reshape(len(x), -1).mean(1)

    def sum_of_squares(self, x) -> jax.Array:
        return jnp.sum(jnp.square(x))

    def all_finite(self, x) -> jax.Array:
        return jnp.isfinite(x).all()

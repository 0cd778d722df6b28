"""A multi-layer perceptron on the flattened input: dense layers with ReLU between them."""

import math
from collections.abc import Callable, Mapping, Sequence

import jax

Weights = Mapping[str, jax.Array]  # {canonical name: array in canonical axes}
Shapes = dict[str, tuple[int, ...]]  # of the weights
# (weights, input (n, ...), dropout: a function of an array and a rate) -> logits (n, ..., classes)
Forward = Callable[[Weights, jax.Array, Callable[[jax.Array, float], jax.Array]], jax.Array]


def dense(w: Weights, name: str, x: jax.Array) -> jax.Array:
    """A dense layer: x (..., k), kernel (k, m) -> (..., m)."""
    return x @ w[f"{name}.kernel"] + w[f"{name}.bias"]


def of_dense(name: str, inputs: int, outputs: int) -> Shapes:
    return {f"{name}.kernel": (inputs, outputs), f"{name}.bias": (outputs,)}


def build(input_shape, num_classes, hidden: Sequence[int] = (128,), outputs: int = 1) -> tuple[Shapes, Forward]:
    """``outputs``: how many, if labels are not classes."""
    sizes = [math.prod(input_shape), *hidden, num_classes or outputs]
    names = [f"fc{i + 1}" for i in range(len(sizes) - 1)]
    shapes: Shapes = {}
    for name, inputs, units in zip(names, sizes, sizes[1:], strict=False):
        shapes |= of_dense(name, inputs, units)

    def forward(w: Weights, x: jax.Array, dropout) -> jax.Array:
        x = x.reshape(len(x), -1)
        for name in names[:-1]:
            x = jax.nn.relu(dense(w, name, x))
        return dense(w, names[-1], x)

    return shapes, forward

"""The formulas of the losses: one value per position, never a mean.

z are the outputs and y the labels, both (n, ...). cross_entropy takes outputs (n, ..., C) for C classes.
"""

from __future__ import annotations

from hvd_train.protocol import Ops, Tensor


def cross_entropy(z: Tensor, y: Tensor, ops: Ops) -> Tensor:
    """-log of the softmax of z at the class y."""
    return ops.cross_entropy(z, y)


def mse(z: Tensor, y: Tensor, ops: Ops) -> Tensor:
    """(z - y)^2."""
    return (z - y) ** 2


def mae(z: Tensor, y: Tensor, ops: Ops) -> Tensor:
    """|z - y|."""
    return abs(z - y)


def huber(z: Tensor, y: Tensor, ops: Ops) -> Tensor:
    """(z - y)^2 / 2 up to a distance of 1, then |z - y| - 1/2 (Huber 1964, Annals of Mathematical Statistics 35)."""
    distance = abs(z - y)
    return ops.where(distance <= 1.0, 0.5 * distance**2, distance - 0.5)


def bce(z: Tensor, y: Tensor, ops: Ops) -> Tensor:
    """-y log s(z) - (1 - y) log(1 - s(z)) for the sigmoid s."""
    # -log s(z) is softplus(-z): no term cancels another, and no exponential overflows.
    return y * ops.softplus(-z) + (1.0 - y) * ops.softplus(z)

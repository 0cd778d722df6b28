"""Gradient clipping."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hvd_train.protocol import Ops, Tensor


@dataclass(frozen=True)
class Clip:
    """Clipping of the reduced gradient by its global 2-norm or by value. ``limit`` 0: no clipping.

    ``total``: turns the sum of squares of this rank's part of the gradient into that of the whole gradient.
    """

    limit: float = 0.0
    algorithm: str = "norm"
    total: Callable[[Tensor], Tensor] | None = None

    def __call__(self, gradients: list[Tensor], ops: Ops) -> list[Tensor]:
        if not self.limit:
            return gradients
        if self.algorithm == "value":
            return [ops.clip(g, self.limit) for g in gradients]
        # Whole gradients are equal on all ranks after the exchange, so their norm needs no communication.
        squares = sum(ops.sum_of_squares(g) for g in gradients)
        if self.total:
            squares = self.total(squares)
        # The 1e-6 is that of torch.nn.utils.clip_grad_norm_: a zero gradient stays zero.
        factor = ops.clip(self.limit / (squares**0.5 + 1e-6), 1.0)
        return [g * factor for g in gradients]

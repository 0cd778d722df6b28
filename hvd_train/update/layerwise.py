"""Layer-wise optimizers for large batches, once for every framework.

A formula takes a weight, its gradient and slots (state tensors, all of one shape), the step ``t`` (from 1, float64)
and the learning rate. It returns what to subtract from the weight, then the new slots. ``o`` has the keys of ``optim``.
Norms are 2-norms over the whole tensor. Tensors of fewer than 2 dimensions (biases, scales of a normalization) have
ratio 1 and no weight decay, as in both papers.

Formulas are generators: each yields once, the sums of squares of this rank's part of the tensor, and receives those of
the whole tensor. ``side_by_side`` runs them.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any

from hvd_train.config import OptimConfig
from hvd_train.protocol import Ops, Tensor

Formula = Generator[list[Tensor], Sequence[Tensor], tuple[Tensor, ...]]
Total = Callable[[list[Tensor]], Sequence[Tensor]]  # sums of squares of parts of tensors -> of the whole tensors


def whole(squares: list[Tensor]) -> list[Tensor]:
    """Return the sums of squares unchanged, for a rank that has the whole tensors."""
    return squares


def side_by_side(formulas: Sequence[Formula], total: Total) -> list[tuple[Tensor, ...]]:
    """Run the formulas together, with one call of ``total``, so that one small transfer sums all norms."""
    asked = [next(formula) for formula in formulas]
    totals = list(total([square for squares in asked for square in squares]))
    results: list[Any] = []
    for formula, squares in zip(formulas, asked, strict=True):
        try:
            formula.send([totals.pop(0) for _ in squares])
        except StopIteration as done:
            results.append(done.value)
    return results


def lars(w: Tensor, g: Tensor, slots: Sequence[Tensor], t: Tensor, rate: Tensor, o: OptimConfig, ops: Ops) -> Formula:
    """m = momentum m + rate r (g + decay w), r = trust |w| / (|g| + decay |w| + eps); w -= m.

    You, Gitman and Ginsburg 2017, "Large Batch Training of Convolutional Networks". r is 1 where |w| or |g| is 0.
    """
    (m,), ratio = slots, 1.0
    matrix = len(w.shape) > 1
    squares = yield [ops.sum_of_squares(w), ops.sum_of_squares(g)] if matrix else []
    if matrix:
        norm, slope = squares[0] ** 0.5, squares[1] ** 0.5
        some = (norm > 0) & (slope > 0)
        ratio = _ratio(o.trust_coefficient * norm, slope + o.weight_decay * norm + o.eps, some, ops)
        g = g + o.weight_decay * w
    m = o.momentum * m + rate * ratio * g
    return m, m


def lamb(w: Tensor, g: Tensor, slots: Sequence[Tensor], t: Tensor, rate: Tensor, o: OptimConfig, ops: Ops) -> Formula:
    """m, v, and u = m' / (sqrt(v') + eps) + decay w as in AdamW; w -= rate |w| / |u| u.

    You et al. 2020, "Large Batch Optimization for Deep Learning". The ratio is 1 where |w| or |u| is 0.
    """
    m, v = slots
    m = o.betas[0] * m + (1 - o.betas[0]) * g
    v = o.betas[1] * v + (1 - o.betas[1]) * g * g
    corrections = [ops.cast(1 - beta**t, ops.dtype(g)) for beta in o.betas]
    u = m / corrections[0] / ((v / corrections[1]) ** 0.5 + o.eps)
    matrix = len(w.shape) > 1
    if matrix:
        u = u + o.weight_decay * w
    squares = yield [ops.sum_of_squares(w), ops.sum_of_squares(u)] if matrix else []
    if matrix:
        norm, length = squares[0] ** 0.5, squares[1] ** 0.5
        u = _ratio(norm, length, (norm > 0) & (length > 0), ops) * u
    return rate * u, m, v


def _ratio(a: Tensor, b: Tensor, some: Tensor, ops: Ops) -> Tensor:
    """Return a / b where ``some`` holds, else 1."""
    return ops.where(some, a / ops.where(some, b, 1.0), 1.0)

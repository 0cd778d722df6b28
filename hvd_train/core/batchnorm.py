"""Batch normalization over parts of a batch (Ioffe and Szegedy 2015), for every framework.

C is the number of channels; "values" are a channel's entries without padding. A rank's part is a row [count, C means, C
sums of squared deviations]; an empty part is a row of zeros.
"""

from __future__ import annotations

from collections.abc import Sequence

from hvd_train.protocol import Ops, Tensor


def combine(parts: Tensor, ops: Ops) -> tuple[Tensor, Tensor, Tensor]:
    """Combine rows (ranks, 1 + 2 C) into values per channel (1,), means (C,), biased variances (C,) of all parts.

    Adds deviations, not squares, to avoid cancellation with a large mean (Chan, Golub and LeVeque 1983).
    """
    channels = (parts.shape[1] - 1) // 2
    count, mean, spread = parts[:, :1], parts[:, 1 : 1 + channels], parts[:, 1 + channels :]
    total = ops.sum(count, 0)
    # A channel without values (all padding) would divide by zero; its sums are zeros anyway.
    some = ops.where(total > 0, total, 1.0)
    center = ops.sum(count * mean, 0) / some
    return total, center, ops.sum(spread + count * (mean - center) ** 2, 0) / some


def joined(rows: Sequence[Tensor], ops: Ops) -> Tensor:
    """Combine rows (1 + 2 C,) of several batches into one row."""
    total, mean, variance = combine(ops.concat([ops.reshape(row, (1, -1)) for row in rows]), ops)
    return ops.concat([total, mean, variance * total])


def counting(row: Tensor, ops: Ops) -> Tensor:
    """Return the row, or zeros (an empty part) if it is not finite, as for a batch with a NaN."""
    return ops.where(ops.all_finite(row), row, 0.0)


def of_all(row: Tensor, ops: Ops) -> tuple[Tensor, Tensor]:
    """Return the means (C,) and the unbiased variances (C,) of a row."""
    channels = (row.shape[0] - 1) // 2
    count, mean, spread = row[:1], row[1 : 1 + channels], row[1 + channels :]
    return mean, spread / ops.where(count > 1, count - 1, 1.0)


def running(
    old: tuple[Tensor, Tensor], total: Tensor, mean: Tensor, variance: Tensor, share: float | Tensor, ops: Ops
) -> tuple[Tensor, Tensor]:
    """Move the running mean and variance by ``share`` towards this batch's mean and unbiased variance.

    They do not change if a channel has fewer than 2 values, and so no variance.
    """
    share = ops.where(total > 1, share, total * 0)
    unbiased = variance * (total / ops.where(total > 1, total - 1, 1.0))
    return old[0] + share * (mean - old[0]), old[1] + share * (unbiased - old[1])


def input_gradient(
    gradient: Tensor, normal: Tensor, factor: Tensor, weight: Tensor | float, means: tuple[Tensor, Tensor]
) -> Tensor:
    """Return dL/dx for y = scale normal + bias, normal = (x - mean) / deviation; ``factor`` is scale / deviation.

    ``means``: sums of dL/dy and of dL/dy normal over all ranks, divided by the values per channel. ``weight``: 1 for a
    value, 0 for padding. Everything broadcasts to the shape of x.
    """
    return factor * (gradient - weight * (means[0] + normal * means[1]))

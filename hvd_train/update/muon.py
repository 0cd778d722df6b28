"""Muon: orthogonalized momentum for matrices, AdamW for all other tensors.

Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks"; the factor on the rate is that of Liu et
al. 2025, "Muon is Scalable for LLM Training" (arXiv 2502.16982), so that all tensors can share one rate. It does not
change if a matrix is transposed, as it may be in the other framework.

A matrix is any tensor of two axes, including embeddings and heads, but not convolution kernels.
"""

from __future__ import annotations

from collections.abc import Sequence

from hvd_train.config import OptimConfig
from hvd_train.protocol import Ops, Tensor
from hvd_train.update.layerwise import Formula

# The polynomial a s + b s^3 + c s^5 brings singular values s in (0, 1] near 1 when applied TIMES times.
COEFFICIENTS, TIMES = (3.4445, -4.7750, 2.0315), 5
RMS = 0.2  # of the entries of AdamW's steps


def muon(w: Tensor, g: Tensor, slots: Sequence[Tensor], t: Tensor, rate: Tensor, o: OptimConfig, ops: Ops) -> Formula:
    """m = momentum m + g; w -= rate (0.2 sqrt(longer side) orthogonal(m) + decay w).

    With nesterov, g + momentum m is used for m. v is not used for a matrix.
    """
    m, v = slots
    yield []  # no sums over the ranks are needed
    if len(w.shape) == 2:
        m = o.momentum * m + g
        u = orthogonal(g + o.momentum * m if o.nesterov else m, ops) * (RMS * max(map(int, w.shape)) ** 0.5)
    else:
        m = o.betas[0] * m + (1 - o.betas[0]) * g
        v = o.betas[1] * v + (1 - o.betas[1]) * g * g
        corrections = [ops.cast(1 - beta**t, ops.dtype(g)) for beta in o.betas]
        u = m / corrections[0] / ((v / corrections[1]) ** 0.5 + o.eps)
    return rate * (u + o.weight_decay * w), m, v


def orthogonal(x: Tensor, ops: Ops) -> Tensor:
    """Approximate U V^T for the matrix x = U S V^T by Newton-Schulz; singular values become 0.7 to 1.2."""
    a, b, c = COEFFICIENTS
    x = x / (ops.sum_of_squares(x) ** 0.5 + 1e-7)
    tall = int(x.shape[0]) > int(x.shape[1])
    for _ in range(TIMES):
        # (n, n), n being the shorter side.
        gram = ops.matmul(x, x, transpose_a=tall, transpose_b=not tall)
        polynomial = b * gram + c * ops.matmul(gram, gram)
        x = a * x + (ops.matmul(x, polynomial) if tall else ops.matmul(polynomial, x))
    return x

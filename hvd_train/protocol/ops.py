"""The tensor operations that exchange, compression and losses need."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from hvd_train.protocol.tensors import Tensor


class Cell(Protocol):
    """A tensor kept for later steps, for example a residual."""

    def read(self) -> Tensor: ...

    def write(self, tensor: Tensor) -> None: ...


class LibraryMetric(Protocol):
    """A metric object of the framework's library, whose states are summed over batches."""

    def sums(self, outputs: Any, labels: Any, weights: Tensor) -> Tensor:
        """Return the states for a batch, (length,) float64. Samples whose weight (n,) is 0 do not count."""

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Return the shapes of the states, which ``sums`` concatenates; known after its first call."""

    def result(self, states: Sequence[np.ndarray]) -> float:
        """Compute the metric from its states summed over all batches and ranks, float64 of ``shapes``."""


class Ops(Protocol):
    """The tensor operations that need a framework; arithmetic operators are the tensors' own."""

    def from_numpy(self, x: np.ndarray) -> Tensor: ...
    def to_numpy(self, x: Tensor) -> np.ndarray: ...
    def cast(self, x: Tensor, dtype: str) -> Tensor: ...
    def dtype(self, x: Tensor) -> str:
        """Return NumPy's name of the tensor's type."""

    def keep(self, x: np.ndarray) -> Cell:
        """Make a cell that holds this tensor for later steps."""

    def keep_number(self, x: int) -> Cell:
        """Make a cell that holds a whole number for conditions, in CPU memory."""

    def do_if(self, condition: Any, work: Callable[[], None]) -> None:
        """Run ``work`` if a condition holds, which a traced graph evaluates at run time."""

    def start_if(
        self, condition: Any, start: Callable[[], Callable[[], Any]], otherwise: Callable[[], Any]
    ) -> Callable[[], Any]:
        """Start some work if a condition holds; return a function that returns its result, else that of ``otherwise``.

        ``start`` returns a function that waits for the work. Both results have the same structure of tensors.
        """

    def blocks(self, x: Tensor) -> Sequence[Tensor]:
        """Cut the flat ``x``, without a copy, into the parts for which separate cells are fastest."""

    def in_blocks(self, formula: Callable[..., Sequence[Tensor]], *tensors: Tensor) -> Sequence[Tensor]:
        """Return ``formula(*tensors)`` of flat tensors (n,), n > 0, which it may change.

        ``formula`` is elementwise. The results may overwrite the first tensors, in order.
        """

    def reshape(self, x: Tensor, shape: Sequence[int]) -> Tensor: ...
    def topk(self, x: Tensor, k: int) -> Tensor:
        """Return the indices (k,) of the largest entries of the flat ``x``."""

    def above(self, x: Tensor, bound: float | Tensor) -> Tensor:
        """Return the indices (m,) of the entries of the flat ``x`` that are > bound or NaN; m depends on the data."""

    def take(self, x: Tensor, indices: Tensor) -> Tensor: ...
    def concat(self, parts: Sequence[Tensor], axis: int = 0) -> Tensor:
        """Concatenate tensors, which are equal in all axes but one."""

    def split(self, x: Tensor, sizes: Sequence[int]) -> Sequence[Tensor]:
        """Split the flat ``x`` into parts of these sizes, which add up to its size."""

    def scatter(self, length: int, indices: Tensor, values: Tensor, *, same_bits: bool = True) -> Tensor:
        """Add values into a flat tensor of zeros; an index may occur several times.

        Without ``same_bits`` a GPU may add in another order each time. With many values for few indices this takes a
        sixtieth of the time (one H100, 8 million values of two indices: 8 ms instead of 490).
        """

    def matmul(self, a: Tensor, b: Tensor, *, transpose_a: bool = False, transpose_b: bool = False) -> Tensor: ...
    def minus_product(self, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """Return x - a b^T; may overwrite ``x``."""

    def orthonormal(self, x: Tensor) -> Tensor:
        """Return an orthonormal basis of the column space of ``x`` (QR)."""
        # Ranks must get the same bits after an exchange. So the bits of this, ``matmul`` over a short axis,
        # ``sum_of_squares`` and ``scatter`` must not depend on the number of threads.

    def move_towards(self, cells: Sequence[Cell], x: Sequence[Tensor], share: float) -> None:
        """Replace the value c of each cell by c + share (x - c)."""

    def clip(self, x: Tensor, limit: float) -> Tensor:
        """Clip the entries of ``x`` to [-limit, limit]."""

    def round(self, x: Tensor) -> Tensor:
        """Round to the nearest whole number, halves to even."""

    def where(self, condition: Tensor, a: Tensor | float, b: Tensor | float) -> Tensor:
        """Select entries of ``a`` where the condition holds, else of ``b``; one of them may be a number."""

    def sum(self, x: Tensor, axis: int) -> Tensor:
        """Sum over one axis."""

    def max(self, x: Tensor, axis: int | None = None) -> Tensor:
        """Return the maximum of all entries, of shape (), or over one axis; NaN propagates."""

    def add_at(self, x: Tensor, start: int, part: Tensor) -> Tensor:
        """Return the flat ``x`` with ``part`` added from entry ``start`` on; may overwrite ``x``."""

    def to_bytes(self, x: Tensor) -> Tensor:
        """View the flat ``x`` as (bytes,) uint8, in this machine's byte order."""

    def from_bytes(self, x: Tensor, dtype: str) -> Tensor: ...

    def nbytes(self, x: Tensor) -> Tensor:
        """Return the size in bytes: a number or, if the size depends on the data, a tensor of shape ()."""

    def stack(self, parts: Sequence[Tensor]) -> Tensor:
        """Stack tensors of shape () to one of shape (len(parts),)."""

    def sum_of_squares(self, x: Tensor) -> Tensor: ...
    def cross_entropy(self, logits: Tensor, labels: Tensor, present: Tensor | None = None) -> Tensor:
        """Return the cross-entropy of each label (n, ...), from logits (n, ..., C) and labels (n, ...).

        Where ``present`` (n, ...) is 0 there is no label, and the result is undefined.
        """

    def stop_gradient(self, x: Tensor) -> Tensor:
        """Return ``x`` as a constant for differentiation."""

    def softplus(self, x: Tensor) -> Tensor:
        """Return log(1 + e^x)."""

    def sigmoid(self, x: Tensor) -> Tensor: ...
    def argmax(self, x: Tensor) -> Tensor:
        """Return the index of the largest entry in the last axis: (..., C) gives (...) int64."""

    def take_last(self, x: Tensor, indices: Tensor) -> Tensor:
        """Select one entry of the last axis: (..., C) and indices (...) give (...)."""

    def row_means(self, x: Tensor) -> Tensor:
        """Return the mean of each row: (n, ...) gives (n,)."""

    def dot(self, a: Tensor, b: Tensor) -> Tensor:
        """Return the inner product of (n,) and (n,), a tensor of shape ()."""

    def library_metric(self, metric: Any, logits: bool) -> LibraryMetric | None:
        """Wrap a metric object of the framework's library; None: it is not one. ``logits``: whether outputs are logits.

        Raises ConfigError, with the reason, if its states cannot be summed.
        """

    def all_finite(self, x: Tensor) -> Tensor: ...

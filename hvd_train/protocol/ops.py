"""The tensor verbs that exchange, compression and losses need."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from hvd_train.protocol.tensors import Tensor


class Cell(Protocol):
    """A tensor that a later step reads: a residual, for one."""

    def read(self) -> Tensor: ...

    def write(self, tensor: Tensor) -> None: ...


class LibraryMetric(Protocol):
    """A metric object of the framework's library, of which the user's batches are added up."""

    def sums(self, outputs: Any, labels: Any, weights: Tensor) -> Tensor:
        """Add up a batch: (length,) float64. Samples (n,) of weight 0 are left out."""

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """The shapes of the states, which ``sums`` puts one after the other; after the first call of ``sums``."""

    def result(self, states: Sequence[np.ndarray]) -> float:
        """Compute the metric from its states, the sums over all batches and ranks: float64, of ``shapes``."""


class Ops(Protocol):
    """The tensor verbs that exchange and compression need; arithmetic operators come from the tensors themselves."""

    def from_numpy(self, x: np.ndarray) -> Tensor: ...
    def to_numpy(self, x: Tensor) -> np.ndarray: ...
    def cast(self, x: Tensor, dtype: str) -> Tensor: ...
    def dtype(self, x: Tensor) -> str:
        """NumPy's name of the tensor's type."""

    def keep(self, x: np.ndarray) -> Cell:
        """Make a cell with this tensor, which later steps read and write."""

    def keep_number(self, x: int) -> Cell:
        """Make a cell with a whole number, for conditions, in the memory of the CPU."""

    def do_if(self, condition: Any, work: Callable[[], None]) -> None:
        """Do some work if a condition holds; a traced graph decides when it runs."""

    def start_if(
        self, condition: Any, start: Callable[[], Callable[[], Any]], otherwise: Callable[[], Any]
    ) -> Callable[[], Any]:
        """Start some work if a condition holds; return the function that gives its result, or that of ``otherwise``.

        ``start`` returns the function that waits for the work. Both results are made of tensors in the same way.
        """

    def blocks(self, x: Tensor) -> Sequence[Tensor]:
        """Cut the flat ``x``, without a copy, into parts for which a cell each is fastest."""

    def in_blocks(self, formula: Callable[..., Sequence[Tensor]], *tensors: Tensor) -> Sequence[Tensor]:
        """Return ``formula(*tensors)`` of flat tensors (n,), n > 0, which it may change.

        ``formula`` treats each entry alone. The results may take the place of the first tensors, in their order.
        """

    def reshape(self, x: Tensor, shape: Sequence[int]) -> Tensor: ...
    def topk(self, x: Tensor, k: int) -> Tensor:
        """Return the indices (k,) of the largest entries of the flat ``x``."""

    def above(self, x: Tensor, bound: float | Tensor) -> Tensor:
        """Return the indices (m,) of the entries of the flat ``x`` that are > bound or NaN; m depends on the data."""

    def take(self, x: Tensor, indices: Tensor) -> Tensor: ...
    def concat(self, parts: Sequence[Tensor], axis: int = 0) -> Tensor:
        """Put tensors one after the other, which are flat, or equal in all axes but one."""

    def split(self, x: Tensor, sizes: Sequence[int]) -> Sequence[Tensor]:
        """Cut the flat ``x`` into parts of these sizes, which add up to its size."""

    def scatter(self, length: int, indices: Tensor, values: Tensor, *, same_bits: bool = True) -> Tensor:
        """Add values into a flat tensor of zeros; an index may occur several times.

        Without ``same_bits`` a GPU may add in another order each time. Where many values have few indices it then takes
        a sixtieth of the time (one H100, 8 million values of two indices: 8 ms against 490).
        """

    def matmul(self, a: Tensor, b: Tensor, *, transpose_a: bool = False, transpose_b: bool = False) -> Tensor: ...
    def minus_product(self, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """Return x - a b^T, which may take the place of ``x``."""

    def orthonormal(self, x: Tensor) -> Tensor:
        """Return an orthonormal basis of the column space of ``x`` (QR)."""
        # What ranks compute after an exchange must have the same bits on all. So this, ``matmul`` over a short axis,
        # ``sum_of_squares`` and ``scatter`` must not depend on the number of threads, bit for bit.

    def move_towards(self, cells: Sequence[Cell], x: Sequence[Tensor], share: float) -> None:
        """Add share (x - c) to c, which is in the cell, for each cell and its x."""

    def clip(self, x: Tensor, limit: float) -> Tensor:
        """Limit the entries of ``x`` to [-limit, limit]."""

    def round(self, x: Tensor) -> Tensor:
        """Round to the nearest whole number, halves to the even one."""

    def where(self, condition: Tensor, a: Tensor | float, b: Tensor | float) -> Tensor:
        """Take entries of ``a`` where the condition holds, else of ``b``; one of them may be a number."""

    def sum(self, x: Tensor, axis: int) -> Tensor:
        """Add up over one axis."""

    def max(self, x: Tensor, axis: int | None = None) -> Tensor:
        """Return the largest entry, a tensor of shape (), or those over one axis; NaN where one is NaN."""

    def add_at(self, x: Tensor, start: int, part: Tensor) -> Tensor:
        """Return the flat ``x`` with ``part`` added from entry ``start`` on, which may take the place of ``x``."""

    def to_bytes(self, x: Tensor) -> Tensor:
        """Return the flat ``x`` as (bytes,) uint8, in this machine's byte order."""

    def from_bytes(self, x: Tensor, dtype: str) -> Tensor: ...

    def nbytes(self, x: Tensor) -> Tensor:
        """Count the bytes: a number or, where the size depends on the data, a tensor of shape ()."""

    def stack(self, parts: Sequence[Tensor]) -> Tensor:
        """Join tensors of shape () to one of shape (len(parts),)."""

    def sum_of_squares(self, x: Tensor) -> Tensor: ...
    def cross_entropy(self, logits: Tensor, labels: Tensor, present: Tensor | None = None) -> Tensor:
        """Return the cross-entropy of each label (n, ...), from logits (n, ..., C) and labels (n, ...).

        Where ``present`` (n, ...) is 0 there is no label, and the result is not asked for.
        """

    def stop_gradient(self, x: Tensor) -> Tensor:
        """Return the same numbers, through which no gradient flows."""

    def softplus(self, x: Tensor) -> Tensor:
        """log(1 + e^x)."""

    def sigmoid(self, x: Tensor) -> Tensor: ...
    def argmax(self, x: Tensor) -> Tensor:
        """Return (...) int64: the place of the largest entry of the last axis of (..., C)."""

    def take_last(self, x: Tensor, indices: Tensor) -> Tensor:
        """Take an entry of the last axis: (..., C) and indices (...) give (...)."""

    def row_means(self, x: Tensor) -> Tensor:
        """Return the mean of each row: (n, ...) gives (n,)."""

    def dot(self, a: Tensor, b: Tensor) -> Tensor:
        """Return the sum of the products of (n,) and (n,), a tensor of shape ()."""

    def library_metric(self, metric: Any, logits: bool) -> LibraryMetric | None:
        """Take a metric object of the framework's library; None: it is not one. ``logits``: whether outputs are such.

        Raises ConfigError, with the reason, where it is not made of sums.
        """

    def all_finite(self, x: Tensor) -> Tensor: ...

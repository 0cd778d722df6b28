"""The tensor verbs that exchange, compression and losses need."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from hvd_train.protocol.tensors import Tensor


class Cell(Protocol):
    """A tensor that a later step reads: a residual, for one."""

    def read(self) -> Tensor: ...

    def write(self, tensor: Tensor) -> None: ...


class Ops(Protocol):
    """The tensor verbs that exchange and compression need; arithmetic operators come from the tensors themselves."""

    def from_numpy(self, x: np.ndarray) -> Tensor: ...
    def to_numpy(self, x: Tensor) -> np.ndarray: ...
    def cast(self, x: Tensor, dtype: str) -> Tensor: ...
    def dtype(self, x: Tensor) -> str:
        """NumPy's name of the tensor's type."""

    def keep(self, x: np.ndarray) -> Cell:
        """A cell with this tensor, which later steps read and write."""

    def reshape(self, x: Tensor, shape: Sequence[int]) -> Tensor: ...
    def topk(self, x: Tensor, k: int) -> Tensor:
        """Indices (k,) of the largest entries of the flat ``x``."""

    def above(self, x: Tensor, bound: float | Tensor) -> Tensor:
        """Indices (m,) of the entries of the flat ``x`` that are > bound, or no number; m depends on the data."""

    def take(self, x: Tensor, indices: Tensor) -> Tensor: ...
    def concat(self, parts: Sequence[Tensor]) -> Tensor:
        """Flat tensors, one after the other."""

    def split(self, x: Tensor, sizes: Sequence[int]) -> Sequence[Tensor]:
        """The flat ``x`` in parts of these sizes, which add up to its own."""

    def scatter(self, length: int, indices: Tensor, values: Tensor) -> Tensor:
        """A flat tensor of zeros into which values are added (an index may occur several times)."""

    def matmul(self, a: Tensor, b: Tensor, *, transpose_a: bool = False, transpose_b: bool = False) -> Tensor: ...
    def minus_product(self, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """x - a b^T, which may take the place of ``x``."""

    def orthonormal(self, x: Tensor) -> Tensor:
        """An orthonormal basis of the column space of ``x`` (QR). What ranks compute after an exchange must have the
        same bits on all: this, ``matmul`` over a short axis, ``sum_of_squares`` and ``scatter`` know no threads."""

    def clip(self, x: Tensor, limit: float) -> Tensor:
        """Entries of ``x`` limited to [-limit, limit]."""

    def round(self, x: Tensor) -> Tensor:
        """Round to the nearest whole number, halves to the even one."""

    def where(self, condition: Tensor, a: Tensor | float, b: Tensor | float) -> Tensor:
        """Entries of ``a`` where the condition holds, else of ``b``; one of them may be a number."""

    def sum(self, x: Tensor, axis: int) -> Tensor:
        """The sum over one axis."""

    def max(self, x: Tensor) -> Tensor:
        """The largest entry, a tensor of shape ()."""

    def to_bytes(self, x: Tensor) -> Tensor:
        """The flat ``x`` as (bytes,) uint8, in this machine's byte order."""

    def from_bytes(self, x: Tensor, dtype: str) -> Tensor: ...

    def nbytes(self, x: Tensor) -> Tensor:
        """A number or a tensor of shape (): the size may depend on the data."""

    def stack(self, parts: Sequence[Tensor]) -> Tensor:
        """Tensors of shape () -> (len(parts),)."""

    def sum_of_squares(self, x: Tensor) -> Tensor: ...
    def cross_entropy(self, logits: Tensor, labels: Tensor, present: Tensor | None = None) -> Tensor:
        """The cross-entropy of each label: logits (n, ..., C), labels (n, ...) -> (n, ...).

        Where ``present`` (n, ...) is 0 there is no label, and the result is not asked for.
        """

    def stop_gradient(self, x: Tensor) -> Tensor:
        """The same numbers, through which no gradient goes."""

    def softplus(self, x: Tensor) -> Tensor:
        """log(1 + e^x)."""

    def sigmoid(self, x: Tensor) -> Tensor: ...
    def argmax(self, x: Tensor) -> Tensor:
        """(..., C) -> (...) int64: the place of the largest entry of the last axis."""

    def take_last(self, x: Tensor, indices: Tensor) -> Tensor:
        """(..., C) and (...) -> (...): an entry of the last axis."""

    def row_means(self, x: Tensor) -> Tensor:
        """(n, ...) -> (n,): the mean of each row."""

    def dot(self, a: Tensor, b: Tensor) -> Tensor:
        """(n,) and (n,) -> (): the sum of the products."""

    def all_finite(self, x: Tensor) -> Tensor: ...

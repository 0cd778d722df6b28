"""Tensor operations in PyTorch."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F

from hvd_train.frontends.pytorch.library_metric import library_metric
from hvd_train.update.state import EagerCell, EagerControl

# Entries of a row, which one thread adds up, however many threads there are.
ROW = 4096
# Columns: with fewer, MKL takes up to twenty times as long for a product as for its transpose.
THIN = 32


class TorchOps(EagerControl):
    round = staticmethod(torch.round)
    where = staticmethod(torch.where)
    sum = staticmethod(torch.sum)
    dot = staticmethod(torch.dot)
    sigmoid = staticmethod(torch.sigmoid)
    stop_gradient = staticmethod(torch.detach)
    library_metric = staticmethod(library_metric)

    def __init__(self, device: torch.device) -> None:
        self.device = device
        if device.type != "cpu":
            self.block = sys.maxsize  # on a GPU each operation of each block would be a kernel launch

    def at(self, device: torch.device) -> TorchOps:
        """Return the operations on another device."""
        return self if device == self.device else TorchOps(device)

    def from_numpy(self, x) -> torch.Tensor:
        return torch.from_numpy(np.array(x)).to(self.device)

    def to_numpy(self, x) -> np.ndarray:
        return x.detach().cpu().numpy().copy()

    def cast(self, x, dtype) -> torch.Tensor:
        return torch.as_tensor(x, device=self.device).to(getattr(torch, dtype))

    def keep(self, x) -> EagerCell:
        return EagerCell(self.from_numpy(x))

    def reshape(self, x, shape) -> torch.Tensor:
        return x.reshape(tuple(shape))

    def topk(self, x, k) -> torch.Tensor:
        return torch.topk(x, k, sorted=False).indices

    def above(self, x, bound) -> torch.Tensor:
        return torch.nonzero(~(x <= bound)).flatten()

    def take(self, x, indices) -> torch.Tensor:
        return x[indices]

    def concat(self, parts, axis=0) -> torch.Tensor:
        return torch.cat(list(parts), axis)

    def split(self, x, sizes) -> Sequence[torch.Tensor]:
        return torch.split(x, list(sizes))

    def scatter(self, length, indices, values, *, same_bits=True) -> torch.Tensor:
        zeros = torch.zeros(length, dtype=values.dtype, device=values.device)
        if same_bits and values.is_cuda:
            # It sorts. On a GPU the order of index_add_ varies: with three ranks sending an entry, their weights
            # diverged.
            return zeros.index_put_((indices,), values, accumulate=True)
        return zeros.index_add_(0, indices, values)

    def matmul(self, a, b, *, transpose_a=False, transpose_b=False) -> torch.Tensor:
        a, b = (a.T if transpose_a else a), (b.T if transpose_b else b)
        if b.shape[1] < THIN:
            # (A B)^T = B^T A^T.
            return (b.T @ a.T).T.contiguous()
        return a @ b

    def minus_product(self, x, a, b) -> torch.Tensor:
        return x.addmm_(a, b.T, alpha=-1)

    def orthonormal(self, x) -> torch.Tensor:
        threads = torch.get_num_threads()
        # LAPACK's bits depend on the number of threads, and all ranks must compute the same basis.
        torch.set_num_threads(1)
        try:
            return torch.linalg.qr(x).Q
        finally:
            torch.set_num_threads(threads)

    def move_towards(self, cells, x, share) -> None:
        torch._foreach_lerp_([cell.read() for cell in cells], list(x), share)

    def clip(self, x, limit) -> torch.Tensor:
        return torch.clamp(x, -limit, limit)

    def dtype(self, x) -> str:
        return str(x.dtype).removeprefix("torch.")

    def max(self, x, axis=None) -> torch.Tensor:
        return x.max() if axis is None else x.amax(axis)

    def add_at(self, x, start, part) -> torch.Tensor:
        x[start : start + len(part)] += part
        return x

    def to_bytes(self, x) -> torch.Tensor:
        return x.view(torch.uint8)

    def from_bytes(self, x, dtype) -> torch.Tensor:
        return x.view(getattr(torch, dtype))

    def nbytes(self, x) -> int:
        return x.numel() * x.element_size()

    def stack(self, parts) -> torch.Tensor:
        return torch.stack([torch.as_tensor(x, device=self.device) for x in parts])

    def cross_entropy(self, logits, labels, present=None) -> torch.Tensor:
        rows, flat = logits.flatten(0, -2), labels.flatten()
        if present is None or rows.is_cuda:  # to count the labels would wait for a GPU
            losses = F.cross_entropy(rows, flat, reduction="none")
        else:  # BERT's logits are large, and one token in seven has a label
            there = present.flatten().nonzero().flatten()
            some = F.cross_entropy(rows.index_select(0, there), flat[there], reduction="none")
            losses = torch.zeros_like(flat, dtype=some.dtype).index_copy(0, there, some)
        return losses if labels.dim() == 1 else losses.view(labels.shape)

    def softplus(self, x) -> torch.Tensor:
        return torch.logaddexp(x, torch.zeros_like(x))  # torch's softplus returns x from 20 on

    def argmax(self, x) -> torch.Tensor:
        return x.argmax(-1)

    def take_last(self, x, indices) -> torch.Tensor:
        return x.gather(-1, indices.unsqueeze(-1)).squeeze(-1)

    def row_means(self, x) -> torch.Tensor:
        return x.reshape(len(x), -1).mean(1)

    def sum_of_squares(self, x) -> torch.Tensor:
        """Add up rows of ``ROW`` entries, then their sums: torch splits one long sum among threads, but not a row."""
        x = x.reshape(-1).pow(2)
        while len(x) > ROW:
            # Add the remaining entries, fewer than ROW.
            whole = len(x) // ROW * ROW
            x = torch.cat([x[:whole].view(-1, ROW).sum(1), x[whole:].sum(0, keepdim=True)])
        return x.sum()

    def all_finite(self, x) -> bool:
        return torch.isfinite(x).all()

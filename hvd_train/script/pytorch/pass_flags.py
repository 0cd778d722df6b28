"""Flags that are summed over ranks together with the gradients of a backward pass."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch

# Indices after the flags of the parameters.
NONFINITE = 0  # a gradient that would be compressed is not finite
LATE = 1  # a gradient came after its bucket had been sent
FAILED = 2  # an error ended the backward pass
CHECK = 3  # a comparison of weights is requested
LENGTHS = 4  # in the next exchange, the batch may have to be found by the lengths of inputs
BUFFERS = 5  # and following: a buffer has changed


class PassSummary(NamedTuple):
    """Sums of all ranks' flags, divided by the number of ranks."""

    nonfinite: float
    late: float
    failed: float
    check: float
    lengths: float
    buffers: list[float]


class PassFlags:
    """A flag for each parameter, whether this rank has its gradient, then the flags of the whole pass."""

    def __init__(self, parameters: int, buffers: int, like: torch.Tensor) -> None:
        self._count = parameters
        # (parameters + BUFFERS + buffers,)
        self.tensor = torch.zeros(parameters + BUFFERS + buffers, dtype=like.dtype, device=like.device)

    def write(
        self,
        missing: Sequence[int],
        late: bool,
        failed: bool,
        check: bool,
        lengths: bool,
        buffers: Collection[float],
    ) -> None:
        """Set the flags. ``missing``: indices of the parameters without a gradient."""
        self.tensor.zero_()
        self.tensor[: self._count] = 1
        if missing:
            self.tensor[missing] = 0
        if late or failed or check or lengths or any(buffers):
            self.tensor[self._count :] = torch.tensor([0.0, late, failed, check, lengths, *buffers])

    def mark_nonfinite(self, sent: torch.Tensor, value: float) -> None:
        """Set the flag in ``sent``, the copy in the bucket."""
        sent[self._count + NONFINITE] = value

    def summary(self, sums: torch.Tensor) -> PassSummary:
        """Read the flags of the whole pass. On a GPU this waits for its queued work."""
        nonfinite, late, failed, check, lengths, *buffers = sums[self._count :].tolist()
        return PassSummary(nonfinite, late, failed, check, lengths, buffers)

    def absent_everywhere(self, sums: torch.Tensor, missing: Sequence[int]) -> list[int]:
        """Return those of ``missing`` without a gradient on any rank."""
        if not missing:
            return []
        present = (sums[: self._count] != 0).tolist()
        return [k for k in missing if not present[k]]

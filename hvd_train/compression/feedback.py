"""Error feedback (Seide et al. 2014): the compression error of a step is added to the next gradient."""

from __future__ import annotations

import numpy as np

from hvd_train.protocol import Ops, Rounds, State, Tensor, Wire


class ErrorFeedback:
    """A compressor of flat buckets with error feedback; a subclass encodes and decodes."""

    per_tensor = False

    def init_state(self, shape: tuple[int, ...], dtype: str) -> tuple[np.ndarray, ...]:
        return (np.zeros(shape, dtype),)

    def encode(self, total: Tensor, ops: Ops) -> tuple[Wire, Tensor]:
        """Encode total (n,); return (what to send, this rank's part as all ranks will decode it (n,))."""
        raise NotImplementedError

    def decode(self, reduced: tuple[Tensor, ...], total: Tensor, ops: Ops) -> Tensor:
        """Decode the received tensors to the sum over ranks (n,), in the type of ``total``."""
        raise NotImplementedError

    def rounds(self, gradient: Tensor, state: State, ops: Ops) -> Rounds:
        (residual,) = state
        total = gradient + residual
        wire, local = self.encode(total, ops)
        reduced = yield wire
        return self.decode(reduced, total, ops), (total - local,)

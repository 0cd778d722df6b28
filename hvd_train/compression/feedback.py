"""Error feedback (Seide et al. 2014): what a step leaves out is kept and added to the next gradient."""

from __future__ import annotations

import numpy as np

from hvd_train.protocol import Ops, Rounds, State, Tensor, Wire


class ErrorFeedback:
    """One exchange of a flat bucket; a subclass says what travels and how it is read."""

    per_tensor = False

    def init_state(self, shape: tuple[int, ...], dtype: str) -> tuple[np.ndarray, ...]:
        return (np.zeros(shape, dtype),)

    def encode(self, total: Tensor, ops: Ops) -> tuple[Wire, Tensor]:
        """total (n,) -> (what travels, this rank's part as all will decode it (n,))."""
        raise NotImplementedError

    def decode(self, reduced: tuple[Tensor, ...], total: Tensor, ops: Ops) -> Tensor:
        """Return the sum over ranks (n,) from the received tensors, in the type of ``total``."""
        raise NotImplementedError

    def rounds(self, gradient: Tensor, state: State, ops: Ops) -> Rounds:
        (residual,) = state
        total = gradient + residual
        wire, local = self.encode(total, ops)
        reduced = yield wire
        return self.decode(reduced, total, ops), (total - local,)

"""Steps with non-finite gradients: skip them (``on_nonfinite: skip``), or lower the loss scale."""

from __future__ import annotations

from typing import Any

import numpy as np

from hvd_train.checkpoint.manifest import Progress
from hvd_train.core.agreement import NONFINITE_FIX
from hvd_train.core.loss_scale import next_scale
from hvd_train.errors import NonFiniteError
from hvd_train.protocol import TracksStatistics, Tree
from hvd_train.run_folder.log import NullLog, RunLog

MOST_IN_A_ROW = 10  # limit of skipped steps in a row, and of rollbacks to one checkpoint


class Skips:
    """Skips steps on all ranks together. ``scaled``: 16-bit training, where ``rescale`` reports them."""

    def __init__(self, model: TracksStatistics, log: RunLog | NullLog, scaled: bool) -> None:
        self._model, self._log, self._scaled = model, log, scaled
        self._kept: Tree = {}
        self._in_a_row = 0

    def begin(self) -> None:
        """Save what even a skipped step changes. Called before the step."""
        self._kept = self._model.running_statistics()

    def left_out(self, p: Progress, finite: bool, sums: list[Any]) -> bool:
        """Return whether the step was skipped and undone. ``sums``: this rank's, of each micro-batch."""
        if finite:
            self._in_a_row = 0
            return False
        # Weights and optimizer state are unchanged, but the forward pass has updated the running statistics, perhaps to
        # NaN.
        self._model.load(self._kept)
        finite_sums = all(np.isfinite(self._model.ops.to_numpy(x)).all() for x in sums)
        parts = self._model.groups.world.allgather_bytes(bytes([finite_sums]), "finite")
        ranks = [rank for rank, part in enumerate(parts) if not part[0]]
        what = f"the training loss of rank {', '.join(map(str, ranks))} is" if ranks else "a gradient is"
        # Overflows only mean that the loss scale is still too high, which corrects itself.
        self._in_a_row += not self._scaled or bool(ranks)
        if self._in_a_row == MOST_IN_A_ROW:
            what = f"{what} not finite, for {MOST_IN_A_ROW} steps in a row"
            raise NonFiniteError(what, where=f"step {p.step}", fix=NONFINITE_FIX, common=True, ranks=ranks)
        if not self._scaled:
            p.skipped += 1
            self._log.notice("steps not finite", f"step {p.step}: {what} not finite, nothing was changed")
        return True


def rescale(p: Progress, finite: bool, log: RunLog | NullLog) -> None:
    """Update the loss scale after a 16-bit step. Raises NonFiniteError if no scale is small enough."""
    p.loss_scale, p.good_steps = next_scale(p.loss_scale, p.good_steps, finite)
    if finite:
        return
    p.skipped += 1
    if p.loss_scale < 1:
        what = "the gradients overflow in 16 bits, however small the loss is scaled"
        raise NonFiniteError(what, where=f"step {p.step}", fix="set precision: bf16-mixed or 32", common=True)
    what = f"step {p.step}: a gradient overflowed, nothing was changed; loss scale {p.loss_scale:g}"
    log.notice("gradients overflowed", what)

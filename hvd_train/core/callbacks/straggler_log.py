"""Slow ranks in the log: a message when one is found, a row and a note with each epoch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from hvd_train.core.straggler import look_at
from hvd_train.core.training import Training


def watch_stragglers(trainer: Training, windows: Sequence[list[Any]]) -> None:
    """Look for a slow rank, and report it the first time. ``windows``: of all ranks (``TimeAccount.window``)."""
    step = trainer.progress.step
    # Pipeline stages wait for one another in each step.
    if not trainer.groups.links and look_at(trainer.stragglers, step, windows):
        trainer.log.message(f"step {step}: {trainer.stragglers.slow_rank}")
        log_straggler(trainer, trainer.progress.epoch)


def log_straggler(trainer: Training, epoch: int) -> str:
    """Log the slow rank, if there is one; return the note for the epoch's row."""
    straggler = trainer.stragglers.slow_rank
    if straggler is None:
        return ""
    trainer.log.straggler(epoch, trainer.progress.step, asdict(straggler))
    return f"rank {straggler.rank} is slow: {100 * straggler.share:.0f} %"

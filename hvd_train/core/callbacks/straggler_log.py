"""Slow ranks in the log: a message when one is found, a row and a note with each epoch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from hvd_train.core.training import Training


def watch_stragglers(trainer: Training, waited: Sequence[float]) -> None:
    """Look for a slow rank, and report it the first time. ``waited``: seconds of each rank in transfers so far."""
    step = trainer.progress.step
    # Pipeline stages wait for one another in each step.
    if len(waited) > 1 and not trainer.groups.links and trainer.stragglers.look(step, waited):
        trainer.log.message(f"step {step}: {trainer.stragglers.slow_rank}")
        log_straggler(trainer, trainer.progress.epoch)


def log_straggler(trainer: Training, epoch: int) -> str:
    """Log the slow rank, if there is one; return the note for the epoch's row."""
    straggler = trainer.stragglers.slow_rank
    if straggler is None:
        return ""
    trainer.log.straggler(epoch, trainer.progress.step, asdict(straggler))
    return f"rank {straggler.rank} is slow: {straggler.share:.0%}"

"""Hooks: objects that the training loop calls. Built-in hooks and the user's are called alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from hvd_train.config.user_code import user_place
from hvd_train.core.step_actions import StepActions
from hvd_train.core.training import Training
from hvd_train.data.loader import Step
from hvd_train.errors import ConfigError, TrainError, named_reason


@dataclass(frozen=True)
class StepInfo:
    """A finished step; its number is ``trainer.progress.step``.

    batch: this rank's micro-batches and the number of samples of all ranks. learning_rate: of this step. local_sums:
    this rank's sums of each micro-batch, on the device; reading a value blocks until the step has run, and in
    TensorFlow cuts a call of several steps short. local_counts: (losses,), the divisor of each loss, or None for the
    number of samples. seconds: since the previous step, without hooks. due: the actions after it.
    """

    batch: Step
    learning_rate: float
    local_sums: Sequence[Any]
    local_counts: np.ndarray | None
    seconds: float
    due: StepActions

    @property
    def log_due(self) -> bool:
        """Return whether a log line is written after this step."""
        return self.due.log

    @property
    def check_due(self) -> bool:
        """Return whether the ranks compare their weights after this step."""
        return self.due.check


@dataclass(frozen=True)
class Epoch:
    """An epoch that ended, or was interrupted (``complete`` False).

    number: from 0. metrics: train_NAME of each metric and, if evaluated, val_NAME and val_samples, equal on all ranks.
    learning_rate: of its last step. seconds, samples: duration in this process, and number of samples of all ranks.
    """

    number: int
    complete: bool
    metrics: Mapping[str, float]
    learning_rate: float
    seconds: float
    samples: int


class Hook:
    """Base class of hooks. ``trainer`` has ``config``, ``progress``, ``frontend`` (with its ``model``),
    ``communicator`` (``rank``, ``size``), ``log.message(text)``, ``samples_per_second()`` and ``stop(why)``.

    An exception in a hook ends the job on all ranks.
    """

    def on_start(self, trainer: Training) -> None:
        """Called before the first step, with the weights that all ranks share."""

    def on_step(self, trainer: Training, info: StepInfo) -> None:
        """Called after each optimizer step."""

    def on_step_end(self, trainer: Training, info: StepInfo) -> None:
        """Called after ``on_step`` of all hooks. Built-in hooks sync ranks, save and leave here."""

    def on_epoch(self, trainer: Training, epoch: Epoch) -> None:
        """Called after each epoch and its evaluation, before its checkpoint."""

    def on_epoch_end(self, trainer: Training, epoch: Epoch) -> None:
        """Called after ``on_epoch`` of all hooks, and after the evaluation if one of them ended the run."""

    def on_checkpoint(self, trainer: Training, path: Path) -> None:
        """Called once rank 0 has written the checkpoint ``path``, some steps after the checkpoint's step.

        Called before the next save, and not for a checkpoint that was removed again because it is none of the k best.
        """

    def on_end(self, trainer: Training, summary: Mapping[str, Any]) -> None:
        """Called when training has ended."""


EVENTS = ("on_start", "on_step", "on_step_end", "on_epoch", "on_epoch_end", "on_checkpoint", "on_end")


def unknown_events(hook: Hook) -> list[str]:
    """Return a line for each method that looks like an event but is none, such as another library's."""
    names = [name for name in dir(type(hook)) if name.startswith("on_") and name not in EVENTS]
    called = f"is never called: the events are {', '.join(EVENTS)}"
    return [f"{type(hook).__name__}.{name} {called}" for name in names if callable(getattr(hook, name))]


class HookCalls:
    """Calls the hooks at each event: ``first``, then the user's, then ``last``."""

    def __init__(self, first: Sequence[Hook], user: Sequence[Hook], last: Sequence[Hook]) -> None:
        def overriding(hooks: Sequence[Hook], event: str) -> list[Any]:
            return [getattr(hook, event) for hook in hooks if getattr(type(hook), event) is not getattr(Hook, event)]

        # Looked up once, because a step of a small model takes only a millisecond. A user's method is looked up at each
        # call, because it may be a changing attribute.
        self._calls = {
            event: [
                *overriding(first, event),
                *(partial(_guarded, hook, event) for hook in user),
                *overriding(last, event),
            ]
            for event in EVENTS
        }

    def call(self, event: str, trainer: Training, *args: Any) -> None:
        for call in self._calls[event]:
            call(trainer, *args)


def _guarded(hook: Hook, event: str, *args: Any) -> None:
    """Call a user's hook. An exception becomes an error line that names the hook."""
    try:
        getattr(hook, event)(*args)
    except TrainError:
        raise
    except Exception as error:
        what = f"{type(hook).__name__}.{event} raised {named_reason(error)}"
        raise ConfigError(what, where=user_place(error), fix="mend the hook") from error

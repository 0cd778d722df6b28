"""Hooks: objects that are called while the loop trains. The built-in ones and the user's are called alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from hvd_train.config.user_code import user_place
from hvd_train.core.due import Due
from hvd_train.core.training import Training
from hvd_train.data.loader import Step
from hvd_train.errors import ConfigError, TrainError, named_reason


@dataclass(frozen=True)
class StepInfo:
    """A step that was made; its number is ``trainer.progress.step``.

    batch: this rank's micro-batches and the number of samples of all ranks. learning_rate: the rate it was made with.
    local_sums: this rank's sums of each micro-batch, on the device; reading a value blocks until the step has run, and
    in TensorFlow ends the call of several steps early. local_counts: (losses,) by which each loss is divided, None
    where that is the number of samples. seconds: since the step before, without the time of hooks. due: what follows.
    """

    batch: Step
    learning_rate: float
    local_sums: Sequence[Any]
    local_counts: np.ndarray | None
    seconds: float
    due: Due

    @property
    def log_due(self) -> bool:
        """Return whether a line of the log is written after this step."""
        return self.due.log

    @property
    def check_due(self) -> bool:
        """Return whether the ranks compare their weights after this step."""
        return self.due.check


@dataclass(frozen=True)
class Epoch:
    """An epoch that ended, or was left (``complete`` False).

    number: from 0. metrics: train_NAME of each metric of the task and, where it was evaluated, val_NAME and
    val_samples, equal on all ranks. learning_rate: of its last step. seconds, samples: how long this process trained
    in it, and on how many samples of all ranks.
    """

    number: int
    complete: bool
    metrics: Mapping[str, float]
    learning_rate: float
    seconds: float
    samples: int


class Hook:
    """Override what you need; ``trainer`` has ``config``, ``progress``, ``frontend`` (with its ``model``),
    ``communicator`` (``rank``, ``size``), ``log.message(text)``, ``samples_per_second()`` and ``stop(why)``.

    An exception in a hook ends the job on all ranks.
    """

    def on_start(self, trainer: Training) -> None:
        """Called before the first step, with the weights that all ranks share."""

    def on_step(self, trainer: Training, info: StepInfo) -> None:
        """Called after each optimizer step."""

    def on_step_end(self, trainer: Training, info: StepInfo) -> None:
        """Called when ``on_step`` of all hooks has been called: the built-in ones sync ranks, save and leave here."""

    def on_epoch(self, trainer: Training, epoch: Epoch) -> None:
        """Called after each epoch and its evaluation, before its checkpoint."""

    def on_epoch_end(self, trainer: Training, epoch: Epoch) -> None:
        """Called when ``on_epoch`` of all hooks has been called; where they ended the run, it has been evaluated."""

    def on_checkpoint(self, trainer: Training, path: Path) -> None:
        """Called when rank 0 has written the checkpoint ``path``, some steps after its own.

        It comes before the next one, and not for one that is gone again, as it was none of the k best.
        """

    def on_end(self, trainer: Training, summary: Mapping[str, Any]) -> None:
        """Called when training has come to its end."""


EVENTS = ("on_start", "on_step", "on_step_end", "on_epoch", "on_epoch_end", "on_checkpoint", "on_end")


def unknown_events(hook: Hook) -> list[str]:
    """Return a line for each method that is named as an event and is not one, as those of other libraries."""
    names = [name for name in dir(type(hook)) if name.startswith("on_") and name not in EVENTS]
    called = f"is never called: the events are {', '.join(EVENTS)}"
    return [f"{type(hook).__name__}.{name} {called}" for name in names if callable(getattr(hook, name))]


class HookCalls:
    """The calls of each event, in the order of the hooks: ``first``, the user's, ``last``."""

    def __init__(self, first: Sequence[Hook], user: Sequence[Hook], last: Sequence[Hook]) -> None:
        def overriding(hooks: Sequence[Hook], event: str) -> list[Any]:
            return [getattr(hook, event) for hook in hooks if getattr(type(hook), event) is not getattr(Hook, event)]

        # Looked up once: a step of a small model takes a millisecond. A user's method is looked up at each call, as
        # it may be an attribute of the object that changes.
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
    """Call a user's hook; an exception becomes one line that names the hook."""
    try:
        getattr(hook, event)(*args)
    except TrainError:
        raise
    except Exception as error:
        what = f"{type(hook).__name__}.{event} raised {named_reason(error)}"
        raise ConfigError(what, where=user_place(error), fix="mend the hook") from error

"""Callbacks of ``fit``, ``evaluate`` and ``predict`` on several ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras

from hvd_train.data.order import mix
from hvd_train.script.keras.data.epochs import Epochs
from hvd_train.script.keras.data.leaves import kind_of
from hvd_train.script.keras.model_state import to_numpy

WRITERS = (
    keras.callbacks.ModelCheckpoint,
    keras.callbacks.BackupAndRestore,
    keras.callbacks.CSVLogger,
    keras.callbacks.TensorBoard,
    keras.callbacks.RemoteMonitor,
    keras.callbacks.ProgbarLogger,
    *filter(None, [getattr(keras.callbacks, "OrbaxCheckpoint", None)]),  # since Keras 3.12
)


def flat(callbacks: Any) -> list[Any]:
    """Return the callbacks that a script passes, also in a ``CallbackList``, as a list."""
    inner = callbacks.callbacks if isinstance(callbacks, keras.callbacks.CallbackList) else callbacks
    return keras.tree.flatten(inner or [])


def callbacks_of(callbacks: Any, main: bool, last: Any = None) -> Any:
    """Append ``last`` to the user's callbacks; unless ``main``, drop those that write files or to the screen."""
    chosen = [c for c in flat(callbacks) if main or not isinstance(c, WRITERS)]
    return [*last.first, *chosen, last] if last else chosen


class StepCount(keras.callbacks.Callback):
    """Corrects ``optimizer.iterations`` at the end of an epoch.

    Where Keras does not know the number of batches, it finds the end of the data within a step, which the optimizer has
    already counted. In one process the number is known; for a rank's part of some data sets it is not.
    """

    _before = _steps = 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._before, self._steps = self._counted(), 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._steps = batch + 1

    def on_test_begin(self, logs: Any = None) -> None:
        self._take_back()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._take_back()

    def _take_back(self) -> None:
        if self._counted() == self._before + self._steps + 1:
            self.model.optimizer._iterations.assign(self._before + self._steps)

    def _counted(self) -> int:
        optimizer = self.model.optimizer  # of a model that trains itself there may be none
        return int(to_numpy(optimizer._iterations)) if isinstance(optimizer, keras.optimizers.Optimizer) else -1


class SyncCallback(keras.callbacks.Callback):
    """The last callback: applies changes that other callbacks made on one rank to all ranks, or to none."""

    def __init__(self, fit: Any, parts: Any) -> None:
        super().__init__()
        self._fit, self._parts, self._epoch, self._batch = fit, parts, 0, -1
        self.first = [StepCount()] if getattr(parts, "overruns", False) else []

    def on_train_begin(self, logs: Any = None) -> None:
        self._fit.reduction.stop.assign(0.0)
        self._fit.reduction.stopped.assign(0.0)
        self._fit.begin()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch, self._batch = epoch, -1
        self._fit.pause()  # an evaluation came before this
        self._fit.begin_epoch()
        self._fit.resume()
        if isinstance(self._parts, Epochs):
            self._parts.begin(epoch)
        self._number(epoch)

    def on_test_begin(self, logs: Any = None) -> None:
        self._fit.evaluates()

    def on_test_end(self, logs: Any = None) -> None:
        self._fit.resume()

    def _number(self, epoch: int) -> None:
        """Number the next pass over a DataLoader: with ``steps_per_epoch`` Keras begins it an epoch early."""
        if kind_of(self._parts) == "loader" and self._fit.shard:
            self._parts.share.renumber(mix(self._fit.patches.fits, epoch))

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Send this rank's request to stop with the next step. Ranks must stop together, or the others would wait."""
        if float(to_numpy(self._fit.reduction.stopped)) > 0:
            self.model.stop_training = True
        elif self.model.stop_training:
            self._fit.reduction.stop.assign(1.0)
            self.model.stop_training = False
        # From the first batch on: with ``steps_per_epoch`` Keras may begin the next pass in this epoch.
        if self._batch < 0:
            self._number(self._epoch + 1)
        # With steps_per_execution Keras calls this once for several batches.
        steps, self._batch = batch - self._batch, batch
        self._fit.dataset_steps += steps
        self._fit.trained(steps, "model.fit")

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        # Include a request after which no step was made.
        requested = self.model.stop_training or float(to_numpy(self._fit.reduction.stop)) > 0
        self.model.stop_training = self._fit.stops(requested)
        self._fit.compare(f"model.fit, epoch {epoch + 1}")
        self._fit.gathering = True


def within_slot(slot: Any, model: Any, make: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``make_train_function`` so that the watchdog treats a whole step as one exchange."""

    def made(force: bool = False) -> Any:
        before = model.train_function
        make(force=force)
        step = model.train_function
        if step is not before:

            def entered(*args: Any) -> Any:
                with slot:
                    return step(*args)

            model.train_function = entered
        return model.train_function

    return made

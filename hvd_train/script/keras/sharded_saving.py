"""Save a model with sharded optimizers: the ranks send their parts of the slots, and rank 0 writes whole ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras

from hvd_train.errors import ConfigError
from hvd_train.protocol import Communicator
from hvd_train.script.keras.callbacks import flat
from hvd_train.script.keras.patches import Patches
from hvd_train.script.keras.sharded import ShardedUpdate

SAVE, END = b"save", b"end"  # messages of rank 0 to the others


class SharedSaving:
    """A model's ``save`` and ``save_weights``, with whole slots: rank 0 writes, and all ranks call them."""

    def __init__(self, model: Any, updates: Sequence[ShardedUpdate], world: Communicator, patches: Patches) -> None:
        self._updates, self._world, self.in_turn = updates, world, False
        for name in ("save", "save_weights"):
            patches.put(model, name, self._collected(getattr(model, name)))

    def hold(self) -> None:
        """Send this rank's parts to rank 0."""
        for update in self._updates:
            update.hold()
            update.release()

    def _collected(self, save: Callable) -> Callable:
        def collected(*args: Any, **kwargs: Any) -> Any:
            if self.in_turn:
                self._world.broadcast_bytes(SAVE)
            try:
                for update in self._updates:
                    update.hold()
                return save(*args, **kwargs)
            finally:
                for update in self._updates:
                    update.release()

        return collected

    def turns(self, callbacks: Any) -> list[Any]:
        """Wrap callbacks that save models, so that all ranks take part."""
        chosen = flat(callbacks)
        if any(type(c).__name__ == "OrbaxCheckpoint" for c in chosen):
            what = "OrbaxCheckpoint would save only this rank's part of a sharded optimizer's state"
            raise ConfigError(what, where="model.fit", fix="use keras.callbacks.ModelCheckpoint", common=True)
        savers = (keras.callbacks.ModelCheckpoint, keras.callbacks.BackupAndRestore)
        return [SavingTurn(c, self._world, self) if isinstance(c, savers) else c for c in chosen]


class SavingTurn(keras.callbacks.Callback):
    """A callback that saves on rank 0; whenever it does, the others send their parts of the slots."""

    def __init__(self, saver: Any, world: Communicator, state: SharedSaving) -> None:
        super().__init__()
        self._saver, self._world, self._state = saver, world, state

    def on_train_begin(self, logs: Any = None) -> None:
        self._turn("on_train_begin", logs)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._turn("on_epoch_begin", epoch, logs)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if getattr(self._saver, "save_freq", "epoch") != "epoch":
            self._turn("on_train_batch_end", batch, logs)
        elif not self._world.rank:  # it does not save now
            self._saver.on_train_batch_end(batch, logs)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._turn("on_epoch_end", epoch, logs)

    def on_train_end(self, logs: Any = None) -> None:
        self._turn("on_train_end", logs)

    def set_params(self, params: Any) -> None:
        self._saver.set_params(params)

    def set_model(self, model: Any) -> None:
        self._saver.set_model(model)

    def _turn(self, name: str, *args: Any) -> None:
        if self._world.rank:
            while self._world.broadcast_bytes(b"") == SAVE:
                self._state.hold()
            return
        self._state.in_turn = True
        try:
            getattr(self._saver, name)(*args)
        finally:
            self._state.in_turn = False
            self._world.broadcast_bytes(END)

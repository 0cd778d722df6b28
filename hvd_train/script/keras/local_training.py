"""Local training of a Keras model: ``hk.distribute(model, mode="outer")`` or ``"streaming"``.

The ranks synchronize after a number of steps, and at the end of each epoch of ``fit`` and each pass over ``hk.shard``.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import keras

from hvd_train.config import ExchangeConfig
from hvd_train.config.conflicts import EMA, LOSS_SCALE, LR_SCALING, SHARDED
from hvd_train.errors import ConfigError, amount
from hvd_train.protocol import Communicator
from hvd_train.script.keras.callbacks import flat
from hvd_train.script.keras.gradients import WIRE, Reduction
from hvd_train.script.keras.local_backup import LocalBackup
from hvd_train.script.keras.model_state import SEED, buffers_of, to_numpy
from hvd_train.script.keras.patches import SAVING, Patches
from hvd_train.script.shared.local_training import LocalTraining, ScriptWeights, Variable, check_mode, named


class LocalReduction(Reduction):
    """A reduction that leaves gradients and losses local. ``begin``: called before an eager step."""

    begin: Callable[[], None] = staticmethod(lambda: None)

    def __call__(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        if self._backend.eager():
            self.begin()
        for v in variables:
            self._position(v)  # raises ConfigError for a variable unknown to hk.distribute
        return self._backend.dense(list(gradients))

    def whole(self, value: Any, weight: Any = None) -> Any:
        return value


class LocalModel(LocalTraining):
    """A model and its optimizer in local training. It evaluates, predicts and saves with the global weights."""

    def __init__(
        self,
        model: Any,
        optimizer: Any,
        options: ExchangeConfig,
        communicator: Communicator,
        backend: Any,
        reduction: Reduction,
        where: str,
    ) -> None:
        self._optimizer, self._reduction = optimizer, reduction
        wrong = [v for v in model.trainable_variables if keras.backend.standardize_dtype(v.dtype) not in WIRE]
        if wrong:
            what = f"{wrong[0].path}: {wrong[0].dtype} cannot be exchanged"
            raise ConfigError(what, where=where, fix="keep weights in float32, as mixed_bfloat16 does", common=True)
        # By number: Keras numbers layers across all models of a process, so names may differ.
        variables = [
            Variable(f"{k}.{v.name}", partial(_tensor, v), v.assign) for k, v in enumerate(model.trainable_variables)
        ]
        packing = backend.packing(communicator)
        weights = ScriptWeights(
            variables, backend.ops, packing, named(communicator, reduction.number), backend.in_background
        )
        statistics = [
            Variable(str(k), partial(_copy, backend.ops, v), partial(_assign, backend.ops, v))
            for k, v in enumerate(statistics_of(model))
        ]
        super().__init__(weights, statistics, options, communicator, where)
        reduction.begin, reduction.paused = self.begin_step, lambda: self.within  # type: ignore[attr-defined]
        self._accumulates = bool(getattr(optimizer, "gradient_accumulation_steps", None))
        self._updates = self._made()
        self._backups: list[LocalBackup] = []
        if self._updates and not communicator.rank and self.state():
            made = amount(self._updates, "step")
            what = f"the optimizer has already made {made}: the outer momentum begins with zeros"
            fix = "to resume with the same bits, use BackupAndRestore"
            warnings.warn(f"{what}; {self.where}; {fix}", stacklevel=2)

    def stepped(self, steps: int = 1) -> None:
        """Count batches of training. With gradient accumulation, a step is an update after several batches."""
        if self._accumulates:
            before, self._updates = self._updates, self._made()
            steps = self._updates - before
        super().stepped(steps)

    @contextmanager
    def global_weights(self) -> Iterator[None]:
        before = int(to_numpy(self._reduction.steps))
        with super().global_weights():
            within = self.within
            yield
        if within and int(to_numpy(self._reduction.steps)) > before:  # steps in a graph, which did not check
            raise self._step_would_be_lost()

    def begin_round(self) -> None:
        super().begin_round()
        self._updates = self._made()

    def _made(self) -> int:
        return int(to_numpy(self._optimizer.iterations))

    def _agree(self) -> None:
        self.stop_requested = float(to_numpy(self._reduction.stop)) > 0
        super()._agree()
        self._reduction.stopped.assign(float(self.stops))

    def begin_fit(self) -> None:
        """End the round that loops of the script have begun; on all ranks together."""
        diverged = bytes([self.update.diverged])
        if all(b"".join(self._communicator.allgather_bytes(diverged, "round"))):
            self.synchronize()
        self.take_global()  # on ranks that trained while another one loaded weights

    def turns(self, callbacks: Any) -> list[Any]:
        """Insert a ``LocalBackup`` after each ``BackupAndRestore`` among the callbacks of a ``fit``."""
        chosen: list[Any] = []
        for callback in flat(callbacks):
            chosen.append(callback)
            if isinstance(callback, keras.callbacks.BackupAndRestore):
                chosen.append(LocalBackup(callback, self._optimizer, self, self._communicator))
        self._backups = [c for c in chosen if isinstance(c, LocalBackup)]
        return chosen

    def restore(self) -> None:
        """Load the backups, after all ranks have rank 0's weights and slots; on all ranks together."""
        for backup in self._backups:
            backup.restore()

    def patch(self, model: Any, patches: Patches, rank: int) -> None:
        """Let methods of the model use or set the global weights. Ranks other than 0 save nothing."""
        for name in ("evaluate", "predict", *(() if rank else SAVING)):
            patches.put(model, name, self._with_global(getattr(model, name)))
        for name in ("load_weights", "set_weights"):
            patches.put(model, name, self._loading(getattr(model, name)))
        # Keep them if the model is compiled and distributed again.
        patches.on_undo(self.take_global)

    def _with_global(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **kwargs: Any) -> Any:
            self.warn_if_never_synchronized()
            with self.global_weights():
                return method(*args, **kwargs)

        return called

    def _loading(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **kwargs: Any) -> Any:
            self.check_load()
            self.take_global()  # what is not loaded must be the same on all ranks
            result = method(*args, **kwargs)
            self.begin_round()
            return result

        return called


def check_local(optimizers: Sequence[Any], mode: str, sharded: bool, lr_scaling: str, where: str) -> None:
    """Raise ConfigError where local training is impossible."""
    if len(optimizers) != 1:
        what = f"local training takes one optimizer, and there are {len(optimizers)}"
        fix = "leave mode out, or train with one optimizer"
        raise ConfigError(what, where=f"{where}(mode=...)", fix=fix)
    (optimizer,) = optimizers
    options = {SHARDED: "sharded=True" * sharded, LR_SCALING: "lr_scaling" * (lr_scaling != "none")}
    options[EMA] = "use_ema" * getattr(optimizer, "use_ema", False)
    options[LOSS_SCALE] = "LossScaleOptimizer" * isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    check_mode(mode, options, where)


def statistics_of(model: Any) -> list[Any]:
    """Return the float variables that layers update in training, without frozen weights."""
    layers = {id(v): v for layer in model._flatten_layers() for v in layer._non_trainable_variables}
    gathered = [v for v in layers.values() if "float" in v.dtype and not v.path.endswith(SEED)]
    return [*gathered, *(b for b in buffers_of(model) if "float" in b.dtype)]


def _tensor(variable: Any) -> Any:
    return keras.ops.stop_gradient(keras.ops.convert_to_tensor(variable))


def _copy(ops: Any, variable: Any) -> Any:
    return ops.from_numpy(to_numpy(variable))


def _assign(ops: Any, variable: Any, x: Any) -> None:
    variable.assign(ops.to_numpy(x))

"""Keep a model's variables equal on all ranks: first rank 0's, later means of what each rank gathers."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import keras
import numpy as np

from hvd_train.core.reductions import differing, mean
from hvd_train.protocol import Communicator, Ops
from hvd_train.script.keras.layers import LayerStates
from hvd_train.script.keras.patches import optimizers_of
from hvd_train.script.shared.broadcast import broadcast_parts

SEED = "seed_generator_state"


class ModelState:
    """This rank's variables of ``model`` and its optimizers, and buffers of PyTorch modules in it."""

    def __init__(self, model: Any, world: Communicator, ops: Ops) -> None:
        self._model, self._world, self._ops = model, world, ops
        self._layers = LayerStates(model, world)
        self.sharded: list[Any] = []  # ShardedUpdate of optimizers

    def take_from_rank_0(self) -> None:
        """Give every rank rank 0's weights, statistics, optimizer slots and first epoch.

        Random generators start from rank 0's seed plus the rank: masks differ, and repeat from run to run.
        """
        slots = [v for optimizer in optimizers_of(self._model) for v in optimizer.variables]
        unique = {id(v): v for v in [*self._model.variables, *slots, *buffers_of(self._model)]}
        for key in (key for update in self.sharded for key in update.slots):
            unique.pop(key, None)  # each rank has a different piece
        head, arrays = self._of_rank_0(unique.values(), {"epoch": self._model._initial_epoch})
        self._model._initial_epoch = head["epoch"]
        for v, array in zip(unique.values(), arrays, strict=True):
            if v.path.endswith(SEED):
                # The golden ratio of 2^32: seeds of neighbouring ranks are far apart.
                seed = (int(array[0]) + self._world.rank * 0x9E3779B9) % (1 << 32)
                array[0] = np.uint32(seed).astype(array.dtype)  # int32 on PyTorch
            v.assign(array)
        for update in self.sharded:
            update.take_from_rank_0()
        self._layers.finalize()

    def share_layer_states(self, where: str) -> None:
        """Give all ranks rank 0's vocabularies and adapted statistics."""
        if self._layers.share(where) and self._model.compiled:
            self.trace_again()

    def trace_again(self) -> None:
        """Retrace graphs: those traced before have captured the model's earlier state."""
        self._model.make_train_function(force=True)
        self._model.test_function = self._model.predict_function = None  # Keras makes them when needed

    def average_statistics(self) -> None:
        """Average running means and variances, which each rank gathers from its local samples.

        Integers and booleans have no such mean: all ranks get rank 0's.
        """
        gathered = [*self._model.non_trainable_variables, *buffers_of(self._model)]
        # The states of dropout layers' generators are among these variables; they must differ.
        local = {str(k): v for k, v in enumerate(gathered) if not v.path.endswith(SEED)}
        arrays = ((name, keras.ops.convert_to_numpy(v)) for name, v in local.items() if "float" in v.dtype)
        averaged = {name: to_numpy(local[name]) for name in differing(arrays, self._world)}
        for name, value in mean(averaged, self._world, self._ops).items():
            local[name].assign(value)
        if rest := [v for v in local.values() if "float" not in v.dtype]:
            for v, value in zip(rest, self._of_rank_0(rest)[1], strict=True):
                v.assign(value)

    def _of_rank_0(self, variables: Collection[Any], head: Any = None) -> tuple[Any, list[np.ndarray]]:
        """Return rank 0's ``head``, a JSON value, and its values of ``variables``; on all ranks together."""
        local = [to_numpy(v) for v in variables]
        head, parts = broadcast_parts(
            self._world, head, [np.ascontiguousarray(a).reshape(-1).view(np.uint8) for a in local]
        )
        arrays = [np.frombuffer(x, a.dtype).reshape(a.shape).copy() for x, a in zip(parts, local, strict=True)]
        return head, arrays


class Buffer:
    """A buffer of a PyTorch module in a Keras layer, which is no variable of Keras."""

    def __init__(self, path: str, tensor: Any) -> None:
        self.path, self._tensor = path, tensor
        self.dtype = keras.backend.standardize_dtype(tensor.dtype)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(keras.ops.convert_to_numpy(self._tensor), dtype)

    def assign(self, value: np.ndarray) -> None:
        """Set the buffer, as Keras sets a variable."""
        self._tensor.data.copy_(keras.ops.convert_to_tensor(value))


def buffers_of(model: Any) -> list[Buffer]:
    """Return the buffers of PyTorch modules in the model's layers."""
    wrapped = [x for x in model._flatten_layers() if isinstance(x, keras.layers.TorchModuleWrapper)]
    return [Buffer(f"{x.path}/{name}", b) for x in wrapped for name, b in x.module.named_buffers()]


def to_numpy(x: Any) -> np.ndarray:
    """Copy a variable or tensor to an array."""
    return np.array(keras.ops.convert_to_numpy(x))

"""Memory shared by the ranks of a host, in TensorFlow's graphs, which call Python to wait and copy.

TensorFlow's kernels write only to memory that TensorFlow allocates. So a rank updates its part of the weights there,
and copies it to the common memory, which the variables of all ranks read.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvd_train.errors import ConfigError, LostRankError
from hvd_train.frontends.host_memory import CHANGED_BY_MODEL, UNSHARE, HostMemory, Pieces
from hvd_train.frontends.tensorflow.optimizers import view
from hvd_train.protocol import HostSums


def in_memory(memory: mmap.mmap, dtype: Any, entries: int, start: int) -> np.ndarray:
    """Return the flat array at byte ``start`` of a memory."""
    return np.frombuffer(memory, dtype, entries, start)


class GraphMemory:
    """``HostMemory`` whose waits are operations of a graph. ``lost``: the error of a wait, which TensorFlow hides."""

    def __init__(self, host: HostMemory) -> None:
        self._host = host
        self.lost: LostRankError | None = None
        self.rank, self.hosts = host.rank, host.hosts

    def share(self, tensors: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
        return self._host.share(tensors)

    def barrier(self, name: str) -> None:
        self.call(lambda: self._host.barrier(name))

    def sums(self, lengths: Sequence[int]) -> GraphSums:
        return GraphSums(self, self._host.sums(lengths))

    def run(self, graph: Callable, *arguments: Any) -> Any:
        """Run a graph. Raises LostRankError if a rank that it waits for has ended."""
        try:
            return graph(*arguments)
        except tf.errors.OpError as error:
            if self.lost:
                raise self.lost from error
            raise

    def call(self, work: Callable[..., Any], *arguments: tf.Tensor, gives: Any = None) -> tf.Tensor:
        """Call ``work`` with arrays in the graph, after all earlier calls; return its array, of dtype ``gives``."""

        def guarded(*arrays: np.ndarray) -> Any:
            try:
                result = work(*arrays)
            except LostRankError as error:
                self.lost = error
                raise
            return np.int32(0) if gives is None else result

        with tf.device("/CPU:0"):
            return tf.numpy_function(guarded, arguments, gives or tf.int32)


class GraphSums:
    """``HostSums`` of tensors in a graph."""

    def __init__(self, memory: GraphMemory, sums: HostSums) -> None:
        self._memory, self._sums = memory, sums
        self._started: dict[int, Callable[[], np.ndarray]] = {}

    def start(self, place: int, x: tf.Tensor, pieces: Sequence[Pieces]) -> Callable[[], tf.Tensor]:
        def begin(array: np.ndarray) -> None:
            self._started[place] = self._sums.start(place, array, pieces)

        self._memory.call(begin, x)

        def finish() -> tf.Tensor:
            total = self._memory.call(lambda: self._started.pop(place)(), gives=x.dtype)
            total.set_shape([sum(last - first for first, last in pieces[self._memory.rank])])
            return total

        return finish


class CommonWeights:
    """Variables backed by common memory. ``refresh`` is called after their values were assigned."""

    def __init__(self, memory: GraphMemory, variables: Iterable[Any]) -> None:
        self._memory, self.variables = memory, list(variables)
        self._arrays = memory.share([view(v.value).reshape(-1) for v in self.variables])
        self.refresh: Callable[[], None] = lambda: None
        self.assigned = set[str]()  # paths of variables, by us since ``attach``
        for variable, array in zip(self.variables, self._arrays, strict=True):
            self._attach(variable, array)

    def write(self, pieces: Sequence[tuple[Any, int, int, tf.Tensor]]) -> None:
        """Copy pieces to the common memory, in a graph: entries [first, last) of a variable."""
        places = {id(v): array for v, array in zip(self.variables, self._arrays, strict=True)}
        there = [(places[id(v)][first:last], x) for v, first, last, x in pieces if last > first]

        def copy(*arrays: np.ndarray) -> None:
            for (place, _), array in zip(there, arrays, strict=True):
                place[:] = array.reshape(-1)

        if there:
            self._memory.call(copy, *(x for _, x in there))

    def attach(self) -> None:
        """Copy newly assigned values to the common memory, and attach the variables to it again.

        An assignment moves a variable to other memory, and so must be noticed before the next step. All ranks assign
        the same values. Raises ConfigError for one that is not in ``assigned``: the model has changed it.
        """
        refreshed = False
        for variable, array in zip(self.variables, self._arrays, strict=True):
            values = view(variable.value)
            # An empty array has no address.
            if array.size and values.ctypes.data != array.ctypes.data:
                if variable.path not in self.assigned:
                    what = f"{CHANGED_BY_MODEL} (as SpectralNormalization does)"
                    raise ConfigError(what, where=f"optim.sharded: {variable.path}", fix=UNSHARE, common=True)
                array[:] = values.reshape(-1)
                self._attach(variable, array)
                refreshed = True
        self.assigned.clear()
        if refreshed:
            self.refresh()

    @staticmethod
    def _attach(variable: Any, array: np.ndarray) -> None:
        shaped = array.reshape(variable.shape)
        variable.value.assign(tf.experimental.dlpack.from_dlpack(shaped.__dlpack__()))


def after_reads(tensors: Sequence[tf.Tensor], variables: Iterable[Any], also: Any) -> list[tf.Tensor]:
    """Return ``tensors`` with control dependencies on ``also`` and all that was computed from ``variables`` so far.

    A read of a variable may alias its memory, which other ranks must not change before the value is used.
    """
    graph = tf.compat.v1.get_default_graph()
    # Compare names: TensorFlow may make a new object for the same operation.
    handles = {graph.capture(v.value.handle).name for v in variables}
    pending = [op for op in graph.get_operations() if any(x.name in handles for x in op.inputs)]
    known, last = {op.name for op in pending}, list[Any]()
    while pending:
        op = pending.pop()
        users = [user for output in op.outputs for user in output.consumers()]
        if not users:
            last.append(op)
        pending += {user.name: user for user in users if user.name not in known}.values()
        known |= {user.name for user in users}
    with tf.control_dependencies([*last, *tf.nest.flatten(also)]):
        return [tf.identity(x) for x in tensors]

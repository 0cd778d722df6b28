"""Horovod over TensorFlow tensors, eagerly and in graphs."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from hvd_train.engine.library import TENSORFLOW_OP, use_stock
from hvd_train.frameworks import TENSORFLOW
from hvd_train.frontends.horovod import HorovodCommunicator, RankParts, StockBindings, guarded
from hvd_train.frontends.on_engine import OPS, EngineCommunicator, check_file
from hvd_train.frontends.tensorflow.graphs import graph
from hvd_train.frontends.traffic import Traffic
from hvd_train.protocol import Communicator


class GraphTraffic(Traffic):
    """A counter of bytes in a variable: a Python number would only count when a graph is traced."""

    def __init__(self) -> None:
        super().__init__()
        with tf.device("/CPU:0"):
            self._tensors = tf.Variable(0.0, trainable=False, dtype=tf.float64)

    def add(self, x, times) -> None:
        with tf.device("/CPU:0"):
            self._tensors.assign_add(tf.cast(tf.size(x, tf.int64), tf.float64) * float(x.dtype.size * times))

    def total(self) -> float:
        return super().total() + float(self._tensors.numpy())


class EngineTensorFlow(EngineCommunicator):
    """The engine as operations of TensorFlow. The handle of a transfer is its result: the graph knows what depends on
    it."""

    def _open(self) -> Any:
        engine = super()._open()
        self._op = operations(engine.library)
        return engine

    def traffic(self) -> Traffic:
        return GraphTraffic()

    @guarded
    def allreduce_async(self, x, name, op="sum") -> tf.Tensor:
        self._check(op)
        factor = 1.0
        if op == "average" and x.dtype != tf.float64:
            # The engine's own average takes another pass. An operation's factor has 32 bits.
            op, factor = "sum", 1 / self.size
        return self._op.hvd_train_allreduce(
            x,
            tensor_name=f"allreduce.{name}",
            reduce_op=OPS[op],
            prescale=factor,
            process_set=self._process_set,
        )

    @guarded
    def allgather_async(self, x, name) -> tf.Tensor:
        received = self._op.hvd_train_allgather(x, tensor_name=f"allgather.{name}", process_set=self._process_set)
        return _with_rows(received, x)

    @guarded
    def alltoall_async(self, x, sizes, name) -> tf.Tensor:
        sizes = tf.constant(sizes, tf.int32)
        received, _ = self._op.hvd_train_alltoall(
            x, sizes, tensor_name=f"alltoall.{name}", process_set=self._process_set
        )
        return _with_rows(received, x)

    def synchronize(self, handle) -> tf.Tensor:
        # In a graph, nobody else knows how much was received.
        return tf.reshape(handle.add(handle.transfer), (handle.length,)) if isinstance(handle, RankParts) else handle


def _with_rows(received: tf.Tensor, sent: tf.Tensor) -> tf.Tensor:
    """Tell a graph the shape of what was received: as many rows as there are, each as those sent."""
    received.set_shape(tf.TensorShape([None]).concatenate(sent.shape[1:]))
    return received


@functools.cache
def operations(library: ctypes.CDLL) -> Any:
    """Load the engine's TensorFlow operations, and connect them to ``library``."""
    check_file(TENSORFLOW_OP)
    module = tf.load_op_library(str(TENSORFLOW_OP))
    functions = library.engine_start, library.engine_free, library.engine_error
    ctypes.CDLL(str(TENSORFLOW_OP)).engine_use(*[ctypes.cast(function, ctypes.c_void_p) for function in functions])
    return module


class HorovodTensorFlow(HorovodCommunicator):
    """Horovod's own bindings, for GPUs.

    Transfers' names omit the scope of their graph. One rank may run a single step while another, whose steps were
    faster, runs several in a loop, and their transfers must match.
    """

    def __init__(self, expected_size: int) -> None:
        super().__init__(expected_size)
        self._gathers: dict[str, Callable] = {}

    def _open(self) -> StockBindings:
        return StockBindings(TENSORFLOW.horovod)

    def of_stage(self) -> HorovodCommunicator:
        some = super().of_stage()
        some._gathers = {}  # type: ignore[attr-defined]  # graphs hold the ranks that they are over
        return some

    def traffic(self) -> Traffic:
        return GraphTraffic()

    @guarded
    def allreduce_async(self, x, name, op="sum") -> tf.Tensor:
        if op == "average" and x.dtype != tf.float64:
            # Divide where Horovod copies anyway: its own average takes another pass. The factor has 32 bits.
            return self._allreduce(x, name, self.hvd.Sum, prescale_factor=1 / self.size)
        if op == "adasum":
            # With NCCL, Horovod averages over the GPUs of a host, and runs Adasum only between hosts.
            with tf.device("CPU:0"):
                return self._allreduce(tf.identity(x), name, self.hvd.Adasum)
        return self._allreduce(x, name, {"sum": self.hvd.Sum, "average": self.hvd.Average}[op])

    def _allreduce(self, x, name, op, **factor) -> tf.Tensor:
        return self.hvd.allreduce(x, name=name, op=op, ignore_name_scope=True, **factor, **self._within)

    @guarded
    def allgather_async(self, x, name) -> tf.Tensor:
        return self.hvd.allgather(x, name=name, ignore_name_scope=True, **self._within)

    @guarded
    def alltoall_async(self, x, sizes, name) -> tf.Tensor:
        return self.hvd.alltoall(x, tf.constant(sizes, tf.int32), name=name, ignore_name_scope=True, **self._within)[0]

    def synchronize(self, handle) -> tf.Tensor:
        # In a graph, nobody else knows how much was received.
        return tf.reshape(handle.add(handle.transfer), (handle.length,)) if isinstance(handle, RankParts) else handle

    @guarded
    def _broadcast(self, data, root, name) -> np.ndarray:
        return self.hvd.broadcast(tf.constant(data), root, name=name, **self._within).numpy()

    @guarded
    def _allgather(self, data, name) -> np.ndarray:
        # A graph, because TensorFlow drops the name in eager mode.
        if name not in self._gathers:
            gather = functools.partial(self.hvd.allgather, name=name, ignore_name_scope=True, **self._within)
            self._gathers[name] = graph(gather).get_concrete_function(tf.TensorSpec([None], tf.uint8))
        return self._gathers[name](tf.constant(data)).numpy()

    @guarded
    def _alltoall(self, data, sizes, name) -> np.ndarray:
        return self.hvd.alltoall(tf.constant(data), tf.constant(sizes, tf.int32), name=name, **self._within)[0].numpy()


def make_communicator(expected_size: int) -> Communicator:
    return HorovodTensorFlow(expected_size) if use_stock() else EngineTensorFlow(expected_size)

"""The differences between Keras on TensorFlow and on PyTorch."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras

from hvd_train.errors import ConfigError
from hvd_train.frontends.base import started_at_once
from hvd_train.launch.environment import world
from hvd_train.protocol import Communicator, Ops, Packing
from hvd_train.script.keras.gradients import Reduction
from hvd_train.script.shared.local_training import InBackground
from hvd_train.script.shared.slow_rank import SlowRankReport
from hvd_train.script.shared.world import open_session


class OnTensorFlow:
    """Keras on TensorFlow: a transfer is an operation of the graph being traced."""

    framework = "tensorflow"
    _waits: Any = None  # seconds spent in the graphs' transfers, of all models
    _read = 0.0  # its last known value

    def __init__(self) -> None:
        import tensorflow as tf

        from hvd_train.frontends.tensorflow.graphs import awaited, packing, seconds_waited, transfer_in_thread
        from hvd_train.frontends.tensorflow.ops import TensorFlowOps

        self.tf, self._awaited = tf, awaited
        if OnTensorFlow._waits is None:
            # Outside any graph: ``distribute`` may be called while one is traced.
            with tf.init_scope():
                OnTensorFlow._waits = seconds_waited()
        self.ops: Ops = TensorFlowOps()
        self.packing: Callable[[Communicator], Packing] = packing
        self.in_background: InBackground = transfer_in_thread
        self.lifted = tf.init_scope  # leaves the graph being traced

    def untouched(self, function: Callable) -> Callable:
        """Exclude a function from AutoGraph, also when a tf.function of the script calls it."""
        return self.tf.autograph.experimental.do_not_convert(function)

    def eager(self) -> bool:
        return self.tf.executing_eagerly()

    def refuse(self, wrong: Any, what: str, where: str, fix: str) -> None:
        """Raise an error if ``wrong``, a boolean tensor, is true; in a graph when it runs."""
        if not self.eager():
            self.tf.debugging.Assert(self.tf.logical_not(wrong), [f"{what}; {where}; {fix}"])
        elif bool(wrong):
            raise ConfigError(what, where=where, fix=fix)

    def records(self) -> bool:
        """Return whether a tape records."""
        from tensorflow.python.eager import record

        return record.could_possibly_record()

    def graph(self) -> Any:
        """Return the graph being traced; None if operations run eagerly."""
        return None if self.eager() else self.tf.compat.v1.get_default_graph()

    def after_step(self, reduction: Reduction) -> None:
        """Count a step of the script's loop."""
        # A graph counts its steps itself, and they are reported with the next batch (Reduction.count_graph_steps): a
        # transfer started by Python inside a graph would deadlock, as it needs the thread that it blocks.
        if self.eager():
            reduction.stepped(1)
        else:
            # An operation of the graph, so that it counts whenever the graph runs.
            reduction.steps.value.assign_add(1)
            Reduction.traced.add(reduction)

    def draw_apart(self) -> None:
        """Give random operations of the graph being traced another seed on each rank."""
        graph = self.tf.compat.v1.get_default_graph()
        if not self.eager() and graph.seed is not None:
            # The golden ratio of 2^32: seeds of neighbouring ranks are far apart.
            self.tf.random.set_seed((graph.seed + world().rank * 0x9E3779B9) % (1 << 31))  # of this graph only

    def dense(self, gradients: list[Any]) -> list[Any]:
        """Replace IndexedSlices by tensors; on a CPU, wait until all gradients are computed."""
        gradients = [None if g is None else self.tf.convert_to_tensor(g) for g in gradients]
        if self.tf.config.get_visible_devices("GPU"):
            return gradients
        # On a CPU the communication thread would slow down the computing ones.
        with self.tf.control_dependencies([g for g in gradients if g is not None]):
            return [None if g is None else self.tf.identity(g) for g in gradients]

    def awaited(self, gradients: Sequence[Any], transfer: Callable[[], Any]) -> Any:
        """Return the result of ``transfer``; in a graph, count the seconds it takes."""
        if self.eager():
            return transfer()
        return self._awaited(self._waits, [g for g in gradients if g is not None], transfer)

    def waited(self, fresh: bool) -> float:
        """Return the seconds in the graphs' transfers; they are read again only if ``fresh``, which takes 12 us."""
        if fresh:
            OnTensorFlow._read = float(self._waits)
        return self._read

    def fuse(self, optimizer: Any) -> None:
        from hvd_train.script.keras.fused import fuse

        fuse(optimizer)


class OnTorch:
    """Keras on PyTorch: every operation runs eagerly."""

    framework = "pytorch"

    def __init__(self) -> None:
        import torch

        from hvd_train.frontends.pytorch.buckets import dense
        from hvd_train.frontends.pytorch.model import PyTorchFrontEnd
        from hvd_train.frontends.pytorch.ops import TorchOps

        self._dense = dense
        self.ops: Ops = TorchOps(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
        self.packing: Callable[[Communicator], Packing] = lambda _: PyTorchFrontEnd.packing
        self.in_background: InBackground = started_at_once
        self.lifted = contextlib.nullcontext

    def untouched(self, function: Callable) -> Callable:
        return function

    def eager(self) -> bool:
        return True

    def refuse(self, wrong: Any, what: str, where: str, fix: str) -> None:
        if bool(wrong):
            raise ConfigError(what, where=where, fix=fix)

    def records(self) -> bool:
        import torch

        return torch.is_grad_enabled()

    def graph(self) -> Any:
        return None

    def after_step(self, reduction: Reduction) -> None:
        reduction.stepped(1)

    def draw_apart(self) -> None:
        """Do nothing: there is no graph."""

    def dense(self, gradients: list[Any]) -> list[Any]:
        return [self._dense(g) if g is not None and g.is_sparse else g for g in gradients]

    def awaited(self, gradients: Sequence[Any], transfer: Callable[[], Any]) -> Any:
        return transfer()

    def waited(self, fresh: bool) -> float:
        return 0.0  # the communicator counts them

    def fuse(self, optimizer: Any) -> None:
        """Do nothing: Keras uses torch's fused updates."""


BACKENDS: dict[str, Any] = {"tensorflow": OnTensorFlow, "torch": OnTorch}


def opened() -> tuple[Communicator, Any]:
    """Open the session of this process; return its communicator, and the backend that Keras runs on."""
    name = keras.backend.backend()
    if name not in BACKENDS:
        fix = "set KERAS_BACKEND=tensorflow or KERAS_BACKEND=torch"
        raise ConfigError(f"Keras runs on {name}", where="hvd_train.keras", fix=fix)
    backend = BACKENDS[name]()
    return open_session(backend.framework).communicator, backend


# AutoGraph shall not convert what a user's ``tf.function`` calls first: where it fails, it prints the environment.
opened.autograph_info__ = None  # type: ignore[attr-defined]


@functools.cache
def slow_rank_report() -> SlowRankReport:
    """Return the report of slow ranks, shared by all models."""
    communicator, backend = opened()
    return SlowRankReport(communicator, lambda fresh: communicator.waited + backend.waited(fresh))

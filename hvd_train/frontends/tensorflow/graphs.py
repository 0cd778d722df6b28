"""Helpers for TensorFlow's graphs: tracing, waiting, queued steps, and bucket sizes."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import tensorflow as tf

from hvd_train.errors import ConfigError
from hvd_train.protocol import Communicator, Packing, Sample

COMPILE = "model.compile"
# In XLA's messages: the operation, or the reason.
UNCOMPILED = re.compile(r"on XLA_\w+: (\w+) \(No registered|(\w[^.\n]*must be a compile-time constant)")
# ``steps_per_execution: auto``: the most time and memory of the steps of one call.
CALL_SECONDS, CALL_BYTES, CALL_STEPS = 0.1, 64 << 20, 32


def graph(function: Callable, **options: Any) -> Any:
    """Make a ``tf.function`` without AutoGraph, as Keras does."""
    # AutoGraph would rewrite our ``if`` and ``for``, and takes 0.6 of the time of a trace.
    return tf.function(function, autograph=False, **options)


def compiling(call: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a call of graphs that XLA compiles (``model.compile``). Raises ConfigError if it cannot."""

    def run(*arguments: Any) -> Any:
        try:
            return call(*arguments)
        except (tf.errors.InvalidArgumentError, tf.errors.UnimplementedError) as error:
            if not (found := UNCOMPILED.search(str(error))):
                raise
            raise ConfigError(
                f"XLA cannot compile {found[1] or found[2]}", where=COMPILE, fix="leave it out"
            ) from error

    return run


def signature(sample: Sample, arguments: Any, *axes: int | None) -> tuple[Any, ...]:
    """Return the specs of (inputs, labels, weights, ...) after additional ``axes``.

    Where lengths vary they are None, and so are the rows, because each bucket may have batches of its own size.
    """
    ragged = {name for name, field in (*sample.inputs.items(), *sample.labels.items()) if field.ragged}

    def rows(x: Any, *shape: int | None) -> tf.TensorSpec:
        return tf.TensorSpec((*axes, None if ragged else x.shape[0], *shape), x.dtype)

    def field(name: str, x: Any) -> tf.TensorSpec:
        varies = name in ragged and len(x.shape) > 1
        return rows(x, *((None, *x.shape[2:]) if varies else x.shape[1:]))

    inputs, labels, weights, *others = arguments
    fields = ({name: field(name, x) for name, x in named.items()} for named in (inputs, labels))
    return (*fields, rows(weights), *(tf.TensorSpec((*axes, *x.shape), x.dtype) for x in others))


def same_shapes(a: Any, b: Any) -> bool:
    """Return whether two batches have the same shapes, so that their steps can run in one call."""
    return all(x.shape == y.shape for x, y in zip(tf.nest.flatten(a), tf.nest.flatten(b), strict=True))


def columns(flat: Sequence[Sequence[Any]]) -> list[tf.Tensor]:
    """Stack each argument over all steps, (steps, ...): tensors, or numbers that are not on the device yet."""
    return [tf.stack(x) if tf.is_tensor(x[0]) else tf.constant(np.stack(x)) for x in zip(*flat, strict=True)]


def seconds_waited() -> tf.Variable:
    """Make the variable that accumulates seconds spent waiting."""
    with tf.device("/CPU:0"):
        return tf.Variable(0.0, trainable=False, dtype=tf.float64)


def awaited(waits: tf.Variable, gradients: Sequence[Any], transfer: Callable[[], Any]) -> Any:
    """Run ``transfer`` in a graph; add the seconds from the last gradient to its end to ``waits``."""
    with tf.device("/CPU:0"), tf.control_dependencies(gradients):
        began = tf.timestamp()
    result = transfer()
    with tf.device("/CPU:0"), tf.control_dependencies(tf.nest.flatten(result)):
        waits.assign_add(tf.timestamp() - began)
    return result


def in_thread(function: Callable[..., Any]) -> Callable[..., Callable[[], Any]]:
    """Wrap ``function``: a call starts it in a thread, and returns a function that waits for the result.

    An eager transfer blocks its caller; in a thread, computations continue meanwhile.
    """

    def begin(*tensors: Any) -> Callable[[], Any]:
        future: Future[Any] = Future()

        def work() -> None:
            try:
                future.set_result(function(*tensors))
            except BaseException as error:  # raised when the result is requested
                future.set_exception(error)

        # Not a pool, whose threads are joined at exit: a transfer to a lost rank may never end.
        threading.Thread(target=work, daemon=True).start()
        return future.result

    return begin


def transfer_in_thread(start: Callable[..., Any], finish: Callable[[Any], Any]) -> Callable[..., Callable[[], Any]]:
    """Implement ``Parameters.in_background``."""
    return in_thread(graph(lambda *tensors: finish(start(*tensors))))


class BetweenSteps:
    """The part of a front-end that runs graphs between steps."""

    _device: str

    def peak_device_bytes(self) -> int:
        name = self._device.removeprefix("/")
        return int(tf.config.experimental.get_memory_info(name)["peak"]) if name != "CPU:0" else 0

    def run_queued(self) -> None:
        raise NotImplementedError

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        traced = graph(function)

        def call(*tensors: Any) -> Any:
            self.run_queued()
            with tf.device(self._device):
                return traced(*tensors)

        return call

    def in_background(
        self, start: Callable[..., Any], finish: Callable[[Any], Any]
    ) -> Callable[..., Callable[[], Any]]:
        return transfer_in_thread(start, finish)


def steps_per_call(seconds: float, batch: Sequence[tf.Tensor]) -> int:
    """Return the number of steps in one call, limited by CALL_SECONDS, CALL_STEPS and CALL_BYTES of batches."""
    fits = CALL_BYTES // sum(x.shape.num_elements() * x.dtype.size for x in batch)
    return max(1, min(int(CALL_SECONDS / seconds), fits, CALL_STEPS))


class Later:
    """The sums of a queued step, computed when they are read or the queue is full."""

    def __init__(self, run: Callable[[], None]) -> None:
        self._run = run
        self.sums: Any = None

    def numpy(self) -> np.ndarray:
        if self.sums is None:
            self._run()
        return self.sums.numpy()


def seed_generators(numbered: Sequence[tuple[int, Any]], seed: tf.Tensor) -> None:
    """Seed each generator in ``numbered``, (number, variable), by a pair of uint32.

    So masks depend on (seed, step, rank), and repeat after a resume.
    """
    for i, variable in numbered:
        pair = tf.stack([tf.bitwise.bitwise_and(seed, 0xFFFFFFFF), tf.bitwise.right_shift(seed, 32) + i])
        variable.value.assign(tf.cast(pair, variable.value.dtype))


def packing(communicator: Communicator) -> Packing:
    """Return the bucket sizes for this network."""
    # Joining costs a copy each way, and saves messages, which are expensive over Gloo: with all but the largest tensors
    # joined a small GPT is 1.9 times as fast, 200 thin layers 1.3 times, SINGA's CNN 1.2 times. A single rank sends
    # nothing, so it copies nothing.
    large = 0 if communicator.size == 1 else 1 << 20 if communicator.mpi else 32 << 20
    return Packing(bucket_bytes=large, alone_bytes=large)

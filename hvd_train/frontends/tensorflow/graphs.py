"""Graphs of TensorFlow: how they are made, what they wait for, and which gradients travel together."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import tensorflow as tf

from hvd_train.protocol import Communicator, Packing, Sample

# ``steps_per_execution: auto``: as many steps in a call as take this long or as much memory, at most.
CALL_SECONDS, CALL_BYTES, CALL_STEPS = 0.1, 64 << 20, 32


def graph(function: Callable, **options: Any) -> Any:
    """Make a ``tf.function`` that is traced as it stands, as Keras traces a model."""
    # AutoGraph, which would rewrite our ``if`` and ``for``, takes 0.6 of the time of a trace.
    return tf.function(function, autograph=False, **options)


def signature(sample: Sample, arguments: Any, *axes: int | None) -> tuple[Any, ...]:
    """Return the specs of (inputs, labels, weights, ...), after further ``axes``; lengths that vary are left open."""
    ragged = {name for name, field in (*sample.inputs.items(), *sample.labels.items()) if field.ragged}

    def spec(x: Any, varies: bool = False) -> tf.TensorSpec:
        shape = [x.shape[0], None, *x.shape[2:]] if varies and len(x.shape) > 1 else x.shape
        return tf.TensorSpec((*axes, *shape), x.dtype)

    inputs, labels, *others = arguments
    fields = ({name: spec(x, name in ragged) for name, x in named.items()} for named in (inputs, labels))
    return (*fields, *map(spec, others))


def same_shapes(a: Any, b: Any) -> bool:
    """Return whether two batches have the same shapes, so that their steps run in one call."""
    return all(x.shape == y.shape for x, y in zip(tf.nest.flatten(a), tf.nest.flatten(b), strict=True))


def columns(flat: Sequence[Sequence[Any]]) -> list[tf.Tensor]:
    """Stack each argument of all steps, (steps, ...): a batch's tensors are on the device, numbers are not."""
    return [tf.stack(x) if tf.is_tensor(x[0]) else tf.constant(np.stack(x)) for x in zip(*flat, strict=True)]


def seconds_waited() -> tf.Variable:
    """Make the variable in which ``awaited`` counts."""
    with tf.device("/CPU:0"):
        return tf.Variable(0.0, trainable=False, dtype=tf.float64)


def awaited(waits: tf.Variable, gradients: Sequence[Any], transfer: Callable[[], Any]) -> Any:
    """Run ``transfer`` in a graph; ``waits`` counts the seconds from the last gradient to its end."""
    with tf.device("/CPU:0"), tf.control_dependencies(gradients):
        began = tf.timestamp()
    result = transfer()
    with tf.device("/CPU:0"), tf.control_dependencies(tf.nest.flatten(result)):
        waits.assign_add(tf.timestamp() - began)
    return result


def in_thread(function: Callable[..., Any]) -> Callable[..., Callable[[], Any]]:
    """Return a function that calls ``function`` in a thread; what it returns waits for the result.

    A transfer outside of a graph blocks whoever calls it, and TensorFlow lets other threads compute meanwhile.
    """

    def begin(*tensors: Any) -> Callable[[], Any]:
        future: Future[Any] = Future()

        def work() -> None:
            try:
                future.set_result(function(*tensors))
            except BaseException as error:  # raised where the result is asked for
                future.set_exception(error)

        # No pool, whose threads are joined at exit: a transfer to a lost rank may never end.
        threading.Thread(target=work, daemon=True).start()
        return future.result

    return begin


def transfer_in_thread(start: Callable[..., Any], finish: Callable[[Any], Any]) -> Callable[..., Callable[[], Any]]:
    """Return what ``Parameters.in_background`` does."""
    return in_thread(graph(lambda *tensors: finish(start(*tensors))))


class BetweenSteps:
    """The part of a front-end that runs graphs other than steps."""

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
    """Return how many steps of ``seconds`` run in one call; as many batches as that fit into CALL_BYTES together."""
    fits = CALL_BYTES // sum(x.shape.num_elements() * x.dtype.size for x in batch)
    return max(1, min(int(CALL_SECONDS / seconds), fits, CALL_STEPS))


class Later:
    """The sums of a step that waits for others, to run with them in one call."""

    def __init__(self, run: Callable[[], None]) -> None:
        self._run = run
        self.sums: Any = None

    def numpy(self) -> np.ndarray:
        if self.sums is None:
            self._run()
        return self.sums.numpy()


def seed_generators(numbered: Sequence[tuple[int, Any]], seed: tf.Tensor) -> None:
    """Give each generator, a variable with a number, its pair of uint32.

    So masks depend on (seed, step, rank), and repeat after a resume.
    """
    for i, variable in numbered:
        pair = tf.stack([tf.bitwise.bitwise_and(seed, 0xFFFFFFFF), tf.bitwise.right_shift(seed, 32) + i])
        variable.value.assign(tf.cast(pair, variable.value.dtype))


def packing(communicator: Communicator) -> Packing:
    """Return the limits of buckets for this network."""
    # Joining costs a copy each way, and saves messages, which are expensive over Gloo: with all but the largest tensors
    # joined a small GPT is 1.9 times as fast, 200 thin layers 1.3 times, SINGA's CNN 1.2 times. One rank sends nothing,
    # so it copies nothing.
    large = 0 if communicator.size == 1 else 1 << 20 if communicator.mpi else 32 << 20
    return Packing(bucket_bytes=large, alone_bytes=large)

"""Keras 3 on TensorFlow: forward, backward, exchange and update are traced as one ``tf.function``."""

from __future__ import annotations

import functools
import math
import os
import time

os.environ.setdefault("KERAS_BACKEND", "tensorflow")

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvd_train.config import Config
from hvd_train.core.task import Task
from hvd_train.errors import ConfigError
from hvd_train.frameworks import TENSORFLOW
from hvd_train.frontends import keras_optimizers, tf_batchnorm
from hvd_train.frontends.base import (
    HorovodCommunicator,
    RankParts,
    StateTree,
    build_model,
    checked,
    gpu_of,
    guarded,
    layouts_of,
    may_be_images,
    overlaps,
    untaken,
)
from hvd_train.protocol import (
    Batch,
    Communicator,
    Exchange,
    Field,
    Packing,
    Sample,
    Scale,
    TensorSpec,
    Tree,
    made_up,
    one_or_all,
)

DTYPES = {"64": "float64"}  # of weights; all other precisions: float32
ROW = 4096  # entries that one thread adds up, whatever the number of threads
# ``steps_per_execution: auto``: as many steps in a call as take this long or as much memory, at most.
CALL_SECONDS, CALL_BYTES, CALL_STEPS = 0.1, 64 << 20, 32
MIXED = {"16-mixed": "mixed_float16", "bf16-mixed": "mixed_bfloat16"}


class TensorFlowOps:
    def from_numpy(self, x) -> tf.Tensor:
        return tf.convert_to_tensor(x)

    def to_numpy(self, x) -> np.ndarray:
        return np.array(x.numpy())

    def cast(self, x, dtype) -> tf.Tensor:
        return tf.cast(x, dtype)

    def reshape(self, x, shape) -> tf.Tensor:
        return tf.reshape(x, tuple(shape))

    def topk(self, x, k) -> tf.Tensor:
        return tf.math.top_k(x, k, sorted=False).indices

    def above(self, x, bound) -> tf.Tensor:
        return tf.cast(tf.where(~(x <= bound))[:, 0], tf.int32)

    def take(self, x, indices) -> tf.Tensor:
        return tf.gather(x, indices)

    def join(self, parts) -> tf.Tensor:
        return tf.concat(parts, 0)

    def cut(self, x, sizes) -> list[tf.Tensor]:
        return tf.split(x, sizes)

    def scatter(self, length, indices, values) -> tf.Tensor:
        # The bits of tensor_scatter_nd_add in 0.4 to 0.6 of its time (4M entries, 2 and 30 % of them).
        return tf.math.unsorted_segment_sum(values, indices, length)

    def matmul(self, a, b, *, transpose_a=False, transpose_b=False) -> tf.Tensor:
        inner = a.shape[0 if transpose_a else 1]
        if inner is not None and inner <= 64 and inner % 8:
            # oneDNN adds the rest of a short axis in another order where threads cut the matrix: leave it no rest.
            more = [0, -inner % 8]
            a = tf.pad(a, [more, [0, 0]] if transpose_a else [[0, 0], more])
            b = tf.pad(b, [[0, 0], more] if transpose_b else [more, [0, 0]])
        return tf.matmul(a, b, transpose_a=transpose_a, transpose_b=transpose_b)

    def minus_product(self, x, a, b) -> tf.Tensor:
        return x - tf.matmul(a, b, transpose_b=True)

    def orthonormal(self, x) -> tf.Tensor:
        return tf.linalg.qr(x).q

    def clip(self, x, limit) -> tf.Tensor:
        return tf.clip_by_value(x, -limit, limit)

    def dtype(self, x) -> str:
        return x.dtype.name

    def round(self, x) -> tf.Tensor:
        return tf.round(x)

    def where(self, condition, a, b) -> tf.Tensor:
        kind = (a if tf.is_tensor(a) else b).dtype
        return tf.where(condition, tf.convert_to_tensor(a, kind), tf.convert_to_tensor(b, kind))

    def add_rows(self, x) -> tf.Tensor:
        return tf.reduce_sum(x, 0)

    def largest(self, x) -> tf.Tensor:
        return tf.reduce_max(x)

    def to_bytes(self, x) -> tf.Tensor:
        return tf.reshape(tf.bitcast(x, tf.uint8), [-1])

    def from_bytes(self, x, dtype) -> tf.Tensor:
        dtype = tf.as_dtype(dtype)
        return tf.bitcast(tf.reshape(x, (-1, dtype.size)), dtype)

    def nbytes(self, x) -> Any:
        return tf.size(x, tf.int64) * x.dtype.size

    def stack(self, parts) -> tf.Tensor:
        return tf.stack(parts)

    def cross_entropy(self, logits, labels, own=None) -> tf.Tensor:
        if own is None:
            return tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)
        there = tf.reshape(tf.where(tf.reshape(own, (-1,)) != 0), (-1,))
        rows, flat = tf.reshape(logits, (-1, logits.shape[-1])), tf.reshape(labels, (-1,))
        found = self.cross_entropy(tf.gather(rows, there), tf.gather(flat, there))
        return tf.reshape(tf.scatter_nd(there[:, None], found, tf.shape(flat, tf.int64)), tf.shape(labels))

    def constant(self, x) -> tf.Tensor:
        return tf.stop_gradient(x)

    def softplus(self, x) -> tf.Tensor:
        return tf.math.softplus(x)

    def sigmoid(self, x) -> tf.Tensor:
        return tf.math.sigmoid(x)

    def argmax(self, x) -> tf.Tensor:
        return tf.argmax(x, -1)

    def pick(self, x, indices) -> tf.Tensor:
        return tf.gather(x, indices, axis=-1, batch_dims=len(indices.shape))

    def add_last(self, x) -> tf.Tensor:
        return tf.reduce_sum(x, -1)

    def row_means(self, x) -> tf.Tensor:
        return tf.reduce_mean(x, list(range(1, x.shape.rank)))

    def dot(self, a, b) -> tf.Tensor:
        return tf.reduce_sum(a * b)

    def sum_of_squares(self, x) -> tf.Tensor:
        """Rows of ``ROW`` entries, then their sums: TensorFlow divides a single sum among threads, but no row."""
        x = tf.square(tf.reshape(x, [-1]))
        for _ in range(2):  # 10^11 entries
            if x.shape[0] is not None and x.shape[0] <= ROW:
                break
            whole = tf.size(x) // ROW * ROW
            x = tf.concat([tf.reduce_sum(tf.reshape(x[:whole], [-1, ROW]), 1), [tf.reduce_sum(x[whole:])]], 0)
        return tf.reduce_sum(x)

    def all_finite(self, x) -> tf.Tensor:
        return tf.reduce_all(tf.math.is_finite(x))


class HorovodTensorFlow(HorovodCommunicator):
    """The handle of a transfer is its result: inside a graph TensorFlow itself knows what waits for what.

    Names are without the scope of the graph that they stand in: one rank may take a step alone while another, which
    found its steps to be faster, takes it in a loop, and what they exchange must meet.
    """

    module = TENSORFLOW.horovod

    def __init__(self, expected_size: int) -> None:
        super().__init__(expected_size)
        self._gathers: dict[str, Callable] = {}

    @guarded
    def allreduce_async(self, x, name, op="sum") -> tf.Tensor:
        if op == "average" and x.dtype != tf.float64:
            # Divided where Horovod copies it anyway; its own average takes a pass more. The factor has 32 bits.
            return self._allreduce(x, name, self.hvd.Sum, prescale_factor=1 / self.size)
        ops = {"sum": self.hvd.Sum, "average": self.hvd.Average, "adasum": self.hvd.Adasum}
        return self._allreduce(x, name, ops[op])

    def _allreduce(self, x, name, op, **factor) -> tf.Tensor:
        return self.hvd.allreduce(x, name=name, op=op, ignore_name_scope=True, **factor)

    @guarded
    def allgather_async(self, x, name) -> tf.Tensor:
        return self.hvd.allgather(x, name=name, ignore_name_scope=True)

    @guarded
    def alltoall_async(self, x, sizes, name) -> tf.Tensor:
        return self.hvd.alltoall(x, tf.constant(sizes, tf.int32), name=name, ignore_name_scope=True)[0]

    def synchronize(self, handle) -> tf.Tensor:
        # In a graph nobody but us knows how much was received.
        return tf.reshape(handle.add(handle.transfer), (handle.length,)) if isinstance(handle, RankParts) else handle

    @guarded
    def _broadcast(self, data, root, name) -> np.ndarray:
        return self.hvd.broadcast(tf.constant(data), root, name=name).numpy()

    @guarded
    def _allgather(self, data, name) -> np.ndarray:
        if name not in self._gathers:  # a graph, for outside of one TensorFlow drops the name
            gather = functools.partial(self.hvd.allgather, name=name, ignore_name_scope=True)
            self._gathers[name] = _graph(gather).get_concrete_function(tf.TensorSpec([None], tf.uint8))
        return self._gathers[name](tf.constant(data)).numpy()


def _graph(function: Callable, **options: Any) -> Any:
    """Traced as it stands, as Keras traces a model: AutoGraph, which would rewrite our ``if`` and ``for``, takes 0.6 of
    the time of a trace."""
    return tf.function(function, autograph=False, **options)


def make_optimizer(config: Config) -> keras_optimizers._WithSlots:
    o = config.optim
    if o.name in keras_optimizers.LAYERWISE:
        return keras_optimizers.LAYERWISE[o.name](o, TensorFlowOps())
    if o.name == "sgd":
        return keras_optimizers.SGD(o.lr, o.momentum, o.nesterov, o.weight_decay)
    return keras_optimizers.Adam(o.lr, o.betas, o.eps, o.weight_decay, decoupled=o.name == "adamw")


def packing(communicator: Communicator) -> Packing:
    """Joining costs a copy each way, a transfer of its own a message, which is dear over Gloo: with all but the largest
    tensors joined a small GPT is 1.9 times as fast, 200 thin layers 1.3 times, SINGA's CNN 1.2 times. One rank sends
    nothing, so it copies nothing."""
    large = 0 if communicator.size == 1 else 1 << 20 if communicator.mpi else 32 << 20
    return Packing(bucket_bytes=large, alone_bytes=large)


class _Later:
    """The sums of a step that waits for others, to run with them in one call."""

    def __init__(self, run: Callable[[], None]) -> None:
        self._run = run
        self.sums: Any = None

    def numpy(self) -> np.ndarray:
        if self.sums is None:
            self._run()
        return self.sums.numpy()


class TensorFlowFrontEnd(StateTree):
    def __init__(self, config: Config, communicator: Communicator, sample: Sample) -> None:
        self.config, self.communicator, self.ops = config, communicator, TensorFlowOps()
        self.packing, self._sample = packing(communicator), sample
        self.task = Task(config.task, sample, self.ops)
        self._device = _device(config, communicator)
        self.dtype = DTYPES.get(config.precision, "float32")
        keras.utils.clear_session()  # Keras numbers its layers: names must not depend on models built before
        keras.config.set_floatx(self.dtype)
        keras.config.set_dtype_policy(MIXED.get(config.precision, self.dtype))
        keras.utils.set_random_seed(config.seed)
        options = dict(config.model.options)
        with tf.device(self._device):
            self._one = tf.Variable(1.0, trainable=False)
            self.model, module, _ = build_model(
                TENSORFLOW.zoo, config.model.name, options, sample, restores=config.restores
            )
            self._try()
        if not self.model.trainable_variables:
            raise ConfigError("the model has no trainable variable", where=f"model.name: {config.model.name}")
        found = self.model.trainable_variables[0].dtype
        if found != self.dtype:
            fix = f"build it in a function, or after keras.config.set_dtype_policy('{self.dtype}')"
            raise ConfigError(f"the model's weights are {found}", where=f"precision: {config.precision}", fix=fix)
        self._batchnorm = tf_batchnorm.prepare(self.model, communicator, self.ops, config.sync_batchnorm)
        table = module.neutral(self.model) if hasattr(module, "neutral") else {}
        self._trainable = {v.path: v for v in self.model.trainable_variables}
        fixed = {v.path: v for v in self.model.non_trainable_variables}
        # A generator's state is no weight: broadcasting or comparing it would give all ranks the same dropout masks.
        self._seeds = [v for path, v in fixed.items() if path.endswith("seed_generator_state")]
        self._fixed = {path: v for path, v in fixed.items() if not path.endswith("seed_generator_state")}
        self.layouts = layouts_of({path: tuple(v.shape) for path, v in (self._trainable | self._fixed).items()}, table)
        if table:
            for path, weight in self._first_weights(self._trainable, config.seed):
                self._trainable[path].assign(weight)
        self._ask(sample)

    def _try(self) -> None:
        """Builds a model that is not, and shows whether it takes what the data give."""
        fields, plain = self._sample.inputs, len(self._sample.inputs) == 1
        # A functional model leaves out what it does not take.
        own = getattr(self.model, "_inputs_struct", None)
        try:
            if plain and not any(field.whole for field in fields.values()):
                if not self.model.built:
                    self.model.build((None, *self._sample.input_shape))
                elif may_be_images(self._sample):
                    self._evaluated(self.to_device(made_up(self._sample))[0])
                return
            if isinstance(own, dict) and not plain and own.keys() != fields.keys():
                raise ValueError(f"it has {', '.join(own)}")
            self._evaluated(self.to_device(made_up(self._sample))[0])
        except (TypeError, ValueError, KeyError, AttributeError, tf.errors.InvalidArgumentError) as error:
            raise untaken(self.config.model.name, self._sample, error) from error

    def specs(self) -> list[TensorSpec]:
        return [TensorSpec(self.layouts[p].name, tuple(v.shape), v.dtype) for p, v in self._trainable.items()]

    def without_dropout(self) -> None:
        for layer in self.model._flatten_layers():
            for rate in ("rate", "dropout", "recurrent_dropout", "stddev"):  # dropout, recurrent layers, noise
                if isinstance(getattr(layer, rate, None), float):
                    setattr(layer, rate, 0.0)

    def connect(self, exchange: Exchange) -> None:
        self.exchange = exchange
        threads = tf.config.threading.get_intra_op_parallelism_threads() or len(os.sched_getaffinity(0))
        wanted = self.config.exchange.overlap
        self._overlap = overlaps(wanted, self.communicator, self._device != "/CPU:0", threads)
        with tf.device(self._device):
            self._optimizer = make_optimizer(self.config)
            self._optimizer.build(list(self._trainable.values()))
            self._exchange_state = [
                tuple(tf.Variable(a, trainable=False) for a in arrays) for arrays in exchange.init_state()
            ]
            self._accumulated = [
                tf.Variable(tf.zeros(v.shape, v.dtype), trainable=False)
                for v in (self._trainable.values() if self.config.accumulate_grad_batches > 1 else ())
            ]
        self._waits = seconds_waited()  # within steps
        self._accumulate = _graph(self._traced_accumulate)
        self._step = _graph(self._traced_step)
        self._steps: dict[Any, Callable] = {}  # by the shape of a batch
        self._compiled: dict[Any, Callable] = {}
        steps = self.config.steps_per_execution
        # Micro-batches stand between steps, and whether a gradient was finite is asked after each. A GPU has work
        # while Python prepares more.
        self._alone = self.config.accumulate_grad_batches > 1 or self.config.checks_gradients
        self._alone |= steps == 1 or (steps == "auto" and self._device != "/CPU:0")
        self._per_call: int = 1 if steps == "auto" else steps
        self._calls, self._seconds = 0, math.inf  # of a step, the fastest
        self.queued: list[tuple[tuple[Any, ...], _Later]] = []
        self._compression_error = _graph(self._traced_compression_error)
        self._score = _graph(self._traced_score)
        self._predict = _graph(self._evaluated)

    def to_device(self, batch: Batch) -> tuple[dict[str, tf.Tensor], dict[str, tf.Tensor], tf.Tensor]:
        """Inputs as they are stored: what their fields tell is done in the graph, where it costs no call of its own."""
        with tf.device(self._device):
            inputs = {name: tf.constant(batch.inputs[name]) for name in self._sample.inputs}
            return inputs, *self._judged(batch)

    def _judged(self, batch: Batch) -> tuple[dict[str, tf.Tensor], tf.Tensor]:
        with tf.device(self._device):
            labels = {name: self._ready(batch.labels[name], field) for name, field in self._sample.labels.items()}
            return labels, tf.constant(batch.weights.astype(self.dtype, copy=False))

    def add_gradients(self, placed, scale: Scale, seed: int) -> tf.Tensor:
        numbers = tf.constant(self._scales(scale), self.dtype), tf.constant(seed, tf.int64)
        return self._run(self._accumulate, *placed, *numbers)

    def train_step(
        self, placed, scale: Scale, seed: int, learning_rate: float, unscale: float = 1.0
    ) -> tf.Tensor | _Later:
        rates = np.asarray(learning_rate, self.dtype), np.asarray(unscale, self.dtype)
        numbers = np.asarray(self._scales(scale), self.dtype), np.asarray(seed, np.int64), *rates
        if self._alone:
            sums, self._failures = self._run(self._step, *placed, *map(tf.constant, numbers))
            return sums
        later = _Later(self.run_queued)
        self.queued.append(((*placed, *numbers), later))
        if len(self.queued) == self._per_call:
            self.run_queued()
        return later

    def _run(self, graph: Any, *given: Any) -> Any:
        """A graph of (inputs, labels, weights, ...). To find the one of a batch's shapes among others takes TensorFlow
        0.4 ms a call; fields have theirs, so that the number of samples tells it."""
        key = graph, given[2].shape[0]
        if key not in self._compiled:
            like = tf.nest.map_structure(lambda x: tf.TensorSpec(x.shape, x.dtype), given)
            self._compiled[key] = graph.get_concrete_function(*like)
        return self._compiled[key](*given)

    def run_queued(self) -> None:
        steps, self.queued = self.queued, []
        if not steps:
            return
        flat = [tf.nest.flatten(given) for given, _ in steps]
        first = flat[0]
        if first[0].shape not in self._steps:
            like = tf.nest.map_structure(lambda x: tf.TensorSpec((None, *x.shape), x.dtype), steps[0][0])
            self._steps[first[0].shape] = _graph(self._traced_steps).get_concrete_function(*like)
        columns = [tf.stack(x) if tf.is_tensor(x[0]) else tf.constant(np.stack(x)) for x in zip(*flat, strict=True)]
        started = time.perf_counter()
        sums = self._steps[first[0].shape](*tf.nest.pack_sequence_as(steps[0][0], columns))
        for (_, later), own in zip(steps, tf.unstack(sums), strict=True):
            later.sums = own
        if self.config.steps_per_execution == "auto":
            self._calls += 1
            self._seconds = min(self._seconds, (time.perf_counter() - started) / len(steps))
            fits = CALL_BYTES // sum(x.shape.num_elements() * x.dtype.size for x in first if tf.is_tensor(x))
            self._per_call = max(1, min(int(CALL_SECONDS / self._seconds), fits, CALL_STEPS))
            self._alone = self._per_call == 1 and self._calls == 8  # a loop of one step is 5 % slower than none

    def waited(self) -> float:
        return super().waited() + float(self._waits)

    def finite(self) -> bool:
        return float(self._failures[0]) == 0

    def _measure(self, placed, scale: Scale, seed: int) -> tf.Tensor:
        return self._compression_error(
            *placed, tf.constant(self._scales(scale), self.dtype), tf.constant(seed, tf.int64)
        )

    def evaluate_batch(self, placed) -> tf.Tensor:
        self.run_queued()
        return self._run(self._score, *placed)

    def predict(self, placed) -> Any:
        self.run_queued()
        return tf.nest.map_structure(lambda x: x.numpy(), self._predict(placed[0]))

    def _backward(self, inputs, labels, weights, scale, seed) -> tuple[list[tf.Tensor], tf.Tensor]:
        # uint32 pairs, one per generator: masks depend on (seed, step, rank) and repeat after a resume.
        for i, variable in enumerate(self._seeds):
            pair = tf.stack([tf.bitwise.bitwise_and(seed, 0xFFFFFFFF), tf.bitwise.right_shift(seed, 32) + i])
            variable.value.assign(tf.cast(pair, variable.value.dtype))
        self._batchnorm.weights = weights
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            variables = [v.value for v in self._trainable.values()]
            tape.watch(variables)
            loss, sums = self.task(self._outputs(inputs, training=True), labels, weights, scale)
            loss += self._penalty(scale[0] * tf.cast(sums[self.task.entries[0][1]], self.dtype))
        gradients = tape.gradient(loss, variables, unconnected_gradients=tf.UnconnectedGradients.ZERO)
        return [tf.convert_to_tensor(g) for g in gradients], sums

    def _penalty(self, share) -> tf.Tensor | float:
        """What the weights' regularizers add: the shares of a step, of all ranks and micro-batches, are one."""
        own = self.model._get_regularization_losses()
        if len(self.model.losses) > len(own):  # a sum or a mean, over padding too: nobody knows
            what = "the model adds a loss of its own (add_loss, an activity regularizer), which cannot be shared out"
            fix = "give what it is taken from as an output, and a loss of your own of all outputs"
            raise ConfigError(what, where=f"model.name: {self.config.model.name}", fix=fix)
        return tf.stop_gradient(share) * tf.cast(tf.add_n(own), self.dtype) if own else 0.0

    def _outputs(self, inputs, training: bool) -> Any:
        ready = {name: self._ready(inputs[name], field) for name, field in self._sample.inputs.items()}
        found = checked(self.model(one_or_all(ready), training=training), self.config.model.name)
        return tf.nest.map_structure(lambda x: tf.cast(x, self.dtype), found)

    def _evaluated(self, inputs) -> Any:
        return self._outputs(inputs, training=False)

    def _ready(self, x, field: Field) -> tf.Tensor:
        """As its field tells. A graph makes a multiplication of a division by a constant, and other bits: what is
        multiplied by a variable is none."""
        x = tf.convert_to_tensor(x)
        if field.divisor != 1:
            x = tf.cast(x, tf.float32) / (field.divisor * self._one)
        if field.mean:
            x = (x - tf.constant(field.mean, tf.float32)) / (tf.constant(field.std, tf.float32) * self._one)
        return tf.cast(x, self.dtype) if x.dtype.is_floating else x if x.dtype.is_bool else tf.cast(x, tf.int64)

    def _traced_accumulate(self, inputs, labels, weights, scale, seed) -> tf.Tensor:
        gradients, sums = self._backward(inputs, labels, weights, scale, seed)
        for total, gradient in zip(self._accumulated, gradients, strict=True):
            total.assign_add(gradient)
        return sums

    def _traced_step(self, inputs, labels, weights, scale, seed, learning_rate, unscale) -> tuple[tf.Tensor, tf.Tensor]:
        gradients, sums = self._backward(inputs, labels, weights, scale, seed)
        for i, total in enumerate(self._accumulated):
            gradients[i] = gradients[i] + total
            total.assign(tf.zeros_like(total))
        if not self.config.checks_gradients:
            self._update(gradients, learning_rate)
            return sums, tf.zeros((1,))
        failures = self._awaited(gradients, lambda: self.exchange.failures(gradients))

        def update() -> tf.Tensor:
            self._update([g * unscale for g in gradients], learning_rate)
            return failures

        # All ranks take the same branch: the number of failures is joined over them.
        return sums, tf.cond(failures[0] > 0, lambda: failures, update)

    def _traced_steps(self, *columns) -> tf.Tensor:
        """As many steps as the columns have rows, one after the other -> (steps, sums)."""
        steps = tf.shape(columns[-1])[0]

        def body(k, sums) -> tuple[tf.Tensor, tf.TensorArray]:
            own, _ = self._traced_step(*tf.nest.map_structure(lambda column: column[k], columns))
            return k + 1, sums.write(k, own)

        start = 0, tf.TensorArray(tf.float64, steps, element_shape=(self.task.length,))
        return tf.while_loop(lambda k, _: k < steps, body, start, parallel_iterations=1)[1].stack()

    def _states(self) -> list[tuple[tf.Tensor, ...]]:
        return [tuple(v.value() for v in state) for state in self._exchange_state]

    def _update(self, gradients, learning_rate) -> None:
        if not self._overlap:
            with tf.control_dependencies(gradients):
                gradients = [tf.identity(g) for g in gradients]
        flats = self.exchange.join(gradients)
        reduced, states = self._awaited(gradients, lambda: self.exchange.reduce(flats, self._states()))
        for variables, values in zip(self._exchange_state, states, strict=True):
            for variable, value in zip(variables, values, strict=True):
                variable.assign(value)
        self._optimizer.learning_rate.assign(learning_rate)
        self._optimizer.apply(self.exchange.split(reduced), list(self._trainable.values()))

    def _awaited(self, gradients, transfer: Callable[[], Any]) -> Any:
        return transfer() if self.communicator.size == 1 else awaited(self._waits, gradients, transfer)

    def _traced_compression_error(self, inputs, labels, weights, scale, seed) -> tf.Tensor:
        gradients, _ = self._backward(inputs, labels, weights, scale, seed)
        return self.exchange.compression_error(self.exchange.join(gradients), self._states())

    def _traced_score(self, inputs, labels, weights) -> tf.Tensor:
        return self.task(self._evaluated(inputs), labels, weights)[1]

    def local_state(self) -> Tree:
        self.run_queued()
        return super().local_state()

    def load_local(self, tree: Mapping[str, np.ndarray]) -> None:
        self.run_queued()
        for b, state in enumerate(self._exchange_state):
            for k, variable in enumerate(state):
                variable.assign(tree[f"{b}/{k}"])

    def _variables(self) -> dict[str, tf.Variable]:
        self.run_queued()
        found = {f"weights/{p}": v for p, v in self._trainable.items()}
        found |= {f"statistics/{p}": v for p, v in self._fixed.items()}
        for slot, variables in self._optimizer.slots.items():
            found |= {f"slots/{slot}/{p}": v for p, v in zip(self._trainable, variables, strict=True)}
        if "exp_avg" in self._optimizer.slots:
            found["slots/step"] = self._optimizer.iterations
        return found

    def _keys(self) -> list[str]:
        return list(self._variables())

    def _views(self, keys: Collection[str] | None = None) -> Iterator[tuple[str, np.ndarray]]:
        for key, v in self._variables().items():
            if keys is None or key in keys:
                x = _view(v)
                yield key, x.astype(np.float32) if key == "slots/step" else x  # PyTorch counts in float32

    def _weights(self) -> Iterator[tuple[str, np.ndarray]]:
        self.run_queued()
        for path, variable in self._trainable.items():
            yield path, _view(variable)

    def _assign(self, arrays: Mapping[str, np.ndarray]) -> None:
        variables = self._variables()
        for key, array in arrays.items():
            variables[key].assign(np.asarray(array).astype(variables[key].dtype))


def seconds_waited() -> tf.Variable:
    """For ``awaited``."""
    with tf.device("/CPU:0"):
        return tf.Variable(0.0, trainable=False, dtype=tf.float64)


def awaited(waits: tf.Variable, gradients: Sequence[Any], transfer: Callable[[], Any]) -> Any:
    """In a graph: what ``transfer`` gives; ``waits`` counts the seconds from the last gradient to its end."""
    with tf.device("/CPU:0"), tf.control_dependencies(gradients):
        began = tf.timestamp()
    found = transfer()
    with tf.device("/CPU:0"), tf.control_dependencies(tf.nest.flatten(found)):
        waits.assign_add(tf.timestamp() - began)
    return found


def _view(variable) -> np.ndarray:
    """.numpy() would copy."""
    return np.asarray(memoryview(tf.convert_to_tensor(variable.value)))


def _device(config: Config, communicator: Communicator) -> str:
    gpus = tf.config.list_physical_devices("GPU")
    index = gpu_of(config, communicator, len(gpus), "TensorFlow")
    tf.config.set_visible_devices([] if index is None else [gpus[index]], "GPU")
    if index is None:
        return "/CPU:0"
    tf.config.experimental.set_memory_growth(gpus[index], True)
    return "/GPU:0"


def configure(threads: int) -> None:
    with suppress(RuntimeError):  # in a notebook TensorFlow may compute already: its threads stand
        tf.config.threading.set_intra_op_parallelism_threads(threads)
        tf.config.threading.set_inter_op_parallelism_threads(threads)


def open_frontend(config: Config, communicator: Communicator, sample: Sample) -> TensorFlowFrontEnd:
    return TensorFlowFrontEnd(config, communicator, sample)


def horovod(expected_size: int) -> HorovodTensorFlow:
    return HorovodTensorFlow(expected_size)


def cpu_ops() -> TensorFlowOps:
    return TensorFlowOps()


def gpus() -> int:
    return len(tf.config.list_physical_devices("GPU"))

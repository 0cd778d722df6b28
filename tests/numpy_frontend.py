"""A third framework, whole: softmax regression in NumPy. It trains, evaluates, predicts, resumes, and sums over ranks.

It needs no other framework. What a framework gives stands in the order of the page "extending":
operations, model, optimizer, communicator, and the functions of its module. ``tests/numpy_ranks.py`` has its record.
"""

from __future__ import annotations

import math
import time
from functools import partial, reduce

import ml_dtypes  # noqa: F401  makes NumPy know bfloat16
import numpy as np

from hvd_train.config import OptimConfig, TaskConfig
from hvd_train.errors import ConfigError
from hvd_train.frontends.base import StateTree
from hvd_train.frontends.named_arrays import NamedArrays, TensorLayout
from hvd_train.frontends.on_engine import EngineNumpy
from hvd_train.protocol import Field, Groups, Packing, Sample, TensorSpec
from hvd_train.task.task import Task
from hvd_train.update.state import EagerCell, EagerControl

# ---- operations (protocol.Ops)


class NumpyOps(EagerControl):
    """``EagerControl`` has the operations that decide when something runs."""

    from_numpy = to_numpy = stack = staticmethod(np.array)
    reshape, concat = staticmethod(np.reshape), staticmethod(np.concatenate)
    round, where, sum, max = map(staticmethod, (np.round, np.where, np.sum, np.max))

    def library_metric(self, metric, logits):
        return None

    def cast(self, x, dtype):
        return np.asarray(x).astype(dtype)

    def dtype(self, x):
        return x.dtype.name

    def keep(self, x):
        return EagerCell(np.array(x))

    def topk(self, x, k):
        return np.argpartition(-x, k - 1)[:k]

    def above(self, x, bound):
        return np.flatnonzero(~(x <= bound))

    def take(self, x, indices):
        return x[indices]

    def split(self, x, sizes):
        return np.split(x, np.cumsum(sizes)[:-1])

    def scatter(self, length, indices, values, *, same_bits=True):
        out = np.zeros(length, values.dtype)
        np.add.at(out, indices, values)
        return out

    def matmul(self, a, b, *, transpose_a=False, transpose_b=False):
        return (a.T if transpose_a else a) @ (b.T if transpose_b else b)

    def minus_product(self, x, a, b):
        return x - a @ b.T

    def orthonormal(self, x):
        return np.linalg.qr(x).Q

    def move_towards(self, cells, x, share):
        for cell, one in zip(cells, x, strict=True):
            cell.write(cell.read() + share * (one - cell.read()))

    def clip(self, x, limit):
        return np.clip(x, -limit, limit)

    def add_at(self, x, start, part):
        x[start : start + len(part)] += part
        return x

    def to_bytes(self, x):
        return x.view(np.uint8)

    def from_bytes(self, x, dtype):
        return x.view(dtype)

    def nbytes(self, x):
        return x.nbytes

    def cross_entropy(self, logits, labels, present=None):
        z = logits - logits.max(-1, keepdims=True)
        return np.log(np.exp(z).sum(-1)) - self.take_last(z, labels)

    def stop_gradient(self, x):
        return x

    def softplus(self, x):
        return np.logaddexp(x, 0)

    def sigmoid(self, x):
        return 1 / (1 + np.exp(-x))

    def argmax(self, x):
        return x.argmax(-1)

    def take_last(self, x, indices):
        return np.take_along_axis(x, indices[..., None], -1)[..., 0]

    def row_means(self, x):
        return x.reshape(len(x), -1).mean(1)

    def dot(self, a, b):
        return (a * b).sum()

    def sum_of_squares(self, x):
        return np.sum(np.square(x))

    def all_finite(self, x):
        return np.isfinite(x).all()


# ---- the model (protocol.FrontEnd)


class NumpyFrontEnd(StateTree):
    """Softmax regression. The running statistic is a moving average of this rank's inputs; no output depends on it.

    ``StateTree`` has names, averages, checksums and the defaults of what a framework may leave out. ``checks``: a step
    is left out where a gradient of some rank is not finite (``FrontEndConfig.checks_gradients``).
    """

    packing = Packing(bucket_bytes=1 << 20, alone_bytes=1 << 20)

    def __init__(self, groups, sample, task, optim, dtype="float64", checks=False):
        self.groups, self._sample, self.optim, self.dtype, self.checks = groups, sample, optim, dtype, checks
        self.ops, self.failed = NumpyOps(), False
        self.task = Task(task, sample, self.ops)
        input_size, num_classes = math.prod(sample.input_shape), sample.num_classes
        rng = np.random.default_rng(self.groups.world.rank)  # different on purpose: rank 0's must win
        self.w = {"w": rng.normal(size=(input_size, num_classes)), "b": rng.normal(size=num_classes)}
        self.w = {name: x.astype(self.dtype) for name, x in self.w.items()}
        self.statistic = np.zeros(1, dtype)
        # {name here: canonical name, and how axes are changed: not at all}
        self.layouts = {name: TensorLayout.of(x.shape, (name, None, None, x.shape)) for name, x in self.w.items()}
        self.layouts["mean"] = TensorLayout.of((1,), ("norm.mean", None, None, (1,)))
        self._discard_gradients()
        self._probe_task(sample)

    @classmethod
    def of(cls, ranks, features, classes, momentum=0.9, **options):
        """Make one for tests of something else; ``ranks``: a communicator, or Groups."""
        sample = Sample({"input": Field((features,), "float32")}, {"label": Field((), "int64", classes=classes)})
        groups = ranks if isinstance(ranks, Groups) else Groups.of(ranks)
        return cls(groups, sample, TaskConfig(), OptimConfig(momentum=momentum), **options)

    @property
    def _trainable(self):
        return self.w

    def specs(self):
        return [TensorSpec(name, x.shape, self.dtype) for name, x in self._unfrozen.items()]

    # -- state: ``StateTree`` makes trees for checkpoints of these

    def _readers(self):
        weights = {f"weights/{name}": partial(np.array, x) for name, x in self.w.items()}
        return weights | {"statistics/mean": partial(np.array, self.statistic)}

    def _assign(self, arrays):
        for key, array in arrays.items():
            kind, _, name = key.partition("/")
            if kind == "weights":
                self.w[name] = np.array(array, self.dtype)
            else:
                self.statistic = np.array(array, self.dtype)

    def _weights(self):
        return self.w.items()

    def flat_weights(self):
        return [flat.copy() for flat in self.update.exchange.to_buckets(list(self._unfrozen.values()))]

    # -- batches

    def to_device(self, batch):
        inputs = {name: self._scaled(batch.inputs[name], field) for name, field in self._sample.inputs.items()}
        return inputs, *self._place_labels(batch)

    def _place_labels(self, batch):
        return {name: batch.labels[name] for name in self._label_fields(batch)}, batch.weights.astype(self.dtype)

    def _scaled(self, x, field):
        """Scale an array as its field says, in 32 bits as the other frameworks do."""
        if field.divisor != 1:
            x = x.astype(np.float32) / np.float32(field.divisor)
        if field.mean:
            x = (x - np.array(field.mean, np.float32)) / np.array(field.std, np.float32)
        return x.astype(self.dtype)

    # -- training, evaluation, prediction

    def connect(self, update):
        self.update = update
        return NumpySGD(self)

    def _eval_outputs(self, inputs):
        (x,) = inputs.values()
        return x.reshape(len(x), -1) @ self.w["w"] + self.w["b"]

    def add_gradients(self, placed, scale, seed):
        inputs, labels, weights = placed
        (x,), (label,), (factor, *_) = inputs.values(), labels.values(), self._scales(scale)
        logits = self._eval_outputs(inputs)
        _, sums = self.task(logits, labels, weights)
        # Of the cross-entropy by the logits: softmax(z) - 1 for the label's class.
        error = np.exp(logits - logits.max(1, keepdims=True))
        error /= error.sum(1, keepdims=True)
        error[np.arange(len(x)), label] -= 1
        error *= weights[:, None] * factor
        x = x.reshape(len(x), -1)
        self.gradients["w"] += x.T @ error
        self.gradients["b"] += error.sum(axis=0)
        self.statistic = 0.9 * self.statistic + 0.1 * x.mean()
        return sums

    def train_step(self, placed, scale, seed, learning_rate, unscale=1.0):
        sums = self.add_gradients(placed, scale, seed)
        flats = self._flat_gradients(unscale)
        self.failed = self.checks and float(self.update.failures(flats)[0]) > 0
        if not self.failed:
            self.update.step(self.update.reduce(flats), learning_rate)
            self.update.begin()
        self._discard_gradients()
        return sums

    def accumulated_squares(self):
        return sum(np.sum(np.square(x), dtype=np.float64) for x in self.gradients.values())

    def _flat_gradients(self, factor=1.0):
        return self.update.exchange.to_buckets([self.gradients[name] * factor for name in self._unfrozen])

    def _discard_gradients(self):
        self.gradients = {name: np.zeros_like(x) for name, x in self.w.items()}

    def finite(self):
        return not self.failed

    def _measure_error(self, placed, scale, seed):
        self.add_gradients(placed, scale, seed)
        figures = self.update.compression_error(self._flat_gradients())
        self._discard_gradients()
        return figures

    def evaluate_batch(self, placed):
        inputs, labels, weights = placed
        return self.task.scores(self._eval_outputs(inputs), labels, weights)

    def predict(self, placed):
        return self._eval_outputs(placed[0])

    def without_dropout(self):
        pass  # it has none

    # -- running statistics by a pass over the data

    def begin_statistics(self):
        self._gathered = np.zeros(2)
        return True

    def add_statistics(self, placed):
        inputs, _, weights = placed
        (x,) = inputs.values()
        part = np.array([(self.ops.row_means(x) * weights).sum(), weights.sum()], np.float64)
        part = self.groups.data.allreduce_async(part, "statistics") if self.groups.data.size > 1 else part
        self._gathered += part if np.isfinite(part).all() else 0.0  # as batch normalization has it

    def take_statistics(self):
        self.statistic = (self._gathered[:1] / self._gathered[1]).astype(self.dtype)


# ---- the optimizer (protocol.Optimizer)


class NumpySGD(NamedArrays):
    """m = momentum m + g + decay w; w -= lr m, or lr (g + decay w + momentum m) after Nesterov."""

    words = 2  # of a key before a weight's name: slots/momentum/

    def __init__(self, frontend):
        self.frontend, self.layouts = frontend, frontend.layouts
        self.slots = {name: np.zeros_like(x) for name, x in frontend._unfrozen.items()}

    def step(self, gradients, learning_rate):
        w, o = self.frontend.w, self.frontend.optim
        for name, gradient in zip(self.slots, self.frontend.update.exchange.from_buckets(gradients), strict=True):
            gradient = gradient + o.weight_decay * w[name]
            self.slots[name] = o.momentum * self.slots[name] + gradient
            w[name] = w[name] - learning_rate * (
                gradient + o.momentum * self.slots[name] if o.nesterov else self.slots[name]
            )

    def weights(self, bucket):
        return np.concatenate(self.parts(bucket))

    def parts(self, bucket):
        names = list(self.slots)
        return [self.frontend.w[names[i]].reshape(-1) for i in self.frontend.update.buckets[bucket]]

    def take(self, bucket, weights):
        names, w = list(self.slots), self.frontend.w
        members = [names[i] for i in self.frontend.update.buckets[bucket]]
        for name, part in zip(members, NumpyOps().split(weights, [w[name].size for name in members]), strict=True):
            w[name] = part.reshape(w[name].shape).copy()

    def _readers(self):
        return {f"slots/momentum/{name}": partial(np.array, x) for name, x in self.slots.items()}

    def _assign(self, arrays):
        for key, array in arrays.items():
            self.slots[key.split("/", 2)[2]] = np.array(array)


# ---- a communicator (protocol.Communicator) for ranks that are threads; launched ranks take EngineNumpy


class Gathered:
    """All transfers as one: a subclass says how ``everyone`` collects a value of each rank, in rank order."""

    rank = local_rank = 0
    size = local_size = 1
    mpi, waited = False, 0.0

    def close(self):
        pass

    def failure(self, error=None):
        return None

    def timed(self, value):
        began = time.perf_counter()
        try:
            return self.everyone(value)
        finally:
            self.waited += time.perf_counter() - began

    def allreduce_async(self, x, name, op="sum"):
        parts = self.timed((name, np.array(x)))
        assert len({part[0] for part in parts}) == 1, f"ranks reduce different tensors: {parts}"
        total = reduce(np.add, [part[1] for part in parts])  # -0 and -0 is -0
        return total / self.size if op == "average" else total

    def allgather_async(self, x, name):
        return np.concatenate(self.timed(np.array(x)))

    def alltoall_async(self, x, sizes, name):
        parts = self.timed(NumpyOps().split(np.array(x), sizes))
        return np.concatenate([part[self.rank] for part in parts])

    def reduce_scatter_async(self, x, sizes, name):
        return NumpyOps().split(self.allreduce_async(x, name), sizes)[self.rank]

    def synchronize(self, handle):
        return handle

    def broadcast_bytes(self, data, root=0):
        return self.timed(data)[root]

    def allgather_bytes(self, data, name="bytes"):
        return self.timed(data)

    def gather_bytes(self, data):
        parts = self.timed(data)
        return parts if self.rank == 0 else []

    def scatter_bytes(self, parts):
        return self.timed(parts)[0][self.rank]

    def barrier(self):
        self.timed(None)


# ---- the module (protocol.FrontEndModule, protocol.CommunicatorModule)


def configure(threads):
    pass


def open_frontend(config, groups, sample):
    refuse_what_it_has_not(config)
    dtype = "float64" if config.precision == "64" else "float32"
    return NumpyFrontEnd(groups, sample, config.task, config.optim, dtype, config.checks_gradients)


def refuse_what_it_has_not(config):
    """Other numbers would come out, without a word."""
    losses = [loss for loss, _ in config.task.terms.values()]
    refused = {
        f"optim.name: {config.optim.name}": config.optim.name != "sgd",
        f"precision: {config.precision}": config.precision not in ("32", "64"),
        "optim.sharded": config.optim.sharded is True,
        "optim.groups": bool(config.optim.groups),
        f"task.loss: {', '.join(losses)}": losses != ["cross_entropy"],
        "task.class_weights": bool(config.task.class_weights),
    }
    for where, is_refused in refused.items():
        if is_refused:
            raise ConfigError("numpy has none of it", where=where, fix="leave it out, or take framework: pytorch")


def cpu_ops():
    return NumpyOps()


def gpus():
    return 0


def make_communicator(expected_size):
    return EngineNumpy(expected_size)

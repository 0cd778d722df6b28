"""A front-end of a few lines of NumPy and ranks that are threads: the core runs on them as on any framework."""

from __future__ import annotations

import functools
import math
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import ml_dtypes  # noqa: F401  makes NumPy know bfloat16
import numpy as np

from hvd_train.config import TaskConfig
from hvd_train.frontends.base import StateTree
from hvd_train.frontends.named_arrays import Layout, NamedArrays
from hvd_train.protocol import Field, Groups, Packing, Sample, TensorSpec
from hvd_train.task.task import Task
from hvd_train.update.state import Cell, EagerControl
from tests.limits import SECONDS


class NumpyOps(EagerControl):
    def library_metric(self, metric, logits):
        return None

    def from_numpy(self, x):
        return np.array(x)

    def to_numpy(self, x):
        return np.array(x)

    def cast(self, x, dtype):
        return np.asarray(x).astype(dtype)

    def keep(self, x):
        return Cell(np.array(x))

    def reshape(self, x, shape):
        return np.reshape(x, shape)

    def topk(self, x, k):
        return np.argpartition(-x, k - 1)[:k]

    def above(self, x, bound):
        return np.flatnonzero(~(x <= bound))

    def take(self, x, indices):
        return x[indices]

    def concat(self, parts, axis=0):
        return np.concatenate(parts, axis)

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

    def dtype(self, x):
        return x.dtype.name

    def round(self, x):
        return np.round(x)

    def where(self, condition, a, b):
        return np.where(condition, a, b)

    def sum(self, x, axis):
        return np.sum(x, axis=axis)

    def max(self, x, axis=None):
        return np.max(x, axis)

    def add_at(self, x, start, part):
        x[start : start + len(part)] += part
        return x

    def to_bytes(self, x):
        return x.view(np.uint8)

    def from_bytes(self, x, dtype):
        return x.view(dtype)

    def nbytes(self, x):
        return x.nbytes

    def stack(self, parts):
        return np.array(parts)

    def cross_entropy(self, logits, labels, own=None):
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


class World:
    """What the threads of one world share."""

    def __init__(self, size: int) -> None:
        self.size, self.slots = size, [None] * size
        self.barrier = threading.Barrier(size, timeout=SECONDS)

    def gather(self, rank, value):
        self.slots[rank] = value
        self.barrier.wait()
        everyone = list(self.slots)
        self.barrier.wait()
        return everyone


class Threads:
    """A communicator whose ranks are threads; sums are in rank order."""

    def __init__(self, world: World, rank: int) -> None:
        self.world, self.rank, self.size = world, rank, world.size
        self.local_rank, self.local_size, self.mpi, self.waited = rank, world.size, False, 0.0

    def open(self):
        pass

    def close(self):
        pass

    def allreduce_async(self, x, name, op="sum"):
        parts = self.world.gather(self.rank, (name, np.array(x)))
        assert len({part[0] for part in parts}) == 1, f"ranks reduce different tensors: {parts}"
        total = functools.reduce(np.add, [part[1] for part in parts])  # -0 and -0 is -0
        return total / self.size if op == "average" else total

    def allgather_async(self, x, name):
        return np.concatenate(self.world.gather(self.rank, np.array(x)))

    def alltoall_async(self, x, sizes, name):
        parts = self.world.gather(self.rank, np.split(np.array(x), np.cumsum(sizes)[:-1]))
        return np.concatenate([part[self.rank] for part in parts])

    def synchronize(self, handle):
        return handle

    def broadcast_bytes(self, data, root=0):
        return self.world.gather(self.rank, data)[root]

    def allgather_bytes(self, data, name="bytes"):
        return self.world.gather(self.rank, data)

    def gather_bytes(self, data):
        parts = self.world.gather(self.rank, data)
        return parts if self.rank == 0 else []

    def scatter_bytes(self, parts):
        return self.world.gather(self.rank, parts)[0][self.rank]

    def barrier(self):
        self.world.gather(self.rank, None)

    def window(self, entries, dtype):
        memories = self.world.gather(self.rank, np.zeros(entries, dtype))
        return ThreadsWindow(memories, self.world.gather(self.rank, threading.Lock())[0])


class ThreadsWindow:
    """``memories``: of all ranks, under one lock."""

    def __init__(self, memories, lock):
        self.memories, self.lock = memories, lock

    def read(self, rank, into):
        with self.lock:
            into[:] = self.memories[rank]

    def add(self, rank, x):
        with self.lock:
            self.memories[rank] += x

    def change(self, rank, to):
        with self.lock:
            old = self.memories[rank].copy()
            self.memories[rank][:] = to(old)
            return old

    def close(self):
        pass


def run_ranks(size, work):
    """[work(communicator)] of all ranks; the first error ends the others."""
    world = World(size)

    def guarded(rank):
        try:
            return work(Threads(world, rank))
        except threading.BrokenBarrierError:
            return None
        except BaseException:
            world.barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(guarded, rank) for rank in range(size)]
        return [future.result(SECONDS) for future in futures]


class NumpyFrontEnd(StateTree):
    """Softmax regression in float64 with momentum SGD; a "statistic" counts this rank's samples."""

    packing = Packing(bucket_bytes=1 << 20, alone_bytes=1 << 20)

    def __init__(self, ranks, input_size, num_classes, momentum=0.9, poison_at=None, checks=False):
        self.groups = ranks if isinstance(ranks, Groups) else Groups.of(ranks)
        self.ops, self.momentum = NumpyOps(), momentum
        label = Field((), "int64", classes=num_classes)
        self.task = Task(TaskConfig(), Sample({"input": Field((input_size,), "float32")}, {"label": label}), self.ops)
        rng = np.random.default_rng(self.groups.world.rank)  # different on purpose: rank 0's must win
        self.w = {"w": rng.normal(size=(input_size, num_classes)), "b": rng.normal(size=num_classes)}
        self.layouts = {n: Layout.of(x.shape, (n, None, None, x.shape)) for n, x in self.w.items()}
        self.layouts["mean"] = Layout.of((1,), ("norm.mean", None, None, (1,)))
        self.sums = {n: np.zeros_like(x) for n, x in self.w.items()}
        self.statistic = np.zeros(1)
        self.seeds, self.poison_at, self.steps = [], poison_at, 0
        self.checks, self.failed = checks, False

    def specs(self):
        return [TensorSpec(n, x.shape, "float64") for n, x in self.w.items()]

    def without_dropout(self):
        pass  # it has none

    def connect(self, update):
        self.update = update
        return NumpyMomentum(self)

    def to_device(self, batch):
        return batch

    def _place_labels(self, batch):
        return batch.labels, batch.weights

    def _forward(self, batch):
        (x,), (labels,) = batch.inputs.values(), batch.labels.values()
        x = x.reshape(len(x), -1).astype(np.float64)
        z = x @ self.w["w"] + self.w["b"]
        z -= z.max(axis=1, keepdims=True)
        logp = z - np.log(np.exp(z).sum(axis=1, keepdims=True))
        rows = np.arange(len(x))
        losses = -logp[rows, labels] * batch.weights
        correct = (logp.argmax(1) == labels) * batch.weights
        return x, logp, labels, np.array([losses.sum(), correct.sum(), batch.weights.sum()], np.float64)

    def add_gradients(self, batch, scale, seed):
        x, logp, labels, sums = self._forward(batch)
        self.seeds.append(seed)
        error = np.exp(logp)
        error[np.arange(len(x)), labels] -= 1
        error *= batch.weights[:, None].astype(np.float64) * scale
        self.sums["w"] += x.T @ error
        self.sums["b"] += error.sum(axis=0)
        self.statistic = 0.9 * self.statistic + 0.1 * x.mean()
        return sums

    def train_step(self, batch, scale, seed, learning_rate, unscale=1.0):
        sums = self.add_gradients(batch, scale, seed)
        if self.steps == self.poison_at:
            sums = sums * [np.nan, 1, 1]
        self.steps += 1
        flats = self.update.exchange.to_buckets([x * unscale for x in self.sums.values()])
        if self.checks:
            self.failed = float(self.update.failures(flats)[0]) > 0
            if self.failed:
                self.sums = {n: np.zeros_like(x) for n, x in self.w.items()}
                return sums
        self.update.step(self.update.reduce(flats), learning_rate)
        self.update.begin()
        self.sums = {n: np.zeros_like(x) for n, x in self.w.items()}
        return sums

    def begin_statistics(self):
        self.gathered = np.zeros(2)
        return True

    def add_statistics(self, batch):
        (x,) = batch.inputs.values()
        means = x.reshape(len(x), -1).astype(np.float64).mean(1)
        part = np.array([(means * batch.weights).sum(), batch.weights.sum()], np.float64)
        part = self.groups.data.allreduce_async(part, "statistics") if self.groups.data.size > 1 else part
        self.gathered += part if np.isfinite(part).all() else 0.0  # as batch normalization has it

    def take_statistics(self):
        self.statistic = self.gathered[:1] / self.gathered[1]

    def flat_weights(self):
        return [flat.copy() for flat in self.update.exchange.to_buckets(list(self.w.values()))]

    def finite(self):
        return not self.failed

    def _measure_error(self, batch, scale, seed):
        raise NotImplementedError

    def _eval_outputs(self, inputs):
        raise NotImplementedError

    def evaluate_batch(self, batch):
        return self._forward(batch)[3]

    def predict(self, batch):
        return self._forward(batch)[1]

    def _weights(self):
        return self.w.items()

    def _readers(self):
        weights = {f"weights/{n}": partial(np.array, x) for n, x in self.w.items()}
        return weights | {"statistics/mean": partial(np.array, self.statistic)}

    def _assign(self, arrays):
        for key, array in arrays.items():
            kind, _, name = key.partition("/")
            if kind == "weights":
                self.w[name] = np.array(array)
            else:
                self.statistic = np.array(array)


class NumpyMomentum(NamedArrays):
    """m = momentum m + g; w -= lr m."""

    words = 2

    def __init__(self, frontend):
        self.frontend, self.layouts = frontend, frontend.layouts
        self.slots = {n: np.zeros_like(x) for n, x in frontend.w.items()}

    def step(self, gradients, learning_rate):
        frontend = self.frontend
        for n, gradient in zip(frontend.w, frontend.update.exchange.from_buckets(gradients), strict=True):
            self.slots[n] = frontend.momentum * self.slots[n] + gradient
            frontend.w[n] = frontend.w[n] - learning_rate * self.slots[n]

    def weights(self, bucket):
        return self.frontend.update.exchange.to_buckets(list(self.frontend.w.values()))[bucket]

    def parts(self, bucket):
        weights = list(self.frontend.w.values())
        return [weights[i].reshape(-1) for i in self.frontend.update.buckets[bucket]]

    def take(self, bucket, weights):
        members, names = self.frontend.update.buckets[bucket], list(self.frontend.w)
        sizes = [self.frontend.w[names[i]].size for i in members]
        for i, part in zip(members, np.split(weights, np.cumsum(sizes)[:-1]), strict=True):
            self.frontend.w[names[i]] = part.reshape(self.frontend.w[names[i]].shape).copy()

    def _readers(self):
        return {f"slots/momentum/{n}": partial(np.array, x) for n, x in self.slots.items()}

    def _assign(self, arrays):
        for key, array in arrays.items():
            self.slots[key.split("/", 2)[2]] = np.array(array)


# ---- what a framework's record asks of its module (protocol.FrontEndModule)


def configure(threads):
    pass


def open_frontend(config, groups, sample):
    return NumpyFrontEnd(groups, math.prod(sample.input_shape), sample.num_classes, config.optim.momentum)


def make_communicator(expected_size):
    import torch

    from hvd_train.frontends.pytorch.communicator import HorovodTorch

    class HorovodNumpy(HorovodTorch):
        def allreduce_async(self, x, name, op="sum"):
            return super().allreduce_async(torch.from_numpy(np.array(x)), name, op)

        def allgather_async(self, x, name):
            return super().allgather_async(torch.from_numpy(np.array(x)), name)

        def alltoall_async(self, x, sizes, name):
            return super().alltoall_async(torch.from_numpy(np.array(x)), sizes, name)

        def synchronize(self, handle):
            return super().synchronize(handle).numpy()

    return HorovodNumpy(expected_size)


def cpu_ops():
    return NumpyOps()


def gpus():
    return 0

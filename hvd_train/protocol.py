"""The contracts between the core and everything that knows a framework, a network or a file format.

A *tensor* below is whatever the front-end computes with (``torch.Tensor``, ``tf.Tensor``, ``numpy.ndarray``).
State goes in and comes out: nothing here hides a dictionary, so the same code runs eagerly, traced and in checkpoints.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from hvd_train.errors import TrainError

Tensor = Any
Handle = Any
Tree = dict[str, np.ndarray]  # flat: key -> array


@dataclass(frozen=True)
class TensorSpec:
    """A trainable tensor: neutral name, shape in the front-end's own axis order, NumPy dtype name."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * np.dtype(self.dtype).itemsize


Fields = Mapping[str, np.ndarray]  # named arrays, first axis: samples


@dataclass(frozen=True)
class Field:
    """An array of one sample as it is stored and travels.

    The device divides it by ``divisor`` (bytes of an image by 255), in float32: a quarter of the bytes, the same bits;
    then, where it has a ``mean``, takes it away and divides by ``std``: a number each, or as many as the last axis has.
    Then numbers take the type of the weights, whole ones int64.
    ``classes``: of a label that is one of 0, 1, ..., how many there are; ``masked``: some of them are ``ignore_index``.
    ``image``: the axes are (height, width, channels); None becomes what earlier versions took, three axes of numbers.
    ``names``: the names of these classes in the order of their numbers, () where they have none. ``columns``: the names
    of the entries of the last axis, where they are columns of a table. None: an older checkpoint does not tell them.
    """

    shape: tuple[int, ...]
    dtype: str
    divisor: float = 1.0
    classes: int | None = None
    masked: bool = False
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    image: bool | None = None

    def __post_init__(self) -> None:
        if self.image is None:
            object.__setattr__(self, "image", len(self.shape) == 3 and not self.classes)

    names: tuple[str, ...] | None = ()
    columns: tuple[str, ...] | None = ()

    @property
    def whole(self) -> bool:
        """Whether it reaches the model as whole numbers, or as True and False."""
        return self.divisor == 1 and np.dtype(self.dtype).kind != "f"

    def __str__(self) -> str:
        return f"{self.shape} {self.dtype}"


@dataclass(frozen=True)
class Sample:
    """The fields of a sample. A model gets a single input as it is, several of them by their names.

    ``told_classes``: the number of classes that the data or the configuration tell where no label's loss is
    cross_entropy.
    """

    inputs: Mapping[str, Field]
    labels: Mapping[str, Field]
    told_classes: int | None = None

    @property
    def input_shape(self) -> Any:
        """What a build function gets: the shape, or {name: shape} where there are several inputs."""
        return one_or_all({name: field.shape for name, field in self.inputs.items()})

    @property
    def num_classes(self) -> Any:
        """The number of classes, or {label: number} where there are several labels; None: labels are no classes."""
        found = {name: field.classes for name, field in self.labels.items() if field.classes}
        return one_or_all(found) if found else self.told_classes

    def joined(self, other: Sample) -> Sample:
        """Of a training and a validation part: a class that only one of them holds is a class."""
        labels = {}
        for name, field in self.labels.items():
            its = other.labels[name]
            most = max(field.classes or 0, its.classes or 0) or None
            names = max(field.names or (), its.names or (), key=len)
            labels[name] = replace(field, classes=most, masked=field.masked or its.masked, names=names)
        return replace(self, labels=labels)


def made_up(sample: Sample) -> Batch:
    """Two samples of zeros."""
    inputs, labels = (
        {name: np.zeros((2, *field.shape), field.dtype) for name, field in fields.items()}
        for fields in (sample.inputs, sample.labels)
    )
    return Batch(inputs, labels, np.ones(2, np.float32), np.arange(2))


def one_or_all(named: Mapping[str, Any]) -> Any:
    return next(iter(named.values())) if len(named) == 1 else dict(named)


@dataclass(frozen=True)
class Batch:
    """One rank's part of a (micro-)batch, padded to a fixed length so that shapes never change.

    inputs, labels: {name: (length, ...)} as stored; a label is (length,) where a sample has one, (length, T) where it
    has one at each of T places; weights: (length,) float32, 1 for a sample and 0 for padding; indices: (count,) int64,
    the samples' places in the source, in the order in which they stand in ``inputs`` (padding comes last).
    """

    inputs: Fields
    labels: Fields
    weights: np.ndarray
    indices: np.ndarray

    @property
    def count(self) -> int:
        return len(self.indices)


class Source(Protocol):
    """A finite data set with random access. ``fetch`` must be a pure function of the indices.

    Where it has ``drawn(indices, seed, epoch)``, training takes its samples by that; with ``ordered = True`` in their
    own order, by one thread.
    """

    sample: Sample
    fingerprint: (
        str  # short hash of content (or of names, sizes and samples): equal on all ranks or training is refused
    )

    def __len__(self) -> int: ...

    def fetch(self, indices: np.ndarray) -> tuple[Fields, Fields]:
        """indices (k,) int64 -> inputs and labels, each {name: (k, *shape)} of its field's type.

        A sample's labels have the same shape everywhere; its loss is the mean over them, and so is its accuracy.
        """


class Communicator(Protocol):
    """Horovod's verbs over a front-end's tensors. ``serial.py`` is the identity, so no caller asks "if distributed"."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    mpi: bool  # whether MPI carries the transfers
    waited: float  # seconds within transfers, of those that this rank itself waits for

    def open(self) -> None: ...

    def close(self) -> None: ...

    def allreduce_async(self, x: Tensor, name: str, op: str = "sum") -> Handle:
        """Starts an allreduce (``op``: sum, average, adasum) of equally shaped tensors; may reduce ``x`` in place."""

    def allgather_async(self, x: Tensor, name: str) -> Handle:
        """Starts a concatenation over ranks along axis 0, in rank order; lengths may differ."""

    def alltoall_async(self, x: Tensor, sizes: Sequence[int], name: str) -> Handle:
        """Start sending ``sizes[k]`` consecutive entries of the flat ``x`` to rank k, for every rank k.

        ``synchronize`` gives what all ranks sent to this one, flat and in rank order. Sizes may differ between ranks.
        """

    def reduce_scatter_async(self, x: Tensor, sizes: Sequence[int], name: str) -> Handle:
        """Start a sum of the flat ``x`` over ranks, of which rank k gets the k-th part, ``sizes[k]`` entries.

        Ranks are added in rank order, so the result has the same bits in every run and over every transport. ``sizes``
        must be equal on all ranks; ``x`` is not changed.
        """

    def synchronize(self, handle: Handle) -> Tensor: ...

    def broadcast_bytes(self, data: bytes, root: int = 0) -> bytes: ...

    def allgather_bytes(self, data: bytes, name: str = "bytes") -> list[bytes]:
        """``name``: what a rank is told that waits for others which never come."""

    def barrier(self) -> None: ...

    def failure(self, error: BaseException | None = None) -> TrainError | None:
        """What ended the transfers of this rank, if something did: before, or ``error``, which came out of one. It
        stays, whoever catches it."""


class Ops(Protocol):
    """The tensor verbs that exchange and compression need; arithmetic operators come from the tensors themselves."""

    def from_numpy(self, x: np.ndarray) -> Tensor: ...
    def to_numpy(self, x: Tensor) -> np.ndarray: ...
    def cast(self, x: Tensor, dtype: str) -> Tensor: ...
    def dtype(self, x: Tensor) -> str:
        """NumPy's name of the tensor's type."""

    def keep(self, x: np.ndarray) -> Cell:
        """A cell with this tensor, which later steps read and write."""

    def reshape(self, x: Tensor, shape: Sequence[int]) -> Tensor: ...
    def topk(self, x: Tensor, k: int) -> Tensor:
        """Indices (k,) of the largest entries of the flat ``x``."""

    def above(self, x: Tensor, bound: float | Tensor) -> Tensor:
        """Indices (m,) of the entries of the flat ``x`` that are > bound, or no number; m depends on the data."""

    def take(self, x: Tensor, indices: Tensor) -> Tensor: ...
    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Flat tensors, one after the other."""

    def cut(self, x: Tensor, sizes: Sequence[int]) -> Sequence[Tensor]:
        """The flat ``x`` in parts of these sizes, which add up to its own."""

    def scatter(self, length: int, indices: Tensor, values: Tensor) -> Tensor:
        """A flat tensor of zeros into which values are added (an index may occur several times)."""

    def matmul(self, a: Tensor, b: Tensor, *, transpose_a: bool = False, transpose_b: bool = False) -> Tensor: ...
    def minus_product(self, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """x - a b^T, which may take the place of ``x``."""

    def orthonormal(self, x: Tensor) -> Tensor:
        """An orthonormal basis of the column space of ``x`` (QR). What ranks compute after an exchange must have the
        same bits on all: this, ``matmul`` over a short axis, ``sum_of_squares`` and ``scatter`` know no threads."""

    def clip(self, x: Tensor, limit: float) -> Tensor:
        """Entries of ``x`` limited to [-limit, limit]."""

    def round(self, x: Tensor) -> Tensor:
        """Entries at the nearest whole number, halves at the even one."""

    def where(self, condition: Tensor, a: Tensor | float, b: Tensor | float) -> Tensor:
        """Entries of ``a`` where the condition holds, else of ``b``; one of them may be a number."""

    def add_rows(self, x: Tensor) -> Tensor:
        """The sum over axis 0."""

    def largest(self, x: Tensor) -> Tensor:
        """The largest entry, a tensor of shape ()."""

    def to_bytes(self, x: Tensor) -> Tensor:
        """The flat ``x`` as (bytes,) uint8, in this machine's byte order."""

    def from_bytes(self, x: Tensor, dtype: str) -> Tensor: ...

    def nbytes(self, x: Tensor) -> Tensor:
        """A number or a tensor of shape (): the size may depend on the data."""

    def stack(self, parts: Sequence[Tensor]) -> Tensor:
        """Tensors of shape () -> (len(parts),)."""

    def sum_of_squares(self, x: Tensor) -> Tensor: ...
    def cross_entropy(self, logits: Tensor, labels: Tensor, own: Tensor | None = None) -> Tensor:
        """Logits (n, ..., C), labels (n, ...) -> the cross-entropy of each label (n, ...); where ``own`` (n, ...) is 0
        nobody asks for it."""

    def constant(self, x: Tensor) -> Tensor:
        """The same numbers, through which no gradient goes."""

    def softplus(self, x: Tensor) -> Tensor:
        """log(1 + e^x)."""

    def sigmoid(self, x: Tensor) -> Tensor: ...
    def argmax(self, x: Tensor) -> Tensor:
        """(..., C) -> (...) int64: the place of the largest entry of the last axis."""

    def pick(self, x: Tensor, indices: Tensor) -> Tensor:
        """(..., C) and (...) -> (...): an entry of the last axis."""

    def add_last(self, x: Tensor) -> Tensor:
        """The sum over the last axis."""

    def row_means(self, x: Tensor) -> Tensor:
        """(n, ...) -> (n,): the mean of each row."""

    def dot(self, a: Tensor, b: Tensor) -> Tensor:
        """(n,) and (n,) -> (): the sum of the products."""

    def all_finite(self, x: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class Wire:
    """What travels: ``sum`` tensors are added over ranks, ``gather`` tensors are concatenated along axis 0."""

    kind: str
    tensors: tuple[Tensor, ...]


State = tuple[Tensor, ...]  # a compressor's state for one bucket: residual, low-rank basis, ...
Rounds = Generator[Wire, tuple[Tensor, ...], tuple[Tensor, State]]


class Compressor(Protocol):
    """Turns one gradient into wires and back; it never sees a network.

    Law: input + old residual = this rank's decoded part + new residual.
    """

    per_tensor: bool  # True: wants each tensor in its own shape (PowerSGD); False: works on flat buckets

    def init_state(self, shape: tuple[int, ...], dtype: str) -> tuple[np.ndarray, ...]: ...

    def rounds(self, gradient: Tensor, state: State, ops: Ops) -> Rounds:
        """Yields a wire, receives it reduced, once or several times; returns (decoded sum over ranks, new state)."""


Sums = Tensor  # float64, as the task has them (task/task.py); by default [loss, number correct, number of samples]


@dataclass(frozen=True)
class Packing:
    """How tensors fill buckets: at most ``bucket_bytes`` in one; from ``alone_bytes`` on a tensor goes alone."""

    bucket_bytes: int
    alone_bytes: int


Scale = float | Sequence[float]


class FrontEnd(Protocol):
    """A model, its optimizer and its device in one framework.

    A step is: any number of ``add_gradients`` calls, then one ``train_step``, which hands the gradients to the update.
    ``scale`` is 1 / (samples of the global batch), known beforehand from the order of samples, so that summing
    gradients over micro-batches and ranks gives the gradient of the global mean loss; or a number for each loss, where
    labels tell how much they count (``counts``).
    """

    ops: Ops
    task: Any  # task.task.Task
    communicator: Communicator
    packing: Packing

    @property
    def queued(self) -> Sequence[Any]:
        """Steps that were handed in and have not run: they do when enough are there."""

    def specs(self) -> list[TensorSpec]:
        """Trainable tensors, in the same order on every rank."""

    def without_dropout(self) -> None:
        """Sets the rate of every dropout layer to 0; before ``connect``."""

    def connect(self, update: Update) -> Optimizer:
        """Build the optimizer and its slots over the update's buckets, and take it for every later ``train_step``.

        Without it a front-end evaluates and predicts, and its state is weights and running statistics alone.
        """

    def to_device(self, batch: Batch) -> Any: ...

    def counts(self, batch: Batch) -> np.ndarray:
        """(losses,) float64: by how much each loss of this batch counts."""

    def add_gradients(self, placed: Any, scale: Scale, seed: int) -> Sums: ...

    def train_step(self, placed: Any, scale: Scale, seed: int, learning_rate: float, unscale: float = 1.0) -> Sums:
        """``unscale``: what the gradient is multiplied by before it is exchanged, with a scaled loss."""

    def run_queued(self) -> None:
        """Runs the steps that ``queued`` holds; whatever asks for what they change does it by itself."""

    def finite(self) -> bool:
        """``Config.checks_gradients``: whether those of the last step were finite on all ranks; else no weight, slot or
        residual changed."""

    def waited(self) -> float:
        """Seconds in which this rank has waited for transfers since it began; with no step queued."""

    def statistics(self) -> Tree:
        """Copies of this rank's running statistics, for ``put_back``."""

    def put_back(self, kept: Tree) -> None: ...

    def neutral(self, own: Tree) -> Tree:
        """What ``statistics`` gives, as ``load`` takes it."""

    def compression_error(self, placed: Any, scale: Scale, seed: int) -> Tensor:
        """The figures of ``update/error_meter.py`` for this batch's gradient, which is then forgotten."""

    def evaluate_batch(self, placed: Any) -> Sums: ...

    def predict(self, placed: Any) -> np.ndarray:
        """(at least count, ..., num_classes) float: logits, one row for each label; padding may follow."""

    def state(self, into: Tree | None = None) -> Tree:
        """Copies of what a model is: weights ``weights/NAME``, running statistics ``statistics/NAME``.

        ``into``: an earlier one, whose memory is taken for it."""

    def load(self, tree: Mapping[str, np.ndarray]) -> None:
        """Takes a tree of ``state``; tensors that are not in it stay as they are."""

    def checksums(self) -> dict[str, int]:
        """{neutral name: 64-bit sum of a weight's bits}, in the same order on every rank; cheaper than ``state``."""

    def average(self, names: Sequence[str] | None = None) -> None:
        """Averages the named weights (None: all weights and running statistics) over the ranks, in place."""

    def average_statistics(self) -> None:
        """Averages the running statistics alone: they are what each rank gathers for itself."""


class FrontEndModule(Protocol):
    """The module that a framework's record names (hvd_train/frameworks.py); loading it loads the framework."""

    def configure(self, threads: int) -> None:
        """Before the first tensor: this rank's share of the cores."""

    def open_frontend(self, config: Any, communicator: Communicator, sample: Sample) -> FrontEnd:
        """``config``: a ``Config``, which itself asks what frameworks there are."""

    def cpu_ops(self) -> Ops: ...

    def gpus(self) -> int:
        """How many the framework sees."""


class CommunicatorModule(Protocol):
    """The module that carries a framework's tensors between ranks, named by the framework's record."""

    def make_communicator(self, expected_size: int) -> Communicator:
        """Not yet opened; ``expected_size``: the ranks that the launcher started."""


class Exchange(Protocol):
    """Gradients in, reduced gradients out (update/exchange.py): called eagerly, from hooks, or while tracing."""

    communicator: Communicator
    ops: Ops

    @property
    def buckets(self) -> Sequence[Sequence[int]]:
        """Indices into ``specs()``; each bucket travels as one flat tensor."""

    def init_state(self) -> list[tuple[np.ndarray, ...]]: ...

    def join(self, tensors: Sequence[Tensor]) -> list[Tensor]: ...

    def split(self, flats: Sequence[Tensor]) -> list[Tensor]: ...

    def reduce(self, flats: Sequence[Tensor], states: Sequence[State]) -> tuple[list[Tensor], list[State]]: ...

    def start(self, bucket: int, gradient: Tensor, state: State) -> Any: ...

    def finish(self, started: Sequence[Any]) -> tuple[list[Tensor], list[State]]: ...

    def failures(self, gradients: Sequence[Tensor]) -> Tensor: ...


class Cell(Protocol):
    """A tensor that a later step reads: a residual, for one."""

    def read(self) -> Tensor: ...

    def write(self, tensor: Tensor) -> None: ...


class Optimizer(Protocol):
    """Weights in buckets, their slots, and the formula that moves both by a gradient."""

    def step(self, gradients: Sequence[Tensor], learning_rate: Any) -> None:
        """Move weights and slots; ``gradients``: (n,) for each bucket."""

    def views(self) -> Iterable[tuple[str, Callable[[], np.ndarray]]]:
        """(name, what reads it) of each slot, ``slots/SLOT/NAME`` with the weight's neutral name."""

    def load(self, tree: Mapping[str, np.ndarray]) -> None:
        """Take slots by these names; others stay as they are."""


class Update(Protocol):
    """Everything between the backward pass and new weights (update/replicated.py); called on all ranks alike."""

    exchange: Exchange
    diverged: bool  # whether the ranks' weights may differ now
    local_gradients: bool  # a rank's gradient is the mean over its own samples, not its part of the global mean

    @property
    def buckets(self) -> Sequence[Sequence[int]]: ...

    def start(self, bucket: int, gradient: Tensor) -> Any: ...

    def finish(self, started: Sequence[Any]) -> list[Tensor]: ...

    def reduce(self, gradients: Sequence[Tensor]) -> list[Tensor]: ...

    def step(self, gradients: Sequence[Tensor], learning_rate: Any) -> None: ...

    def failures(self, gradients: Sequence[Tensor]) -> Tensor: ...

    def compression_error(self, gradients: Sequence[Tensor]) -> Tensor: ...

    def after_step(self, step: int) -> None: ...

    def converge(self) -> None: ...

    def state(self) -> Sequence[Any]:
        """A list of update.state.Entry."""

    def load(self, tree: Mapping[str, np.ndarray], placement: Any) -> None: ...


Build = Callable[..., Any]  # a model function: build(**options), with input_shape= and num_classes= if it has them

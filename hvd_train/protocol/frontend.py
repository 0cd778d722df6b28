"""The contract of a front-end, in parts. Code that needs one part asks for that part alone."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from hvd_train.protocol.communicator import Groups
from hvd_train.protocol.data import Batch, Sample
from hvd_train.protocol.ops import Ops
from hvd_train.protocol.tensors import Tensor, TensorSpec, Tree
from hvd_train.protocol.update import DividedUpdate, HostMemory, Optimizer, Packing, ShardedOptimizer, StepUpdate

# float64, as the task has them (task/task.py); by default [loss, number correct, number of samples].
Sums = Tensor
# What each loss is multiplied by: one number for all of them; or one for each, and at the end that of a sample.
Scale = float | Sequence[float]


class FrontEndPart(Protocol):
    """What each part has: the framework's operations on tensors, and the ranks."""

    ops: Ops
    groups: Groups


class Model(FrontEndPart, Protocol):
    """The tensors of a model, by name: their shapes, and how they are read and written.

    Checkpoints have canonical names and axes, which are the same in every framework.
    """

    def specs(self) -> list[TensorSpec]:
        """Trainable tensors of this rank, in the same order on every rank of ``groups.data``; none that is frozen."""

    def state(self, into: Tree | None = None) -> Tree:
        """Copy what a model is: weights ``weights/NAME``, running statistics ``statistics/NAME``.

        ``into``: an earlier one, whose memory is taken for it."""

    def views(self) -> Iterable[tuple[str, Callable[[], np.ndarray]]]:
        """(name, what reads it) of each array of ``state``, not copied where that can be helped."""

    def load(self, tree: Mapping[str, np.ndarray]) -> None:
        """Take a tree of ``state``; tensors that are not in it stay as they are."""

    def to_canonical(self, name: str, stored: np.ndarray) -> np.ndarray:
        """Turn an array in the shape that ``specs`` has for this name into canonical axes."""

    def to_stored(self, name: str, canonical: np.ndarray) -> np.ndarray:
        """Turn an array in canonical axes into the shape of ``specs``."""


class Replica(Model, Protocol):
    """A rank's copy of a model, which is compared and averaged with the copies of other ranks."""

    whole: Tree  # {key: an array of the shape} of the whole model's state, where this rank has a part of it; else {}

    @property
    def axes(self) -> str:
        """The order in which the axes of weights and gradients lie, in words, where a framework has several."""

    def checksums(self) -> dict[str, int]:
        """{canonical name: 64-bit sum of a weight's bits}, in the same order on every rank; cheaper than ``state``."""

    def average(self, names: Collection[str]) -> None:
        """Average the weights of these canonical names over the ranks, in place."""


class WeightNames(Model, Protocol):
    """A model that can begin with the weights of a file: what they are called there."""

    def aliases(self, canonical: bool) -> Mapping[str, tuple[str, Any]]:
        """Return {name in a file of weights: (key of ``state``, Layout of the file's axes; None: canonical)}.

        ``canonical``: the file has names and axes of checkpoints, else those of the framework, with dots for slashes.
        """

    def names_here(
        self, path: Path | None, names: Collection[str], given: Callable[[str], bool], where: str
    ) -> Mapping[str, str]:
        """Return {name in a file: name in ``aliases``; "": none} where the two may differ.

        ``path``: a file of the framework; None: the ``names`` are those of a checkpoint. ``given``: whether the user
        says what a name is. Raises ConfigError where another name cannot be told.
        """


class TracksStatistics(FrontEndPart, Protocol):
    """A model with batch normalization, whose running statistics each rank gathers from its own samples."""

    def running_statistics(self) -> Tree:
        """Copy this rank's, ``statistics/NAME`` as in ``state``; ``load`` takes them back."""

    def load(self, tree: Mapping[str, np.ndarray]) -> None: ...

    def average_statistics(self) -> None:
        """Make them equal on all ranks, in place: their mean."""


class GathersStatistics(TracksStatistics, Protocol):
    """A model whose running statistics can be computed anew by a pass over the training data."""

    def to_device(self, batch: Batch) -> Any: ...

    def run_queued(self) -> None: ...

    def begin_statistics(self) -> bool:
        """Begin to gather the statistics of batch normalization; return whether the model has any."""

    def add_statistics(self, placed: Any) -> None:
        """Add those of this rank's part of a micro-batch. All ranks call it.

        The model computes as in evaluation, but batch normalization by the statistics of the whole micro-batch.
        """

    def take_statistics(self) -> None:
        """Give the layers the statistics of all samples since ``begin_statistics``."""


class Parameters(Model, Protocol):
    """The trainable tensors as an update moves them: in flat buckets, between steps or within one that is traced."""

    packing: Packing

    def connect(self, update: StepUpdate) -> Optimizer:
        """Build the optimizer and its slots over the update's buckets, and take it for every later ``train_step``.

        Without it a front-end evaluates and predicts, and its state is weights and running statistics alone.
        """

    def flat_weights(self) -> list[Tensor]:
        """Return (n,) for each bucket of the update: the weights of now, which later steps do not change."""

    def run_queued(self) -> None:
        """Run the steps that ``Trainable.queued`` holds; whatever asks for what they change does it by itself."""

    def retrace(self) -> None:
        """Run queued steps, and take the update as it is now for later ones: its exchange has changed."""

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function of tensors to call between steps, which reads and changes weights and cells."""

    def in_background(
        self, start: Callable[..., Any], finish: Callable[[Any], Any]
    ) -> Callable[..., Callable[[], Any]]:
        """Return a function of tensors that starts a transfer, during which training goes on.

        It calls ``start`` with the tensors; what it returns waits for the transfer and gives the result of ``finish``,
        called with that of ``start``. Neither reads weights or cells.
        """


class Shardable(Parameters, Protocol):
    """Trainable tensors of which each rank can move a part (``optim.sharded``)."""

    def host_memory(self) -> HostMemory | None:
        """Connect the ranks that share the data, which all call this; None if they cannot share memory."""

    def connect_sharded(self, update: DividedUpdate) -> ShardedOptimizer:
        """Do what ``connect`` does for an optimizer of this rank's parts."""


class Trainable(FrontEndPart, Protocol):
    """A model that takes steps.

    A step is: any number of ``add_gradients`` calls, then one ``train_step``, which hands the gradients to the update.
    ``scale`` is 1 / (samples of the global batch), known beforehand from the order of samples, so that summing
    gradients over micro-batches and ranks gives the gradient of the global mean loss; or a number for each loss, where
    the labels decide how much they count (``counts``).
    """

    task: Any  # task.task.Task

    @property
    def queued(self) -> Sequence[Any]:
        """Steps that were handed in and have not run: they do when enough are there."""

    def freeze(self, names: Collection[str], fixed: Collection[str] = ()) -> None:
        """Leave the trainable tensors of these names as they are from the next ``connect`` on, and no others.

        ``fixed``: those whose batch normalization uses its running statistics in training, and leaves them.
        """

    def without_dropout(self) -> None:
        """Set the rate of every dropout layer to 0; before ``connect``."""

    def to_device(self, batch: Batch) -> Any: ...

    def counts(self, batch: Batch) -> np.ndarray:
        """(losses,) float64: by how much each loss of this batch counts."""

    def add_gradients(self, placed: Any, scale: Scale, seed: int) -> Sums: ...

    def train_step(self, placed: Any, scale: Scale, seed: int, learning_rate: float, unscale: float = 1.0) -> Sums:
        """``unscale``: what the gradient is multiplied by before it is exchanged, with a scaled loss."""

    def run_queued(self) -> None: ...

    def finite(self) -> bool:
        """Return whether the gradients of the last step were finite on all ranks, with
        ``FrontEndConfig.checks_gradients``; else no weight, slot or residual changed."""

    def compression_error(self, placed: Any, scale: Scale, seed: int) -> Tensor:
        """The figures of ``update/error_meter.py`` for this batch's gradient, which is then forgotten."""


class Evaluable(FrontEndPart, Protocol):
    """A model that is evaluated, and predicts."""

    task: Any  # task.task.Task

    def to_device(self, batch: Batch) -> Any: ...

    def average_statistics(self) -> None: ...

    def evaluate_batch(self, placed: Any) -> Sums:
        """Return the sums of the task, and behind them what ``Task.scores`` adds."""

    def predict(self, placed: Any) -> np.ndarray:
        """(at least count, ..., num_classes) float: logits, one row for each label; padding may follow."""


class Runtime(Protocol):
    """What the training costs this rank: time and memory."""

    def waited(self) -> float:
        """Return the seconds in which this rank has waited for transfers since it began; with no step queued."""

    def peak_device_bytes(self) -> int:
        """Return the most memory of a GPU that this rank's tensors have taken; 0: they lie in the host's."""


class FrontEnd(Shardable, Replica, WeightNames, GathersStatistics, Trainable, Evaluable, Runtime, Protocol):
    """A model, its optimizer and its device in one framework: all parts together, as a job opens and hands them on."""


class FrontEndModule(Protocol):
    """The module that a framework's record names (hvd_train/frameworks.py); loading it loads the framework."""

    def configure(self, threads: int) -> None:
        """Take this rank's share of the cores; before the first tensor."""

    def open_frontend(self, config: Any, groups: Groups, sample: Sample) -> FrontEnd:
        """``config``: a ``FrontEndConfig``, whose file itself asks what frameworks there are."""

    def cpu_ops(self) -> Ops: ...

    def gpus(self) -> int:
        """Count the GPUs that the framework sees."""


# A model function: build(**options), with input_shape= and num_classes= if it has them.
Build = Callable[..., Any]

"""The contract of a front-end, in parts, so that code can depend on the part that it needs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from hvd_train.protocol.communicator import Groups
from hvd_train.protocol.data import Batch, Sample
from hvd_train.protocol.ops import Ops
from hvd_train.protocol.tensors import Tensor, TensorSpec, Tree
from hvd_train.protocol.update import DividedUpdate, HostMemory, Optimizer, Packing, ShardedOptimizer, StepUpdate

# float64, defined by the task (task/task.py); by default [loss, number correct, number of samples].
Sums = Tensor
# The factor of the loss: one number for all losses, or one for each and then the factor of a sample.
Scale = float | Sequence[float]


class FrontEndPart(Protocol):
    """The base of all parts: tensor operations and groups of ranks."""

    ops: Ops
    groups: Groups


class Model(FrontEndPart, Protocol):
    """The named tensors of a model: their shapes, and access to their values.

    Checkpoints use canonical names and axes, which are the same in every framework.
    """

    def specs(self) -> list[TensorSpec]:
        """List this rank's trainable tensors, except frozen ones, in the same order on all ranks of ``groups.data``."""

    def state(self, into: Tree | None = None) -> Tree:
        """Copy the model's state: weights ``weights/NAME``, running statistics ``statistics/NAME``.

        ``into``: an earlier copy, whose memory is reused."""

    def views(self) -> Iterable[tuple[str, Callable[[], np.ndarray]]]:
        """Yield (name, reader) for each array of ``state``; readers avoid copies if possible."""

    def load(self, tree: Mapping[str, np.ndarray]) -> None:
        """Load arrays of ``state``; tensors that are not in ``tree`` stay unchanged."""

    def to_canonical(self, name: str, stored: np.ndarray) -> np.ndarray:
        """Convert an array from its shape in ``specs`` to canonical axes."""

    def to_stored(self, name: str, canonical: np.ndarray) -> np.ndarray:
        """Convert an array from canonical axes to its shape in ``specs``."""


class Replica(Model, Protocol):
    """A rank's copy of the model, which can be compared and averaged with the other ranks'."""

    whole: Tree  # {key: an array of the shape} of the whole model's state if this rank has a part of the model; else {}

    @property
    def axes(self) -> str:
        """Describe the memory layout of weights and gradients, if the framework has several."""

    def checksums(self) -> dict[str, int]:
        """Return {canonical name: 64-bit sum of a weight's bits}, in the same order on every rank."""

    def average(self, names: Collection[str]) -> None:
        """Average the named weights (canonical names) over the ranks, in place."""


class WeightNames(Model, Protocol):
    """A model that can be initialized from a file: the names of its weights there."""

    def aliases(self, canonical: bool) -> Mapping[str, tuple[str, Any]]:
        """Return {name in a file of weights: (key of ``state``, Layout of the file's axes; None: canonical)}.

        ``canonical``: the file has the names and axes of checkpoints, else the framework's, with dots for slashes.
        """

    def names_here(
        self, path: Path | None, names: Collection[str], given: Callable[[str], bool], where: str
    ) -> Mapping[str, str]:
        """Return {name in a file: name in ``aliases``; "": none} for names that may differ.

        ``path``: a file of the framework; None: the ``names`` are those of a checkpoint. ``given``: whether the user
        maps a name. Raises ConfigError for a name that cannot be matched.
        """


class TracksStatistics(FrontEndPart, Protocol):
    """A model with running statistics of batch normalization, which each rank computes from its own samples."""

    def running_statistics(self) -> Tree:
        """Copy this rank's running statistics, ``statistics/NAME`` as in ``state``; ``load`` restores them."""

    def load(self, tree: Mapping[str, np.ndarray]) -> None: ...

    def average_statistics(self) -> None:
        """Average the running statistics over all ranks, in place."""


class GathersStatistics(TracksStatistics, Protocol):
    """A model whose running statistics can be recomputed by a pass over the training data."""

    def to_device(self, batch: Batch) -> Any: ...

    def run_queued(self) -> None: ...

    def begin_statistics(self) -> bool:
        """Start recomputing the running statistics; return whether the model has any."""

    def add_statistics(self, placed: Any) -> None:
        """Add the statistics of this rank's part of a micro-batch. All ranks call it.

        The model is in evaluation mode, but batch normalization uses the statistics of the whole micro-batch.
        """

    def take_statistics(self) -> None:
        """Set the running statistics to those of all samples since ``begin_statistics``."""


class Parameters(Model, Protocol):
    """The trainable tensors as an update uses them: in flat buckets, between steps or within a traced step."""

    packing: Packing

    def connect(self, update: StepUpdate) -> Optimizer:
        """Build the optimizer and its state over the update's buckets; later ``train_step`` calls use it.

        Without it a front-end evaluates and predicts, and its state is weights and running statistics only.
        """

    def flat_weights(self) -> list[Tensor]:
        """Return the current weights, (n,) for each bucket of the update; later steps do not change the result."""

    def run_queued(self) -> None:
        """Run the steps in ``Trainable.queued``; whatever reads their results does so implicitly."""

    def retrace(self) -> None:
        """Run queued steps, and trace later ones again, because the update's exchange has changed."""

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Compile a function of tensors that reads and changes weights and cells, to be called between steps."""

    def in_background(
        self, start: Callable[..., Any], finish: Callable[[Any], Any]
    ) -> Callable[..., Callable[[], Any]]:
        """Return a function of tensors that starts a transfer in the background.

        It calls ``start`` with the tensors and returns a function that waits for the transfer and returns the result of
        ``finish``, called with that of ``start``. Neither reads weights or cells.
        """


class Shardable(Parameters, Protocol):
    """A model of which each rank can update a part of the weights (``optim.sharded``).

    ``sharded_from``: with at least so many weights ``auto`` shards on one host.
    """

    sharded_from: int

    def host_memory(self, auto: bool = False) -> HostMemory | None:
        """Set up shared memory among the ranks of a host; None if they cannot. All ranks of ``groups.data`` call it.

        ``auto``: None, too, if there are several hosts, or a rank's model may change weights.
        """

    def may_change_weights(self) -> str:
        """Return a name for the user of code that may change the model's weights outside of the update; "": none.

        In memory that ranks share, each rank would make the change.
        """

    def connect_sharded(self, update: DividedUpdate) -> ShardedOptimizer:
        """Build the optimizer of this rank's parts, like ``connect``."""


class Trainable(FrontEndPart, Protocol):
    """A model that can be trained.

    A step is any number of ``add_gradients`` calls, then one ``train_step``, which passes the gradients to the update.
    ``scale`` is 1 / (samples of the global batch), known from the order of samples, so the sum of gradients over
    micro-batches and ranks is the gradient of the global mean loss. If labels determine the weight of a loss
    (``counts``), it is a number for each loss.
    """

    task: Any  # task.task.Task

    @property
    def queued(self) -> Sequence[Any]:
        """Return the steps that have not run yet; several run at once."""

    @property
    def traced(self) -> int:
        """Return how many graphs of a step have been traced until now. A step that traces one takes long."""

    def freeze(self, names: Collection[str], fixed: Collection[str] = ()) -> None:
        """Freeze the named tensors, and no others, from the next ``connect`` on.

        ``fixed``: the ones whose batch normalization uses its running statistics in training and keeps them.
        """

    def without_dropout(self) -> None:
        """Set the rate of every dropout layer to 0; call it before ``connect``."""

    def to_device(self, batch: Batch) -> Any: ...

    def counts(self, batch: Batch) -> np.ndarray:
        """Return the weight of each loss of this batch in the global mean, (losses,) float64."""

    def add_gradients(self, placed: Any, scale: Scale, seed: int) -> Sums: ...

    def train_step(self, placed: Any, scale: Scale, seed: int, learning_rate: float, unscale: float = 1.0) -> Sums:
        """Take a step. ``unscale``: the factor on the gradient before the exchange, for a scaled loss."""

    def run_queued(self) -> None: ...

    def finite(self) -> bool:
        """Return whether the last step's gradients were finite on all ranks, with ``FrontEndConfig.checks_gradients``;
        if not, the step was skipped."""

    def accumulated_squares(self) -> Tensor:
        """Return the squared norm of the gradients that ``add_gradients`` has added since the last step, () float64."""

    def compression_error(self, placed: Any, scale: Scale, seed: int) -> Tensor:
        """Measure the error of compression on this batch's gradient, which is not applied (update/error_meter.py)."""


class Evaluable(FrontEndPart, Protocol):
    """A model that can be evaluated and can predict."""

    task: Any  # task.task.Task

    def to_device(self, batch: Batch) -> Any: ...

    def average_statistics(self) -> None: ...

    def evaluate_batch(self, placed: Any) -> Sums:
        """Return the task's sums, followed by those of ``Task.scores``."""

    def predict(self, placed: Any) -> np.ndarray:
        """Return logits (at least count, ..., num_classes) float, one row for each label; padding may follow."""

    def untouched(self) -> AbstractContextManager[None]:
        """Within this context the model may run on trial: weights and statistics are restored at the end."""


class Runtime(Protocol):
    """Measurements of this rank: waiting time and memory."""

    def waited(self, fresh: bool = True) -> float:
        """Return the seconds that this rank has waited for transfers since its start.

        ``fresh``: steps have run since the last call, and none is queued. Otherwise the last steps may be left out.
        """

    def peak_device_bytes(self) -> int:
        """Return the peak GPU memory of this rank's tensors; 0: on a CPU."""


class FrontEnd(Shardable, Replica, WeightNames, GathersStatistics, Trainable, Evaluable, Runtime, Protocol):
    """A model, its optimizer and its device in one framework: all parts together."""


class FrontEndModule(Protocol):
    """The module that a framework's record names (hvd_train/frameworks.py); loading it loads the framework."""

    def configure(self, threads: int) -> None:
        """Limit the framework to this rank's share of the cores; call it before the first tensor."""

    def open_frontend(self, config: Any, groups: Groups, sample: Sample) -> FrontEnd:
        """Open the front-end. ``config``: a ``FrontEndConfig``, whose package is above this one."""

    def cpu_ops(self) -> Ops: ...

    def gpus(self) -> int:
        """Count the GPUs that the framework sees."""


# A model function: build(**options), also with input_shape= and num_classes= if it has such parameters.
Build = Callable[..., Any]

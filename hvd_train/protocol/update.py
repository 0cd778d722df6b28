"""The contracts from gradients to new weights: compressor, exchange, optimizer, update."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

import numpy as np

from hvd_train.protocol.communicator import Communicator
from hvd_train.protocol.ops import Ops
from hvd_train.protocol.tensors import Tensor, Tree


@dataclass(frozen=True)
class Wire:
    """The tensors that a compressor sends in one round, and the collective.

    ``sum``: added over ranks. ``gather``: concatenated along axis 0. ``alltoall``: flat; rank k gets the k-th of N
    equal parts from every rank, in rank order.
    """

    kind: str
    tensors: tuple[Tensor, ...]


# Name prefix of state in flight between steps, without which an update can start as well.
IN_FLIGHT = "under_way/"
# Name prefix of an update's optional entries; a missing one begins at zero.
EXCHANGE_PREFIX = "exchange/"
# A compressor's state for one bucket: residual, low-rank basis, ...
State = tuple[Tensor, ...]
Rounds = Generator[Wire, tuple[Tensor, ...], tuple[Tensor, State]]


class Compressor(Protocol):
    """The encoding of a gradient for sending, and the decoding of the result, without any network.

    Law: input + old residual = this rank's decoded part + new residual. If sums are rounded as well, it holds for the
    sums of these over all ranks.
    """

    # True: needs single tensors in their shapes (PowerSGD); False: works on flat buckets.
    per_tensor: bool
    # True: entries are summed independently, so a rank may receive only a part of the sum.
    elementwise: bool = False

    def init_state(self, shape: tuple[int, ...], dtype: str) -> tuple[np.ndarray, ...]: ...

    def rounds(self, gradient: Tensor, state: State, ops: Ops) -> Rounds:
        """Yield one or more wires and receive each reduced; return (decoded sum over ranks, new state)."""


@dataclass(frozen=True)
class Packing:
    """Bucket sizes: at most ``bucket_bytes``; a tensor of ``alone_bytes`` or more has its own bucket."""

    bucket_bytes: int
    alone_bytes: int


class GradientNorms(Protocol):
    """Squared norms of a gradient before and after its exchange (update/gradient_norms.py)."""

    factor: Any  # of this rank's squared norm in the next step; 0: it is not measured

    def take(self) -> np.ndarray:
        """Return the sums since the last call, (2,) float64: factor x this rank's, and its part of the reduced."""


class Exchange(Protocol):
    """The reduction of gradients over ranks (update/exchange.py): called eagerly, from hooks, or while tracing."""

    communicator: Communicator
    ops: Ops
    op: str  # "sum", "average" or "adasum"
    norms: Any  # GradientNorms, or None

    @property
    def buckets(self) -> Sequence[Sequence[int]]:
        """Return indices into ``specs()``; each bucket is exchanged as one flat tensor."""

    def uncompressed(self, communicator: Communicator) -> Exchange: ...

    def unclipped(self) -> Exchange: ...

    def divided(self, groups: Sequence[Collection[int]]) -> Exchange: ...

    def init_state(self) -> list[tuple[np.ndarray, ...]]: ...

    def to_buckets(self, tensors: Sequence[Tensor]) -> list[Tensor]: ...

    def from_buckets(self, flats: Sequence[Tensor]) -> list[Tensor]: ...

    def reduce(self, flats: Sequence[Tensor], states: Sequence[State]) -> tuple[list[Tensor], list[State]]: ...

    def start(self, bucket: int, gradient: Tensor, state: State) -> Any: ...

    def finish(self, started: Sequence[Any]) -> tuple[list[Tensor], list[State]]: ...

    def failures(self, gradients: Sequence[Tensor]) -> Tensor: ...


class Optimizer(Protocol):
    """An optimizer over flat buckets of weights."""

    def step(self, gradients: Sequence[Tensor], learning_rate: Any) -> None:
        """Update weights and optimizer state; ``gradients``: (n,) for each bucket."""

    def weights(self, bucket: int) -> Tensor:
        """Return the weights of a bucket, (n,), in the layout of its gradient; callers must not change them."""

    def parts(self, bucket: int) -> Sequence[Tensor]:
        """Return the weights of a bucket, (n,) for each tensor, without a copy if the framework can."""

    def take(self, bucket: int, weights: Tensor) -> None:
        """Set all weights of a bucket, (n,)."""

    def views(self) -> Iterable[tuple[str, Callable[[], np.ndarray]]]:
        """Yield (name, reader) for each slot, ``slots/SLOT/NAME`` with the weight's canonical name."""

    def load(self, tree: Mapping[str, np.ndarray]) -> None:
        """Load slots by these names; others stay unchanged."""


class ShardedOptimizer(Protocol):
    """An optimizer over this rank's part of each bucket."""

    def step(self, gradients: Sequence[Tensor], learning_rate: Any) -> None:
        """Update this rank's part of the weights; ``gradients``: (n,) of this rank's part of each bucket."""

    def parts(self, bucket: int) -> Sequence[Tensor]:
        """Return the weights of this rank's part of a bucket, (n,) for each tensor, in the order of gradients."""

    def take(self, bucket: int, bounds: tuple[int, int], weights: Tensor) -> None:
        """Set the weights of a bucket, (n,), in [bounds[0], bounds[1])."""

    def entries(self) -> Sequence[Entry]: ...

    def load(self, tree: Mapping[str, np.ndarray]) -> None:
        """Load this rank's parts of the named slots, given whole; others stay unchanged."""


class HostSums(Protocol):
    """Sums of flat tensors over the ranks of a host."""

    def start(self, place: int, x: Tensor, pieces: Sequence[Sequence[tuple[int, int]]]) -> Callable[[], Tensor]:
        """Start the sum of ``x``; return a function that returns this rank's pieces of it, concatenated.

        ``pieces[k]``: the [first, last) ranges of entries for rank k of this host.
        """


class HostMemory(Protocol):
    """Shared memory of the ranks of one host, which must all make the same calls in the same order.

    ``hosts``: the ranks of each host, in order. ``rank``: this rank's index among those of its host.
    """

    rank: int
    hosts: Sequence[Sequence[int]]

    def barrier(self, name: str) -> None:
        """Wait for all ranks. Writes before it are visible to all after it."""

    def share(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Copy rank 0's flat tensors into memory that all ranks share; return the shared tensors."""

    def sums(self, lengths: Sequence[int]) -> HostSums:
        """Set up sums of flat tensors, the k-th of at most ``lengths[k]`` bytes."""


class Placement(Enum):
    """How an entry of state is distributed over ranks, and so how a checkpoint writes it."""

    REPLICATED = "replicated"  # equal on all ranks: rank 0 writes it
    # Different on each rank: all are written, and ignored on another number of ranks.
    PER_RANK = "per rank"
    # Each rank has a part: concatenated in rank order before it is written.
    SHARDED = "sharded"


@dataclass(frozen=True)
class Entry:
    """An array of an update's state. ``read`` returns this rank's data, without a copy if possible.

    If this rank has a part of the array, ``read`` returns it flat, ``shape`` is that of the whole array, and ``whole``
    builds the array from the flat parts, concatenated in rank order.
    """

    name: str
    placement: Placement
    read: Callable[[], np.ndarray]
    shape: tuple[int, ...] = ()
    whole: Callable[[np.ndarray], np.ndarray] | None = None


class StepUpdate(Protocol):
    """The methods of an update that a front-end calls within a step (update/replicated.py)."""

    exchange: Exchange
    delay: int  # steps between a gradient and its use; its memory must live as long

    @property
    def buckets(self) -> Sequence[Sequence[int]]: ...

    def begin(self) -> None:
        """Start the transfers that overlap with the next step; called between steps."""

    # Call ``start`` for each bucket in any order, then ``finish`` once (``reduce`` does both), then ``step``.
    def start(self, bucket: int, gradient: Tensor) -> Any: ...

    def finish(self, started: Sequence[Any]) -> list[Tensor]: ...

    def reduce(self, gradients: Sequence[Tensor]) -> list[Tensor]: ...

    def step(self, gradients: Sequence[Tensor], learning_rate: Any) -> None: ...

    def failures(self, gradients: Sequence[Tensor]) -> Tensor: ...

    def compression_error(self, gradients: Sequence[Tensor]) -> Tensor: ...


class DividedUpdate(StepUpdate, Protocol):
    """An update with sharded optimizer state (update/sharded.py)."""

    host: HostMemory | None  # if the ranks of a host share the memory of the weights

    def bounds(self, bucket: int) -> tuple[int, int]:
        """Return the [first, last) entries of this rank's part of a bucket."""

    def total(self, squares: list[Tensor]) -> Sequence[Tensor]:
        """Add the sums of squares of parts of tensors over the ranks. All ranks call it, in the same order."""


class Update(Protocol):
    """The methods of an update that a training calls between steps, the same on all ranks.

    ``AveragedUpdate`` (update/averaged_update.py) wraps another update.
    """

    @property
    def diverged(self) -> bool:
        """Return whether the models' weights may now differ between ranks."""

    @property
    def local_gradients(self) -> bool:
        """Return whether a rank's gradient is the mean over its own samples, not its part of the global mean."""

    @property
    def lockstep(self) -> bool:
        """Return whether all ranks take each step together.

        If not, no rank waits for another within an epoch (core/pace.py).
        """

    @property
    def buckets(self) -> Sequence[Sequence[int]]: ...

    @property
    def norms(self) -> GradientNorms | None:
        """Return what measures the norms of gradients; None: nothing does."""

    def before_step(self, step: int, samples: int) -> None:
        """Prepare step number ``step`` (from 1) with ``samples`` samples over all ranks."""

    def after_step(self, step: int, samples: int) -> None:
        """Handle the end of step number ``step`` (from 1) with ``samples`` samples on this rank."""

    @property
    def has_global_weights(self) -> bool:
        """Return whether the model holds the weights that are evaluated and saved."""

    def end_epoch(self, epoch: int, epochs: int) -> None:
        """Handle the end of epoch number ``epoch`` (from 1) of ``epochs``."""

    def end_training(self) -> bool:
        """Handle the end of the training; return whether other weights are evaluated from now on."""

    @property
    def needs_statistics(self) -> bool:
        """Return whether running statistics must be recomputed for the model's current weights."""

    def keep_statistics(self, training: Tree) -> None:
        """Keep the model's current running statistics for the global weights.

        ``training``: the statistics of the local weights (``TracksStatistics.running_statistics``).
        """

    def take_global_weights(self) -> None:
        """Load the weights that are evaluated and saved, equal on all ranks, into the model; not twice in a row."""

    def take_local_weights(self) -> None:
        """Restore each rank's weights from before ``take_global_weights``, bit for bit."""

    def note(self) -> str:
        """Return rank 0's message for the user after an epoch; empty: none."""

    def close(self) -> None:
        """Free resources outside this process when training has ended; all ranks call it."""

    # For checkpoints.
    @property
    def in_flight(self) -> bool:
        """Return whether a transfer is in flight between steps; equal on all ranks."""

    def finish_transfers(self) -> None:
        """Wait for transfers in flight, so that ``state`` is complete; all ranks call it."""

    def state(self) -> Sequence[Entry]: ...

    def load(self, tree: Mapping[str, np.ndarray], placement: Placement) -> None:
        """Load arrays of ``state``: first ``REPLICATED`` entries, possibly in several calls.

        A last call has the ``PER_RANK`` entries, when the model holds the checkpoint's weights. They are empty at the
        start of a run and on another number of ranks.
        """

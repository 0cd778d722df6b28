"""Everything between the backward pass and new weights: compressor, exchange, optimizer, update."""

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
    """One round of a compressor: ``sum`` tensors are added over ranks, ``gather`` ones concatenated along axis 0.

    ``alltoall`` ones are flat. Rank k gets the k-th of N equal parts of every rank's, in rank order.
    """

    kind: str
    tensors: tuple[Tensor, ...]


# What the names of entries begin with that an update keeps from one step for the next, and can do without.
IN_FLIGHT = "under_way/"
# The same of entries that an update takes one by one, each of which may be missing: it begins at zero.
EXCHANGE_PREFIX = "exchange/"
# A compressor's state for one bucket: residual, low-rank basis, ...
State = tuple[Tensor, ...]
Rounds = Generator[Wire, tuple[Tensor, ...], tuple[Tensor, State]]


class Compressor(Protocol):
    """Turns one gradient into wires and back; it never sees a network.

    Law: input + old residual = this rank's decoded part + new residual. Where sums are rounded as well, it holds for
    the sums of these over all ranks.
    """

    # True: wants each tensor in its shape (PowerSGD); False: works on flat buckets.
    per_tensor: bool
    # True: each entry is summed by itself, so that a rank may ask for a part of the sum.
    elementwise: bool = False

    def init_state(self, shape: tuple[int, ...], dtype: str) -> tuple[np.ndarray, ...]: ...

    def rounds(self, gradient: Tensor, state: State, ops: Ops) -> Rounds:
        """Yield a wire, receive it reduced, once or several times; return (decoded sum over ranks, new state)."""


@dataclass(frozen=True)
class Packing:
    """The limits of buckets: at most ``bucket_bytes`` in one; from ``alone_bytes`` on a tensor goes alone."""

    bucket_bytes: int
    alone_bytes: int


class Exchange(Protocol):
    """Gradients in, reduced gradients out (update/exchange.py): called eagerly, from hooks, or while tracing."""

    communicator: Communicator
    ops: Ops
    op: str  # "sum", "average" or "adasum"

    @property
    def buckets(self) -> Sequence[Sequence[int]]:
        """Indices into ``specs()``; each bucket travels as one flat tensor."""

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
    """Weights in buckets, their slots, and the formula that moves both by a gradient."""

    def step(self, gradients: Sequence[Tensor], learning_rate: Any) -> None:
        """Move weights and slots; ``gradients``: (n,) for each bucket."""

    def weights(self, bucket: int) -> Tensor:
        """Return (n,): the weights of a bucket, as its gradient lies; not to be changed in place."""

    def parts(self, bucket: int) -> Sequence[Tensor]:
        """Return the same, (n,) for each tensor; nothing is copied where the framework can do without."""

    def take(self, bucket: int, weights: Tensor) -> None:
        """Take (n,): all weights of a bucket."""

    def views(self) -> Iterable[tuple[str, Callable[[], np.ndarray]]]:
        """(name, what reads it) of each slot, ``slots/SLOT/NAME`` with the weight's canonical name."""

    def load(self, tree: Mapping[str, np.ndarray]) -> None:
        """Take slots by these names; others stay as they are."""


class ShardedOptimizer(Protocol):
    """An optimizer of this rank's part of each bucket, and of the slots that belong to it."""

    def step(self, gradients: Sequence[Tensor], learning_rate: Any) -> None:
        """Move this rank's part of the weights; ``gradients``: (n,) of this rank's part of each bucket."""

    def parts(self, bucket: int) -> Sequence[Tensor]:
        """Return (n,) for each tensor: the weights of this rank's part of a bucket, in the order of gradients."""

    def take(self, bucket: int, bounds: tuple[int, int], weights: Tensor) -> None:
        """Take (n,): the weights of a bucket from its entry ``bounds[0]`` up to ``bounds[1]``."""

    def entries(self) -> Sequence[Entry]: ...

    def load(self, tree: Mapping[str, np.ndarray]) -> None:
        """Take this rank's parts of whole slots by their names; others stay as they are."""


class HostSums(Protocol):
    """Sums of flat tensors over the ranks of a host."""

    def start(self, place: int, x: Tensor, pieces: Sequence[Sequence[tuple[int, int]]]) -> Callable[[], Tensor]:
        """Start the sum of ``x``; the function that comes back gives this rank's pieces, one behind the other.

        ``pieces``: of each rank of this host, as [first entry, the one behind the last).
        """


class HostMemory(Protocol):
    """Memory of the ranks of one host. All of them must call the same, in the same order.

    ``hosts``: the ranks of each host, in order; ``rank``: the place of this one among those of its host.
    """

    rank: int
    hosts: Sequence[Sequence[int]]

    def barrier(self, name: str) -> None:
        """Wait until all ranks are here. What one wrote before it, the others read after it."""

    def share(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return flat tensors that all ranks have in common, with rank 0's values of these ones."""

    def sums(self, lengths: Sequence[int]) -> HostSums:
        """Return the way to sum flat tensors, the k-th of at most ``lengths[k]`` bytes."""


class Placement(Enum):
    """The ranks on which an entry of state lives, and so the way in which a checkpoint writes it."""

    REPLICATED = "replicated"  # equal on all ranks: rank 0 writes it
    # Each rank has another one: all are written, and left behind on another number of ranks.
    PER_RANK = "per rank"
    # Each rank has a part of it: joined in rank order before it is written.
    SHARDED = "sharded"


@dataclass(frozen=True)
class Entry:
    """One array of an update's state. ``read`` gives a view of what this rank has, not copied where that can be helped.

    Where this rank has a part of the array, ``read`` gives it flat, ``shape`` is that of the whole array, and ``whole``
    makes the array of all flat parts, joined in rank order.
    """

    name: str
    placement: Placement
    read: Callable[[], np.ndarray]
    shape: tuple[int, ...] = ()
    whole: Callable[[np.ndarray], np.ndarray] | None = None


class StepUpdate(Protocol):
    """An update as a front-end calls it within a step (update/replicated.py)."""

    exchange: Exchange
    delay: int  # steps for which a gradient that was handed in keeps its memory, as it is applied later

    @property
    def buckets(self) -> Sequence[Sequence[int]]: ...

    def begin(self) -> None:
        """Start what travels during the next step: called before its backward pass, or after the step before it."""

    # Start for each bucket in any order, then finish once; reduce is both. Then step.
    def start(self, bucket: int, gradient: Tensor) -> Any: ...

    def finish(self, started: Sequence[Any]) -> list[Tensor]: ...

    def reduce(self, gradients: Sequence[Tensor]) -> list[Tensor]: ...

    def step(self, gradients: Sequence[Tensor], learning_rate: Any) -> None: ...

    def failures(self, gradients: Sequence[Tensor]) -> Tensor: ...

    def compression_error(self, gradients: Sequence[Tensor]) -> Tensor: ...


class DividedUpdate(StepUpdate, Protocol):
    """An update of which each rank has a part (update/sharded.py)."""

    host: HostMemory | None  # of ranks that share the memory of the weights

    def bounds(self, bucket: int) -> tuple[int, int]:
        """Return the first entry of this rank's part of a bucket, and the one behind its last."""

    def total(self, squares: list[Tensor]) -> Sequence[Tensor]:
        """Join the sums of squares of parts of tensors over the ranks. All ranks call it, in the same order."""


class Update(Protocol):
    """Everything between the backward pass and new weights, as a training calls it between steps; on all ranks alike.

    ``AveragedUpdate`` (update/averaged_update.py) is one around another one.
    """

    @property
    def diverged(self) -> bool:
        """Return whether the weights of the ranks' models may differ now."""

    @property
    def local_gradients(self) -> bool:
        """Return whether a rank's gradient is the mean over its samples, not its part of the global mean."""

    @property
    def lockstep(self) -> bool:
        """Return whether all ranks take each step together.

        Else no rank waits for another while an epoch is trained (core/pace.py).
        """

    @property
    def buckets(self) -> Sequence[Sequence[int]]: ...

    def before_step(self, step: int, samples: int) -> None:
        """Prepare step number ``step`` (from 1), of which all ranks together have ``samples``."""

    def after_step(self, step: int, samples: int) -> None:
        """Do what follows step number ``step`` (from 1), of which this rank had ``samples``."""

    @property
    def has_global_weights(self) -> bool:
        """Return whether the model has the weights that are evaluated and saved."""

    def end_epoch(self, epoch: int, epochs: int) -> None:
        """Do what follows the end of epoch number ``epoch`` (from 1) of ``epochs``."""

    def end_training(self) -> bool:
        """Do what follows the end of the training; return whether other weights are evaluated from here on."""

    @property
    def needs_statistics(self) -> bool:
        """Return whether running statistics must be gathered for the weights that the model has now."""

    def keep_statistics(self, training: Tree) -> None:
        """Let the global weights keep the running statistics that the model has now.

        ``training``: those that it had with its own weights (``TracksStatistics.running_statistics``).
        """

    def take_global_weights(self) -> None:
        """Give the model the weights that are evaluated and saved, equal on all ranks; not twice in a row."""

    def take_local_weights(self) -> None:
        """Give each rank's model the weights that it had before ``take_global_weights``, bit for bit."""

    def note(self) -> str:
        """Return what to tell rank 0's user after an epoch; empty: nothing."""

    def close(self) -> None:
        """Give back what the update has outside this process, when training has ended; on all ranks alike."""

    # For checkpoints.
    @property
    def in_flight(self) -> bool:
        """Return whether something that the next step does not wait for travels; on all ranks alike."""

    def finish_transfers(self) -> None:
        """Bring to an end what travels between steps, so that ``state`` is whole; on all ranks together."""

    def state(self) -> Sequence[Entry]: ...

    def load(self, tree: Mapping[str, np.ndarray], placement: Placement) -> None:
        """Take arrays of ``state``, those of ``REPLICATED`` entries piece by piece.

        Those of ``PER_RANK`` entries come last and once, when the model has the weights of the checkpoint; none where
        the run begins, or goes on with another number of ranks.
        """

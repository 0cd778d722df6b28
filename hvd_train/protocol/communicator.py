"""The network: tensors and bytes between ranks."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from hvd_train.errors import TrainError
from hvd_train.protocol.tensors import Handle, Tensor


class Window(Protocol):
    """One-sided (RMA) access to a flat array on each rank, which all ranks can read and change."""

    def read(self, rank: int, into: np.ndarray) -> None:
        """Copy the array of ``rank``. Each entry is from before or after a concurrent ``add``."""

    def add(self, rank: int, x: np.ndarray) -> None:
        """Add ``x`` to the array of ``rank``; concurrent additions are not lost."""

    def change(self, rank: int, to: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        """Replace the array x of ``rank`` by ``to(x)`` and return x; atomic with regard to other ``change`` calls."""

    def close(self) -> None:
        """Free the memory; all ranks call it."""


class Communicator(Protocol):
    """Horovod's operations on a front-end's tensors. For a world of one, ``serial.py`` has the identity."""

    rank: int
    size: int
    # Among all ranks of the job on this host, also in a subgroup: they share its GPUs and cores.
    local_rank: int
    local_size: int
    mpi: bool  # whether MPI carries the transfers
    # Seconds that this rank has spent waiting for transfers.
    waited: float

    def open(self) -> None: ...

    def close(self) -> None: ...

    def allreduce_async(self, x: Tensor, name: str, op: str = "sum") -> Handle:
        """Start an allreduce (``op``: sum, average, adasum) of equally shaped tensors; may reduce ``x`` in place."""

    def allgather_async(self, x: Tensor, name: str) -> Handle:
        """Start a concatenation over ranks along axis 0, in rank order; lengths may differ."""

    def alltoall_async(self, x: Tensor, sizes: Sequence[int], name: str) -> Handle:
        """Start sending ``sizes[k]`` consecutive entries of the flat ``x`` to rank k, for every rank k.

        ``synchronize`` returns what all ranks sent to this one, flat and in rank order. Sizes may differ between ranks.
        """

    def reduce_scatter_async(self, x: Tensor, sizes: Sequence[int], name: str) -> Handle:
        """Start the sum of the flat ``x`` over ranks, of which rank k gets the k-th part, ``sizes[k]`` entries.

        Parts are added in rank order, so the result has the same bits in every run and over every transport. ``sizes``
        must be equal on all ranks; ``x`` is not changed.
        """

    def synchronize(self, handle: Handle) -> Tensor: ...

    def broadcast_bytes(self, data: bytes, root: int = 0) -> bytes: ...

    def allgather_bytes(self, data: bytes, name: str = "bytes") -> list[bytes]:
        """Return the data of all ranks, in rank order.

        ``name``: appears in the error of a rank that waits in vain for others.
        """

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """Collect the data of all ranks on rank 0, in rank order; the others get []."""

    def scatter_bytes(self, parts: Sequence[bytes]) -> bytes:
        """Send the k-th of rank 0's ``parts`` to rank k and return it; other ranks' ``parts`` are ignored."""

    def barrier(self) -> None: ...

    def window(self, entries: int, dtype: str) -> Window:
        """Open a window of ``entries`` zeros on this rank; all ranks call it. Without MPI, only in a world of one."""

    def failure(self, error: BaseException | None = None) -> TrainError | None:
        """Return the failure that ended the transfers of this rank, if any.

        It is an earlier one, or ``error``, which a transfer raised. It is kept even if the exception is caught.
        """


def broadcast_json(communicator: Communicator, value: Any) -> Any:
    """Return rank 0's value on all ranks."""
    return json.loads(communicator.broadcast_bytes(json.dumps(value).encode()))


def allgather_json(communicator: Communicator, value: Any, name: str = "bytes") -> list[Any]:
    """Return the values of all ranks, in rank order; ``name``: as in ``allgather_bytes``."""
    return [json.loads(part) for part in communicator.allgather_bytes(json.dumps(value).encode(), name)]


class StageLinks(Protocol):
    """The connections between the stages of one replica (frontends/stages/links.py)."""

    stage: int
    size: int
    waited: float  # seconds

    def send(self, stage: int, word: str, message: Any) -> None: ...

    def receive(self, stage: int, word: str) -> Any: ...

    def sum(self, x: np.ndarray, stages: Sequence[int], word: str) -> np.ndarray:
        """Sum over some stages, including this one, in their order: the same bits on each."""

    def gather(self, data: bytes, word: str) -> list[bytes]:
        """Collect the data of all stages on stage 0, in their order; the others get []."""

    def close(self) -> None: ...


@dataclass(frozen=True)
class Groups:
    """The groups of ranks that this rank belongs to.

    ``world``: all ranks of the job, for checkpoints, signals and start-up checks. ``data``: the ranks with the same
    weights, for the loader, the global batch, the mean of gradients and, without stages, the sums of metrics.
    ``links``: the connections to the other stages of a pipeline; rank = replica x stages + stage.
    """

    world: Communicator
    data: Communicator
    links: StageLinks | None = None

    @classmethod
    def of(cls, world: Communicator) -> Groups:
        """Make the groups of ranks that all hold the whole model."""
        return cls(world, data=world)

    @property
    def sums(self) -> Communicator:
        """Return the ranks over which losses and metrics are summed. Only the last stage has values, but all stages
        need the sums."""
        return self.world if self.links else self.data

    @property
    def last_stage(self) -> bool:
        """Return whether this rank has the model's outputs."""
        return self.links is None or self.links.stage == self.links.size - 1


class CommunicatorModule(Protocol):
    """The module that carries a framework's tensors between ranks, named by the framework's record."""

    def make_communicator(self, expected_size: int) -> Communicator:
        """Make a communicator, not yet open. ``expected_size``: the number of ranks that the launcher started."""

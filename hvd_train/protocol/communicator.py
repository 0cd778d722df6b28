"""The network: tensors and bytes between ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from hvd_train.errors import TrainError
from hvd_train.protocol.tensors import Handle, Tensor


class Window(Protocol):
    """Memory of each rank, flat and of one type, that all ranks read and change. The rank that has it takes no part."""

    def read(self, rank: int, into: np.ndarray) -> None:
        """Copy what ``rank`` has. Other ranks may add to it meanwhile: each entry is from before or after that."""

    def add(self, rank: int, x: np.ndarray) -> None:
        """Add ``x`` to what ``rank`` has; no entry of what other ranks add meanwhile is lost."""

    def change(self, rank: int, to: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        """Replace what ``rank`` has by ``to`` of it, and return what it was; no other ``change`` is between."""

    def close(self) -> None:
        """Give the memory back; on all ranks together."""


class Communicator(Protocol):
    """Horovod's verbs over a front-end's tensors. ``serial.py`` is the identity, so no caller asks "if distributed"."""

    rank: int
    size: int
    # Among the ranks of this host, whatever part of the world this is: GPUs and cores are the host's.
    local_rank: int
    local_size: int
    mpi: bool  # whether MPI carries the transfers
    # Seconds within transfers, of those that this rank itself waits for.
    waited: float

    def open(self) -> None: ...

    def close(self) -> None: ...

    def allreduce_async(self, x: Tensor, name: str, op: str = "sum") -> Handle:
        """Start an allreduce (``op``: sum, average, adasum) of equally shaped tensors; may reduce ``x`` in place."""

    def allgather_async(self, x: Tensor, name: str) -> Handle:
        """Start a concatenation over ranks along axis 0, in rank order; lengths may differ."""

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
        """Return the data of all ranks, in rank order.

        ``name``: named in the message of a rank that waits for others which never come.
        """

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """Collect the data of all ranks on rank 0, in rank order; the others send theirs once and get []."""

    def scatter_bytes(self, parts: Sequence[bytes]) -> bytes:
        """Give rank k the k-th of rank 0's ``parts``; those of other ranks are not looked at."""

    def barrier(self) -> None: ...

    def window(self, entries: int, dtype: str) -> Window:
        """Open ``entries`` zeros on this rank to all ranks, which all call it; without MPI only in a world of one."""

    def failure(self, error: BaseException | None = None) -> TrainError | None:
        """Return the failure that ended the transfers of this rank, if any.

        It is an earlier one, or ``error``, which came out of a transfer. It stays, whoever catches it.
        """


class StageLinks(Protocol):
    """The connections between the stages of one replica (frontends/stages/links.py)."""

    stage: int
    size: int
    waited: float  # seconds

    def send(self, stage: int, word: str, message: Any) -> None: ...

    def receive(self, stage: int, word: str) -> Any: ...

    def sum(self, x: np.ndarray, stages: Sequence[int], word: str) -> np.ndarray:
        """Return the sum over some stages, of which this is one, in their order: the same bits on each."""

    def gather(self, data: bytes, word: str) -> list[bytes]:
        """Collect the data of all stages on stage 0, in their order; the others get []."""

    def close(self) -> None: ...


@dataclass(frozen=True)
class Groups:
    """The ranks that this rank works with: all of the job, and those among which samples are divided.

    ``world`` writes checkpoints, stops on signals and compares what a job starts with. ``data`` holds the same weights:
    it has the loader's ranks, the global batch, the mean of gradients and, without stages, the sums of metrics.
    ``links``: to the other stages of a pipeline, where each rank holds a part of the model; rank = replica x stages +
    stage.
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
        """Return the ranks over which losses and metrics are added: stages but the last have zeros, and need the sums
        like all others."""
        return self.world if self.links else self.data

    @property
    def last_stage(self) -> bool:
        """Return whether this rank has the model's outputs."""
        return self.links is None or self.links.stage == self.links.size - 1


class CommunicatorModule(Protocol):
    """The module that carries a framework's tensors between ranks, named by the framework's record."""

    def make_communicator(self, expected_size: int) -> Communicator:
        """Not yet opened; ``expected_size``: the ranks that the launcher started."""

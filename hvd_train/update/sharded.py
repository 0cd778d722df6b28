"""Sharded optimizer state (Rajbhandari et al. 2020, "ZeRO", stage 1).

Each rank receives the summed gradient of its part of every bucket and updates that part of the weights with its part of
the optimizer state. Then the ranks gather the new weights. Results equal those of ``Replicated`` up to summation order.

Ranks of one host share the memory of the weights, so they gather nothing: each updates its part in place while all
wait. Between hosts a rank exchanges only with its mates, the ranks with the same host rank: host sums of their parts of
the gradient, then the weights of these parts. So a host sends and receives as much as one rank would.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any, cast

import numpy as np

from hvd_train.compression.two_phase import TwoPhase
from hvd_train.protocol import (
    Entry,
    Handle,
    HostMemory,
    HostSums,
    Model,
    Optimizer,
    Parameters,
    Placement,
    Rounds,
    Shardable,
    ShardedOptimizer,
    State,
    Tensor,
    TensorSpec,
    Tree,
    Wire,
)
from hvd_train.update.error_meter import compression_error
from hvd_train.update.exchange import Exchange, Started
from hvd_train.update.flat_state import FlatState
from hvd_train.update.owned_weights import OwnedWeights
from hvd_train.update.replicated import Replicated


def part_sizes(entries: int, ranks: int) -> list[int]:
    """Divide the entries of a flat bucket into one consecutive part per rank; the first ranks get the remainder."""
    return [entries // ranks + (rank < entries % ranks) for rank in range(ranks)]


def pieces(sizes: Sequence[int], start: int, stop: int) -> list[tuple[int, int]]:
    """Return the [first, last) entries of each tensor of a flat bucket that lie in [start, stop) of the bucket."""
    bounds, offset = [], 0
    for size in sizes:
        first, last = (min(max(edge - offset, 0), size) for edge in (start, stop))
        bounds.append((first, last))
        offset += size
    return bounds


class HostTransfer:
    """The sum of a bucket over the ranks of a host and then over the hosts; ``result`` waits for both.

    ``between`` takes this host's sum, starts the transfer between hosts, and returns the function that waits for it.
    """

    def __init__(self, here: Callable[[], Tensor], between: Callable[[Tensor], Callable[[], Tensor]]) -> None:
        self._here, self._between = here, between
        self._result: Callable[[], Tensor] | None = None

    def go_on(self) -> None:
        """Wait for the ranks of this host, and start the transfer between the hosts."""
        if self._result is None:
            self._result = self._between(self._here())

    def result(self) -> Tensor:
        self.go_on()
        return cast(Callable[[], Tensor], self._result)()


class ShardedExchange(Exchange):
    """A reduce-scatter: each rank receives its part of every bucket. ``whole``: the same exchange, as an allreduce."""

    def __init__(self, whole: Exchange) -> None:
        self.__dict__.update(whole.__dict__)
        self.whole = whole
        self.sums: HostSums | None = None  # over ranks that share memory
        self._mates: Sequence[int] = ()  # the ranks of all hosts with this one's host rank
        self.clip = replace(self.clip, total=self._total)
        self.parts = [
            part_sizes(sum(self._specs[i].size for i in members), self.communicator.size) for members in self.buckets
        ]

    def bounds(self, bucket: int) -> tuple[int, int]:
        """Return the [first, last) entries of this rank's part of a bucket."""
        return self._bounds(bucket, self.communicator.rank)

    def _bounds(self, bucket: int, rank: int) -> tuple[int, int]:
        sizes = self.parts[bucket]
        return sum(sizes[:rank]), sum(sizes[: rank + 1])

    def share(self, host: HostMemory) -> None:
        """Sum in shared memory within this host from now on."""
        self.sums = host.sums(self.lengths())
        self._mates = [ranks[host.rank] for ranks in host.hosts]
        # Each rank of this host sums the parts of all its mates.
        self._pieces = [
            [[self._bounds(b, ranks[place]) for ranks in host.hosts] for place in range(len(host.hosts[0]))]
            for b in range(len(self.buckets))
        ]

    def lengths(self) -> list[int]:
        """Return the size of each bucket in bytes."""
        return [sum(self._specs[i].size * np.dtype(self._specs[i].dtype).itemsize for i in b) for b in self.buckets]

    def _total(self, squares: Tensor) -> Tensor:
        total = self.communicator.allreduce_async(self.ops.reshape(squares, (1,)), "gradient_norm")
        return self.ops.reshape(self.communicator.synchronize(total), ())

    def _rounds(self, bucket: int, shaped: Tensor, state: State) -> Rounds:
        if self._sums_parts(bucket):
            return cast(TwoPhase, self._compressors[bucket]).part_rounds(shaped, state, self.ops)
        return super()._rounds(bucket, shaped, state)

    def _sums_parts(self, bucket: int) -> bool:
        """Return whether the compressor's own partition of the bucket equals this exchange's."""
        compressor = self._compressors[bucket]
        return isinstance(compressor, TwoPhase) and compressor.fills_parts(sum(self.parts[bucket]))

    def _send(self, bucket: int, rounds: Rounds, wire: Wire, turn: int) -> Started:
        if wire.kind != "sum" or not getattr(self._compressors[bucket], "elementwise", False):
            return super()._send(bucket, rounds, wire, turn)
        (x,) = wire.tensors
        flat, name = self.ops.reshape(x, (-1,)), f"bucket{bucket}.{turn}.part"
        if self.sums:
            here = self.sums.start(bucket, flat, self._pieces[bucket])
            return Started(bucket, rounds, wire, (HostTransfer(here, partial(self._between, bucket, name)),))
        return Started(bucket, rounds, wire, (self.communicator.reduce_scatter_async(flat, self.parts[bucket], name),))

    def _between(self, bucket: int, name: str, x: Tensor) -> Callable[[], Tensor]:
        """Start the sum over hosts of ``x``, this host's sums of the mates' parts; return the function that waits."""
        if len(self._mates) == 1:
            return lambda: x
        sizes, size = self.parts[bucket], self.parts[bucket][self.communicator.rank]
        handle = self.communicator.alltoall_async(x, self._only_mates(sizes), name)

        def finish() -> Tensor:
            parts = self.ops.split(self.communicator.synchronize(handle), [size] * len(self._mates))
            return sum(parts[1:], start=parts[0])  # in the order of hosts

        return finish

    def _only_mates(self, sizes: Sequence[int]) -> list[int]:
        """Return ``sizes``, with 0 for all ranks but the mates."""
        return [size if rank in self._mates else 0 for rank, size in enumerate(sizes)]

    def gather(self, bucket: int, part: Tensor) -> Handle:
        """Start to gather the weights of a bucket within the bounds of ``gathered``; ``part`` is this rank's."""
        name = f"weights{bucket}"
        if not self.sums:
            return self.communicator.allgather_async(part, name)
        sizes = [self.parts[bucket][self.communicator.rank]] * self.communicator.size
        parts = self.ops.concat([part] * len(self._mates))
        return self.communicator.alltoall_async(parts, self._only_mates(sizes), name)

    def gathered(self, bucket: int) -> list[tuple[int, int]]:
        """Return the bounds of what ``gather`` collects: with shared memory the mates' parts, else the whole bucket."""
        if not self.sums:
            return [(0, sum(self.parts[bucket]))]
        return [self._bounds(bucket, rank) for rank in self._mates]

    def _wait(self, handle: Handle) -> Tensor:
        return handle.result() if isinstance(handle, HostTransfer) else super()._wait(handle)

    def _received(self, started: Sequence[Started]) -> tuple[list[Tensor], list[State]]:
        """Receive this rank's parts; they are cut out of buckets that a compressor decodes as a whole."""
        # Start all transfers between hosts before waiting for the first.
        for handle in (handle for item in started for handle in item.handles):
            if isinstance(handle, HostTransfer):
                handle.go_on()
        gradients, states = super()._received(started)
        for b, sizes in enumerate(self.parts):
            if not self._sums_parts(b) and not getattr(self._compressors[b], "elementwise", False):
                gradients[b] = self.ops.split(gradients[b], sizes)[self.communicator.rank]
        return gradients, states


class Sharded(Replicated):
    """The update with sharded optimizer state; a checkpoint holds the state as whole tensors."""

    def __init__(self, frontend: Shardable, exchange: Exchange, memory: HostMemory | None = None) -> None:
        self._parts, self.host = ShardedExchange(exchange), memory
        if self.host:
            self._parts.share(self.host)
        self._shardable = frontend
        super().__init__(frontend, self._parts)
        self.owned = OwnedParts(frontend, self.optimizer, self._parts)

    def _connect(self) -> Optimizer:
        return cast(Optimizer, self._shardable.connect_sharded(self))

    @property
    def _sharded(self) -> ShardedOptimizer:
        return cast(ShardedOptimizer, self.optimizer)

    def bounds(self, bucket: int) -> tuple[int, int]:
        return self._parts.bounds(bucket)

    def step(self, gradients: Sequence[Tensor], learning_rate: Any) -> None:
        self._norms = count()
        if self.host is None:
            self.update_weights(gradients, learning_rate)
            self._gather()
            return
        self.host.barrier("backward")  # no rank reads the old weights any more
        self.update_weights(gradients, learning_rate)
        if len(self.host.hosts) > 1:
            self._gather()
        self.host.barrier("weights")

    def _gather(self) -> None:
        """Gather the other ranks' new weights. One bucket is in flight while the one before is copied, because all
        at once would take twice the memory of the weights."""
        before = None
        for bucket in range(len(self.buckets)):
            handle = self._parts.gather(bucket, self.frontend.ops.concat(self._sharded.parts(bucket)))
            if before is not None:
                self._take(bucket - 1, before)
            before = handle
        self._take(len(self.buckets) - 1, before)

    def _take(self, bucket: int, handle: Handle) -> None:
        weights, bounds = self.exchange.communicator.synchronize(handle), self._parts.gathered(bucket)
        parts = self.frontend.ops.split(weights, [last - first for first, last in bounds])
        for one, part in zip(bounds, parts, strict=True):
            self._sharded.take(bucket, one, part)

    def total(self, squares: list[Tensor]) -> Sequence[Tensor]:
        """Add the sums of squares of parts of tensors over the ranks. All ranks must call it, in the same order."""
        if not squares:
            return squares
        ops, communicator = self.frontend.ops, self.exchange.communicator
        handle = communicator.allreduce_async(ops.stack(squares), f"norms{next(self._norms)}")
        joined = communicator.synchronize(handle)
        return [ops.reshape(one, ()) for one in ops.split(joined, [1] * len(squares))]

    def compression_error(self, gradients: Sequence[Tensor]) -> Tensor:
        states = [self._state(b) for b in range(len(self.buckets))]
        return compression_error(self._parts.whole, gradients, states)

    def state(self) -> list[Entry]:
        self.frontend.run_queued()
        return [*self._sharded.entries(), *self._residual_entries()]


class OwnedParts(OwnedWeights):
    """The weights that this rank updates: its part of each bucket."""

    def __init__(self, frontend: Parameters, optimizer: Optimizer, exchange: ShardedExchange) -> None:
        super().__init__(frontend, optimizer, exchange.buckets)
        self._exchange = exchange

    def _cut(self, weights: Sequence[Tensor]) -> list[Tensor]:
        return [flat[slice(*self._exchange.bounds(b))] for b, flat in enumerate(weights)]

    def read(self) -> list[Tensor]:
        ops = self._frontend.ops
        # Copied: TensorFlow's tensors may lie in memory that ranks share.
        return [ops.from_numpy(ops.to_numpy(part)) for part in self._cut(self._frontend.flat_weights())]

    def write(self, weights: Sequence[Tensor]) -> None:
        communicator, flat = self._exchange.communicator, FlatState(self._frontend, self._buckets)
        for b, part in enumerate(weights):
            # The gather waits until all ranks have read their parts, which may lie in shared memory.
            whole = communicator.synchronize(communicator.allgather_async(part, f"weights{b}"))
            self._frontend.load(flat.tree("weights/", b, self._frontend.ops.to_numpy(whole)))

    def read_from(self, prefix: str, tree: Tree) -> list[Tensor]:
        return self._cut(super().read_from(prefix, tree))

    def entries(self, prefix: str, read: Callable[[], Sequence[Tensor]]) -> list[Entry]:
        frontend, specs, entries = self._frontend, self._frontend.specs(), []
        for b, part in enumerate(read()):
            sizes, stop = [specs[i].size for i in self._buckets[b]], 0
            flat = frontend.ops.to_numpy(part)
            for i, (first, last) in zip(self._buckets[b], pieces(sizes, *self._exchange.bounds(b)), strict=True):
                start, stop = stop, stop + last - first
                whole = partial(_canonical, frontend, specs[i])
                shape = whole(np.broadcast_to(np.zeros((), flat.dtype), specs[i].size)).shape
                array = partial(flat.__getitem__, slice(start, stop))
                entries.append(Entry(prefix + specs[i].name, Placement.SHARDED, array, shape, whole))
        return entries


def _canonical(frontend: Model, spec: TensorSpec, stored: np.ndarray) -> np.ndarray:
    return frontend.to_canonical(spec.name, stored.reshape(spec.shape))

"""The update whose optimizer is divided over the ranks (Rajbhandari et al. 2020, "ZeRO", stage 1).

Each rank receives the summed gradient of its part of every bucket, moves that part of the weights with its part of the
slots, and the ranks gather the new weights. The numbers are those of ``Replicated``, up to the order of sums.

Ranks of one host gather nothing: they share the memory of the weights, in which each moves its part while all wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from typing import Any, cast

import numpy as np

from hvd_train.compression.two_phase import TwoPhase
from hvd_train.protocol import Entry, FrontEnd, Handle, HostSums, Rounds, ShardedOptimizer, State, Tensor, Wire
from hvd_train.update.error_meter import compression_error
from hvd_train.update.exchange import Exchange, Started
from hvd_train.update.replicated import Replicated


def part_sizes(entries: int, ranks: int) -> list[int]:
    """Return how many consecutive entries of a flat bucket belong to each rank; rank 0's part is never the smaller."""
    return [entries // ranks + (rank < entries % ranks) for rank in range(ranks)]


def pieces(sizes: Sequence[int], start: int, stop: int) -> list[tuple[int, int]]:
    """Return, for each tensor of a flat bucket, which of its entries lie in [start, stop) of the bucket."""
    bounds, offset = [], 0
    for size in sizes:
        first, last = (min(max(edge - offset, 0), size) for edge in (start, stop))
        bounds.append((first, last))
        offset += size
    return bounds


class ShardedExchange(Exchange):
    """An exchange of which each rank receives its part of every bucket."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.sums: HostSums | None = None  # of ranks that share memory
        self.clip = replace(self.clip, total=self._total)
        self.parts = [
            part_sizes(sum(self._specs[i].size for i in members), self.communicator.size) for members in self.buckets
        ]

    def bounds(self, bucket: int) -> tuple[int, int]:
        """Return the first entry of this rank's part of a bucket, and the one behind its last."""
        sizes, rank = self.parts[bucket], self.communicator.rank
        return sum(sizes[:rank]), sum(sizes[: rank + 1])

    def lengths(self) -> list[int]:
        """Return the bytes of each bucket."""
        return [sum(self._specs[i].size * np.dtype(self._specs[i].dtype).itemsize for i in b) for b in self.buckets]

    def whole(self) -> Exchange:
        """Return the same exchange, of which each rank receives all."""
        exchange = Exchange.__new__(Exchange)
        exchange.__dict__.update(self.__dict__)
        return exchange

    def _total(self, squares: Tensor) -> Tensor:
        total = self.communicator.allreduce_async(self.ops.reshape(squares, (1,)), "gradient_norm")
        return self.ops.reshape(self.communicator.synchronize(total), ())

    def _rounds(self, bucket: int, shaped: Tensor, state: State) -> Rounds:
        if self._sums_parts(bucket):
            return cast(TwoPhase, self._compressors[bucket]).part_rounds(shaped, state, self.ops)
        return super()._rounds(bucket, shaped, state)

    def _sums_parts(self, bucket: int) -> bool:
        """Return whether the compressor adds up on each rank the part that is this rank's here as well."""
        compressor = self._compressors[bucket]
        return isinstance(compressor, TwoPhase) and compressor.fills_parts(sum(self.parts[bucket]))

    def _send(self, bucket: int, rounds: Rounds, wire: Wire, turn: int) -> Started:
        if wire.kind != "sum" or not getattr(self._compressors[bucket], "elementwise", False):
            return super()._send(bucket, rounds, wire, turn)
        (x,) = wire.tensors
        flat, name = self.ops.reshape(x, (-1,)), f"bucket{bucket}.{turn}.part"
        if self.sums:
            return Started(bucket, rounds, wire, (self.sums.start(bucket, flat, self.parts[bucket]),))
        return Started(bucket, rounds, wire, (self.communicator.reduce_scatter_async(flat, self.parts[bucket], name),))

    def _wait(self, handle: Handle) -> Tensor:
        return handle() if callable(handle) else super()._wait(handle)

    def _received(self, started: Sequence[Started]) -> tuple[list[Tensor], list[State]]:
        """Cut this rank's part out of what came whole: most compressors that are not elementwise decode all of it."""
        gradients, states = super()._received(started)
        for b, sizes in enumerate(self.parts):
            if not self._sums_parts(b) and not getattr(self._compressors[b], "elementwise", False):
                gradients[b] = self.ops.split(gradients[b], sizes)[self.communicator.rank]
        return gradients, states


class Sharded(Replicated):
    """Each rank moves its part of the weights; a checkpoint joins the parts of the slots to whole ones."""

    def __init__(self, frontend: FrontEnd, exchange: ShardedExchange, share_memory: bool = True) -> None:
        self._parts, self.host = exchange, frontend.host_memory() if share_memory else None
        if self.host:
            exchange.sums = self.host.sums(exchange.lengths())
        super().__init__(frontend, exchange)
        self._sharded = cast(ShardedOptimizer, self.optimizer)

    def bounds(self, bucket: int) -> tuple[int, int]:
        return self._parts.bounds(bucket)

    def step(self, gradients: Sequence[Tensor], learning_rate: Any) -> None:
        self._norms = count()
        if self.host is None:
            self.optimizer.step(gradients, learning_rate)
            self._gather()
            return
        self.host.barrier("backward")  # none reads the weights any more
        self.optimizer.step(gradients, learning_rate)
        self.host.barrier("weights")

    def _gather(self) -> None:
        """Collect the weights that the ranks have moved. One bucket travels while the one before it is copied: all at
        once would hold the weights twice."""
        communicator, before = self.exchange.communicator, None
        for bucket in range(len(self.buckets)):
            handle = communicator.allgather_async(self._sharded.part(bucket), f"weights{bucket}")
            if before is not None:
                self._sharded.take(bucket - 1, communicator.synchronize(before))
            before = handle
        self._sharded.take(len(self.buckets) - 1, communicator.synchronize(before))

    def total(self, squares: list[Tensor]) -> Sequence[Tensor]:
        """Join the sums of squares of parts of tensors over the ranks. All ranks must call it, in the same order."""
        if not squares:
            return squares
        ops, communicator = self.frontend.ops, self.exchange.communicator
        handle = communicator.allreduce_async(ops.stack(squares), f"norms{next(self._norms)}")
        joined = communicator.synchronize(handle)
        return [ops.reshape(one, ()) for one in ops.split(joined, [1] * len(squares))]

    def compression_error(self, gradients: Sequence[Tensor]) -> Tensor:
        states = [self._state(b) for b in range(len(self.buckets))]
        return compression_error(self._parts.whole(), gradients, states)

    def state(self) -> list[Entry]:
        self.frontend.run_queued()
        return [*self._sharded.entries(), *self._residual_entries()]

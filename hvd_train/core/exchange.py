"""The exchange of gradients: which tensors travel together, through which compressor, and what happens to the sum.

The same object is called eagerly (PyTorch) and while a ``tf.function`` is traced (TensorFlow): it keeps no tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hvd_train.protocol import Communicator, Compressor, Handle, Ops, Packing, Rounds, State, Tensor, TensorSpec, Wire


def plan(specs: Sequence[TensorSpec], packing: Packing) -> tuple[tuple[int, ...], ...]:
    """Buckets of indices into ``specs``, last layers first: backward finishes their gradients first.

    Every index stands in exactly one bucket; a bucket holds one dtype; the plan depends on the specs alone, so it is
    the same on every rank.
    """
    buckets: list[tuple[int, ...]] = []
    open_buckets: dict[str, list[int]] = {}
    for i in reversed(range(len(specs))):
        spec = specs[i]
        if spec.nbytes >= packing.alone_bytes:
            buckets.append((i,))
            continue
        members = open_buckets.setdefault(spec.dtype, [])
        if members and sum(specs[j].nbytes for j in members) + spec.nbytes > packing.bucket_bytes:
            buckets.append(tuple(members))
            members.clear()
        members.append(i)
    buckets.extend(tuple(members) for members in open_buckets.values() if members)
    return tuple(buckets)


@dataclass(frozen=True)
class Clip:
    """Bounds on the reduced gradient: its global 2-norm, or each entry's absolute value. ``limit`` 0: no bound."""

    limit: float = 0.0
    algorithm: str = "norm"

    def __call__(self, gradients: list[Tensor], ops: Ops) -> list[Tensor]:
        if not self.limit:
            return gradients
        if self.algorithm == "value":
            return [ops.clip(g, self.limit) for g in gradients]
        squares = sum(ops.sum_of_squares(g) for g in gradients)
        # The 1e-6 is that of torch.nn.utils.clip_grad_norm_: a zero gradient stays zero.
        factor = ops.clip(self.limit / (squares**0.5 + 1e-6), 1.0)
        return [g * factor for g in gradients]


@dataclass(frozen=True)
class _Started:
    bucket: int
    rounds: Rounds
    wire: Wire
    handles: tuple[Handle, ...]


class Exchange:
    """Sums gradients over ranks. One instance per front-end; ``start`` for each bucket, then ``finish`` once."""

    def __init__(
        self,
        specs: Sequence[TensorSpec],
        packing: Packing,
        compressor: Compressor,
        communicator: Communicator,
        ops: Ops,
        clip: Clip | None = None,
    ) -> None:
        if compressor.per_tensor:
            packing = Packing(bucket_bytes=0, alone_bytes=0)
        self.buckets = plan(specs, packing)
        self._specs, self._compressor, self._communicator, self._ops = specs, compressor, communicator, ops
        self._clip = clip or Clip()
        self._shapes = [self._shape([specs[i] for i in members]) for members in self.buckets]

    def _shape(self, members: Sequence[TensorSpec]) -> tuple[int, ...]:
        """The tensor's own shape if the compressor wants it, else one flat tensor."""
        return members[0].shape if self._compressor.per_tensor else (sum(spec.size for spec in members),)

    def initial(self) -> list[tuple[np.ndarray, ...]]:
        """Each bucket's first compressor state."""
        return [
            self._compressor.initial(self._shapes[b], self._specs[members[0]].dtype)
            for b, members in enumerate(self.buckets)
        ]

    def start(self, bucket: int, gradient: Tensor, state: State) -> _Started:
        """Starts the exchange of one bucket; nothing waits here, so it may be called from inside backward."""
        rounds = self._compressor.rounds(self._ops.reshape(gradient, self._shapes[bucket]), state, self._ops)
        return self._send(bucket, rounds, next(rounds), 0)

    def finish(self, started: Sequence[_Started]) -> tuple[list[Tensor], list[State]]:
        """Waits for every bucket; returns reduced flat gradients and new states in bucket order."""
        results: dict[int, tuple[Tensor, State]] = {}
        pending, turn = list(started), 0
        while pending:
            turn += 1
            again = []
            for item in pending:
                reduced = tuple(self._communicator.synchronize(handle) for handle in item.handles)
                try:
                    wire = item.rounds.send(reduced)
                except StopIteration as done:
                    results[item.bucket] = done.value
                else:
                    again.append(self._send(item.bucket, item.rounds, wire, turn))
            pending = again
        ordered = [results[b] for b in range(len(self.buckets))]
        flat = [self._ops.reshape(gradient, (-1,)) for gradient, _ in ordered]
        return self._clip(flat, self._ops), [state for _, state in ordered]

    def _send(self, bucket: int, rounds: Rounds, wire: Wire, turn: int) -> _Started:
        send = {"sum": self._communicator.allreduce_async, "gather": self._communicator.allgather_async}[wire.kind]
        # Names say which transfers belong together on all ranks, whatever order they start in.
        handles = tuple(send(x, f"bucket{bucket}.{turn}.{k}") for k, x in enumerate(wire.tensors))
        return _Started(bucket, rounds, wire, handles)

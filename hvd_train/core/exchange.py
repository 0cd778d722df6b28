"""The exchange of gradients: which tensors travel together, through which compressor, and what happens to the sum.

The same object is called eagerly (PyTorch) and while a ``tf.function`` is traced (TensorFlow): it keeps no tensor.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hvd_train import protocol
from hvd_train.compression.uncompressed import Uncompressed
from hvd_train.protocol import Communicator, Compressor, Handle, Ops, Packing, Rounds, State, Tensor, TensorSpec, Wire

SMALL = 4096  # entries: tensors of fewer cost more time to compress than to send, and biases are worth their bytes
COMPRESSED = Packing(4 << 20, 4 << 20)  # in every framework: what a compressor leaves out depends on its bucket
JOINED = Packing(bucket_bytes=1 << 20, alone_bytes=1 << 20)  # small tensors beside a compressor that takes each alone


def plan(
    specs: Sequence[TensorSpec], packing: Packing, small: int = 0, whole: Collection[int] = ()
) -> tuple[tuple[int, ...], ...]:
    """Buckets of indices into ``specs``, last layers first: backward finishes their gradients first.

    Every index stands in exactly one bucket; a bucket holds one dtype, and tensors of fewer than ``small`` entries
    and those of ``whole`` stand in buckets of their own; the plan depends on these alone: it is the same on all ranks.
    """
    buckets: list[tuple[int, ...]] = []
    open_buckets: dict[tuple[str, bool], list[int]] = {}
    for i in reversed(range(len(specs))):
        spec, little = specs[i], specs[i].size < small or i in whole
        limits = JOINED if little else packing
        if spec.nbytes >= limits.alone_bytes:
            buckets.append((i,))
            continue
        members = open_buckets.setdefault((spec.dtype, little), [])
        if members and sum(specs[j].nbytes for j in members) + spec.nbytes > limits.bucket_bytes:
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
    """Joins gradients over ranks. One per front-end; ``reduce``, or ``start`` for each bucket, then ``finish`` once.

    ``op``: "sum", "average" (where all travels whole) or "adasum" (Maleki et al. 2021), which wants each tensor alone.
    Tensors of fewer than ``small`` entries, and those of the indices ``whole``, travel plain beside a compressor.
    ``world``: the ranks that ``failures`` asks, if not those of ``communicator`` (gradients that stay on their rank).
    """

    def __init__(
        self,
        specs: Sequence[TensorSpec],
        packing: Packing,
        compressor: Compressor,
        communicator: Communicator,
        ops: Ops,
        clip: Clip | None = None,
        *,
        op: str = "sum",
        small: int = SMALL,
        whole: Collection[int] = (),
        world: Communicator | None = None,
    ) -> None:
        plain = isinstance(compressor, Uncompressed)
        if compressor.per_tensor or op == "adasum":
            packing = Packing(bucket_bytes=0, alone_bytes=0)
        elif not plain:
            packing = COMPRESSED
        self.buckets = plan(specs, packing) if plain else plan(specs, packing, small, whole)
        self._specs, self._communicator, self._ops, self._op = specs, communicator, ops, op
        self._world = world or communicator
        self._clip = clip or Clip()
        little = [all(specs[i].size < small or i in whole for i in members) for members in self.buckets]
        self._compressors = [Uncompressed() if few else compressor for few in little]
        self._shapes = [self._shape(b) for b in range(len(self.buckets))]

    def _shape(self, bucket: int) -> tuple[int, ...]:
        """The tensor's own shape if the compressor wants it, else one flat tensor."""
        members = [self._specs[i] for i in self.buckets[bucket]]
        return members[0].shape if self._compressors[bucket].per_tensor else (sum(spec.size for spec in members),)

    def init_state(self) -> list[tuple[np.ndarray, ...]]:
        """Each bucket's first compressor state."""
        return [
            self._compressors[b].init_state(self._shapes[b], self._specs[members[0]].dtype)
            for b, members in enumerate(self.buckets)
        ]

    def join(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Tensors in the order of the specs -> each bucket's flat one; what is alone in its bucket is not copied."""
        flats = []
        for members in self.buckets:
            parts = [self._ops.reshape(tensors[i], (-1,)) for i in members]
            flats.append(parts[0] if len(parts) == 1 else self._ops.join(parts))
        return flats

    def split(self, flats: Sequence[Tensor]) -> list[Tensor]:
        """The way back: each bucket's flat tensor -> tensors in the order and the shapes of the specs."""
        found: dict[int, Tensor] = {}
        for members, flat in zip(self.buckets, flats, strict=True):
            sizes = [self._specs[i].size for i in members]
            parts = self._ops.cut(flat, sizes) if len(members) > 1 else [flat]
            for i, part in zip(members, parts, strict=True):
                found[i] = self._ops.reshape(part, self._specs[i].shape)
        return [found[i] for i in range(len(self._specs))]

    def reduce(self, flats: Sequence[Tensor], states: Sequence[State]) -> tuple[list[Tensor], list[State]]:
        """All buckets at once: ``start``, then ``finish``."""
        return self.finish([self.start(b, flat, states[b]) for b, flat in enumerate(flats)])

    def start(self, bucket: int, gradient: Tensor, state: State) -> _Started:
        """Starts the exchange of one bucket; nothing waits here, so it may be called from inside backward."""
        shaped = self._ops.reshape(gradient, self._shapes[bucket])
        rounds = self._compressors[bucket].rounds(shaped, state, self._ops)
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
        # Names say which transfers belong together on all ranks, whatever order they start in.
        names = [f"bucket{bucket}.{turn}.{k}" for k in range(len(wire.tensors))]
        if wire.kind == "gather":
            handles = [self._communicator.allgather_async(x, n) for x, n in zip(wire.tensors, names, strict=True)]
        else:
            pairs = zip(wire.tensors, names, strict=True)
            handles = [self._communicator.allreduce_async(x, n, self._op) for x, n in pairs]
        return _Started(bucket, rounds, wire, tuple(handles))

    def failures(self, gradients: Sequence[Tensor]) -> Tensor:
        """(1,) float32: on how many ranks a gradient of this step is not finite. The ranks must ask together, and
        before anything lossy: a compressor may hide what is not finite, and its residual would keep it."""
        ops = self._ops
        finite = ops.cast(ops.all_finite(gradients[0]), "float32")
        for gradient in gradients[1:]:
            finite = finite * ops.cast(ops.all_finite(gradient), "float32")
        return self._world.synchronize(self._world.allreduce_async(ops.reshape(1 - finite, (1,)), "failures"))

    def compression_error(self, gradients: Sequence[Tensor], states: Sequence[State]) -> Tensor:
        """What compression does to these gradients, which stay as they are, like the states: a (5,) tensor of
        [exact . decoded, exact . exact, decoded . decoded, bytes that this rank sends, bytes that it would send]."""
        ops = self._ops
        meter = _Meter(self._communicator, ops)
        other = copy.copy(self)
        other._communicator, other._clip = meter, Clip()  # type: ignore[assignment]
        decoded, _ = other.reduce([g + 0 for g in gradients], states)
        figures = [0.0] * 5
        for b, (gradient, d) in enumerate(zip(gradients, decoded, strict=True)):
            e = self._communicator.synchronize(
                self._communicator.allreduce_async(gradient + 0, f"compression_error{b}")
            )
            row, column = ops.reshape(e, (1, -1)), ops.reshape(d, (-1, 1))
            own = (ops.reshape(ops.matmul(row, column), ()), ops.sum_of_squares(e), ops.sum_of_squares(d))
            figures[:3] = [a + ops.cast(x, "float64") for a, x in zip(figures[:3], own, strict=True)]
            figures[4] = figures[4] + ops.cast(ops.nbytes(e), "float64")
        figures[3] = sum(ops.cast(count, "float64") for count in meter.sent)
        return ops.stack([ops.cast(x, "float64") for x in figures])


class Overlap:
    """The buckets of a backward pass: each starts when the last of its gradients arrives, the others at the end.

    ``start(b)`` brings bucket ``b`` together and hands it to ``Exchange.start``. Members that no backward pass reaches,
    and all where nothing is told to ``arrived``, leave their buckets to ``finish``.
    """

    def __init__(self, exchange: protocol.Exchange, start: Callable[[int], Any]) -> None:
        self._exchange, self._start = exchange, start
        self.bucket = {i: b for b, members in enumerate(exchange.buckets) for i in members}
        self.begin()

    def begin(self) -> None:
        """A new pass; ``finish`` is the other end of one, unless an error is."""
        self.started: dict[int, Any] = {}
        self._awaited: dict[int, set[int]] = {}

    def arrived(self, i: int) -> int | None:
        """Gradient ``i`` is there: the bucket that started thereby. Once more is no other, until its bucket is gone."""
        b = self.bucket[i]
        if b in self.started:
            return None
        if b not in self._awaited:
            self._awaited[b] = set(self._exchange.buckets[b])
        self._awaited[b].discard(i)
        if self._awaited[b]:
            return None
        self.started[b] = self._start(b)
        return b

    def finish(
        self, last: int | None = None, start: Callable[[int], Any] | None = None
    ) -> tuple[list[Tensor], list[State]]:
        """Starts what has not yet, ``last`` behind the others, by ``start`` if given; then as ``Exchange.finish``."""
        buckets = range(len(self._exchange.buckets))
        for b in sorted(buckets, key=lambda b: b == last):
            if b not in self.started:
                self.started[b] = (start or self._start)(b)
        started = [self.started[b] for b in buckets]
        self.begin()
        return self._exchange.finish(started)


class _Meter:
    """A communicator that notes how many bytes are handed to it."""

    def __init__(self, communicator: Communicator, ops: Ops) -> None:
        self._communicator, self._ops = communicator, ops
        self.sent: list[Tensor] = []

    def allreduce_async(self, x: Tensor, name: str, op: str = "sum") -> Handle:
        self.sent.append(self._ops.nbytes(x))
        return self._communicator.allreduce_async(x, name, op)

    def allgather_async(self, x: Tensor, name: str) -> Handle:
        self.sent.append(self._ops.nbytes(x))
        return self._communicator.allgather_async(x, name)

    def synchronize(self, handle: Handle) -> Tensor:
        return self._communicator.synchronize(handle)

"""The exchange of gradients: buckets, compression, communication and clipping.

The same object is called eagerly (PyTorch) and while a ``tf.function`` is traced (TensorFlow), so it stores no tensor.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from hvd_train.compression.table import SMALL
from hvd_train.compression.uncompressed import Uncompressed
from hvd_train.protocol import Communicator, Compressor, Handle, Ops, Packing, Rounds, State, Tensor, TensorSpec, Wire
from hvd_train.update.buckets import COMPRESSED, plan
from hvd_train.update.clip import Clip
from hvd_train.update.gradient_norms import GradientNorms


@dataclass(frozen=True)
class Started:
    bucket: int
    rounds: Rounds
    wire: Wire
    handles: tuple[Handle, ...]


class Exchange:
    """The reduction of gradients over ranks: call ``reduce``, or ``start`` for each bucket and then ``finish`` once.

    ``op``: "sum", "average" (only uncompressed) or "adasum" (Maleki et al. 2021, one tensor per bucket).
    Tensors of fewer than ``small`` entries, and those whose indices are in ``whole``, are sent uncompressed.
    ``rules``: one for each tensor, or empty; the tensors of a bucket have the same rule.
    ``world``: the ranks that ``failures`` asks, if not those of ``communicator`` (for gradients that stay local).
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
        rules: Sequence[Hashable] = (),
        world: Communicator | None = None,
    ) -> None:
        plain = isinstance(compressor, Uncompressed)
        # One tensor per bucket: PowerSGD takes matrices, and Adasum scales by the norms of whole layers.
        if compressor.per_tensor or op == "adasum":
            packing = Packing(bucket_bytes=0, alone_bytes=0)
        elif not plain:
            packing = COMPRESSED
        self.buckets = plan(specs, packing, *((0, ()) if plain else (small, whole)), rules)
        self._specs, self.communicator, self.ops, self.op = specs, communicator, ops, op
        self._world = world or communicator
        self.clip = clip or Clip()
        self.norms: GradientNorms | None = None  # measures steps of an update that exchanges gradients
        little = [all(specs[i].size < small or i in whole for i in members) for members in self.buckets]
        self._compressors = [Uncompressed() if few else compressor for few in little]
        self._shapes = [self._shape(b) for b in range(len(self.buckets))]

    def _shape(self, bucket: int) -> tuple[int, ...]:
        """Return the shape of the tensor if the compressor takes one at a time, else that of the flat bucket."""
        members = [self._specs[i] for i in self.buckets[bucket]]
        if self._compressors[bucket].per_tensor and not members[0].is_vector:
            return members[0].shape
        return (sum(spec.size for spec in members),)

    def uncompressed(self, communicator: Communicator) -> Exchange:
        """Return an uncompressed exchange of the same buckets over another communicator."""
        other = copy.copy(self)
        other.communicator, other._compressors = communicator, [Uncompressed() for _ in self.buckets]
        other._shapes = [other._shape(b) for b in range(len(self.buckets))]
        return other

    def unclipped(self) -> Exchange:
        """Return the same exchange without clipping."""
        other = copy.copy(self)
        other.clip = Clip()
        return other

    def divided(self, groups: Sequence[Collection[int]]) -> Exchange:
        """Return the same exchange with buckets split so that none has tensors of two ``groups``."""
        other = copy.copy(self)
        parts = [
            (compressor, tuple(i for i in members if i in group))
            for group in groups
            for compressor, members in zip(self._compressors, self.buckets, strict=True)
        ]
        other._compressors = [compressor for compressor, members in parts if members]
        other.buckets = tuple(members for _, members in parts if members)
        other._shapes = [other._shape(b) for b in range(len(other.buckets))]
        return other

    def init_state(self) -> list[tuple[np.ndarray, ...]]:
        """Return the initial compressor state of each bucket."""
        return [
            self._compressors[b].init_state(self._shapes[b], self._specs[members[0]].dtype)
            for b, members in enumerate(self.buckets)
        ]

    def to_buckets(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Concatenate tensors, in the order of the specs, to flat buckets; a bucket of one tensor is not copied."""
        flats = []
        for members in self.buckets:
            parts = [self.ops.reshape(tensors[i], (-1,)) for i in members]
            flats.append(parts[0] if len(parts) == 1 else self.ops.concat(parts))
        return flats

    def from_buckets(self, flats: Sequence[Tensor]) -> list[Tensor]:
        """Cut the flat tensor of each bucket into tensors in the order and the shapes of the specs."""
        tensors: dict[int, Tensor] = {}
        for members, flat in zip(self.buckets, flats, strict=True):
            sizes = [self._specs[i].size for i in members]
            parts = self.ops.split(flat, sizes) if len(members) > 1 else [flat]
            for i, part in zip(members, parts, strict=True):
                tensors[i] = self.ops.reshape(part, self._specs[i].shape)
        return [tensors[i] for i in range(len(self._specs))]

    def reduce(self, flats: Sequence[Tensor], states: Sequence[State]) -> tuple[list[Tensor], list[State]]:
        """Exchange all buckets at once: ``start`` for each, then ``finish``."""
        return self.finish([self.start(b, flat, states[b]) for b, flat in enumerate(flats)])

    def start(self, bucket: int, gradient: Tensor, state: State) -> Started:
        """Start the exchange of one bucket. It does not block, so backward hooks may call it."""
        if self.norms:
            self.norms.sent(gradient)
        # (n,), or the shape of the tensor for a compressor that takes one at a time.
        shaped = self.ops.reshape(gradient, self._shapes[bucket])
        rounds = self._rounds(bucket, shaped, state)
        return self._send(bucket, rounds, next(rounds), 0)

    def _rounds(self, bucket: int, shaped: Tensor, state: State) -> Rounds:
        return self._compressors[bucket].rounds(shaped, state, self.ops)

    def finish(self, started: Sequence[Started]) -> tuple[list[Tensor], list[State]]:
        """Wait for every bucket that was started; return reduced flat gradients and new states in bucket order.

        The list is emptied, to free the memory of each gradient as soon as its bucket has arrived.
        """
        gradients, states = self._received(started)
        if self.norms:
            self.norms.received(gradients)
        return self.clip(gradients, self.ops), states

    def _received(self, started: Sequence[Started]) -> tuple[list[Tensor], list[State]]:
        results: dict[int, tuple[Tensor, State]] = {}
        pending, turn = started if isinstance(started, list) else list(started), 0
        while pending:
            turn += 1
            again = []
            # One turn for each round of a compressor. The next round of a bucket starts before later buckets are
            # waited for.
            while pending:
                item = pending.pop(0)
                reduced = tuple(self._wait(handle) for handle in item.handles)
                try:
                    wire = item.rounds.send(reduced)
                except StopIteration as done:
                    results[item.bucket] = done.value
                else:
                    again.append(self._send(item.bucket, item.rounds, wire, turn))
            pending = again
        # Buckets with fewer rounds finish earlier.
        ordered = [results[b] for b in sorted(results)]
        flat = [self.ops.reshape(gradient, (-1,)) for gradient, _ in ordered]
        return flat, [state for _, state in ordered]

    def _send(self, bucket: int, rounds: Rounds, wire: Wire, turn: int) -> Started:
        # Horovod matches transfers on all ranks by name, whatever order they start in.
        pairs = [(x, f"bucket{bucket}.{turn}.{k}") for k, x in enumerate(wire.tensors)]
        communicator, size = self.communicator, self.communicator.size
        if wire.kind == "gather":
            handles = [communicator.allgather_async(x, name) for x, name in pairs]
        elif wire.kind == "alltoall":
            handles = [communicator.alltoall_async(x, [x.shape[0] // size] * size, name) for x, name in pairs]
        else:
            handles = [communicator.allreduce_async(x, name, self.op) for x, name in pairs]
        return Started(bucket, rounds, wire, tuple(handles))

    def _wait(self, handle: Handle) -> Tensor:
        return self.communicator.synchronize(handle)

    def failures(self, gradients: Sequence[Tensor]) -> Tensor:
        """Count the ranks on which a gradient is not finite, (1,) float32. All ranks call it."""
        # Before compression, which may hide a non-finite entry and keep it in its residual.
        ops = self.ops
        # A product of 1 and 0: in a traced graph these are tensors, and Python's `and` does not work.
        finite = ops.cast(ops.all_finite(gradients[0]), "float32")
        for gradient in gradients[1:]:
            finite = finite * ops.cast(ops.all_finite(gradient), "float32")
        return self._world.synchronize(self._world.allreduce_async(ops.reshape(1 - finite, (1,)), "failures"))

"""PyTorch's optimizers over this rank's part of each flat bucket."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from hvd_train.config import OptimConfig
from hvd_train.frontends.named_arrays import TensorLayout
from hvd_train.frontends.pytorch.buckets import Flat
from hvd_train.frontends.pytorch.ops import TorchOps
from hvd_train.frontends.pytorch.optimizers import Kernel, array_of, make_kernel
from hvd_train.frontends.sharded_slots import ShardedSlots
from hvd_train.protocol import DividedUpdate
from hvd_train.update.parameter_groups import rule_of
from hvd_train.update.sharded import pieces


class Piece(NamedTuple):
    """The consecutive entries of a tensor, in its bucket's memory order, that this rank updates."""

    flat: Flat
    member: int  # of the bucket
    first: int
    last: int
    layout: TensorLayout

    def of(self, bucket: torch.Tensor) -> torch.Tensor:
        """Return a view of this piece: (n, 1) of a matrix, (n,) of a vector, which layer-wise formulas need."""
        part = self.flat.parts(bucket)[self.member][self.first : self.last]
        return part if self.layout.is_vector else part.view(-1, 1)


class ShardedOptimizer(ShardedSlots):
    """A kernel over pieces of tensors. Slots cover only these pieces."""

    before: Callable[[], None] = staticmethod(lambda: None)  # called before a step changes weights

    def __init__(
        self,
        options: OptimConfig,
        flats: list[Flat],
        layouts: Mapping[str, TensorLayout],
        ops: TorchOps,
        update: DividedUpdate,
    ) -> None:
        self._flats, self._update = flats, update
        self.kernel: Kernel = make_kernel(options, ops)
        self._pieces = [
            [
                Piece(flat, i, *bounds, layouts[flat.names[i]])
                for i, bounds in enumerate(pieces(flat.sizes, *update.bounds(b)))
            ]
            for b, flat in enumerate(flats)
        ]
        # Make the views once: to find a piece, a bucket is split into all its parts, 400 times for 200 layers.
        self._weights = [[piece.of(piece.flat.weight) for piece in bucket] for bucket in self._pieces]
        weights = [w for bucket in self._weights for w in bucket]
        self.slots = {name: [torch.zeros_like(w) for w in weights] for name in self.kernel.slots}
        self.steps = [torch.zeros((), dtype=torch.float32, device=w.device) for w in weights]
        # If norms are added over ranks, every rank must ask for every tensor, even without entries of it.
        self._stepped = [k for k, w in enumerate(weights) if len(w) or self.kernel.per_tensor]
        rules = [rule_of(options, piece.layout.name) for piece in self._all()]
        self._parts = [
            (make_kernel(rule.options(options), ops), rule, [k for k in self._stepped if rules[k] == rule])
            for rule in dict.fromkeys(rules)  # the same order on all ranks, which add norms
        ]

    @torch.no_grad()
    def step(self, gradients: Sequence[torch.Tensor], learning_rate: float) -> None:
        """Update the weights. ``gradients``: (n,) of this rank's part of each bucket."""
        self.before()
        weights = [w for bucket in self._weights for w in bucket]
        split = [
            part
            for bucket, gradient in zip(self._pieces, gradients, strict=True)
            for part in torch.split(gradient, [piece.last - piece.first for piece in bucket])
        ]
        lists = [weights, [g.view(w.shape) for g, w in zip(split, weights, strict=True)], *self.slots.values()]
        for kernel, rule, stepped in self._parts:
            if stepped:
                part = [[tensors[k] for k in stepped] for tensors in (*lists, self.steps)]
                kernel(part[0], part[1], part[2:-1], part[-1], learning_rate * rule.factor, self._update.total)

    def parts(self, bucket: int) -> list[torch.Tensor]:
        return [w.view(-1) for w in self._weights[bucket]]

    def slot(self, name: str, bucket: int) -> torch.Tensor:
        """Return (n,): a slot of this rank's part of a bucket."""
        return torch.cat([x.view(-1) for x in self._of_bucket(name, bucket)])

    @torch.no_grad()
    def take(self, bucket: int, bounds: tuple[int, int], weights: torch.Tensor) -> None:
        """Assign (n,) to a bucket's weights between ``bounds``."""
        flat = self._flats[bucket]
        cuts = pieces(flat.sizes, *bounds)
        parts = [part[first:last] for part, (first, last) in zip(flat.parts(flat.weight), cuts, strict=True)]
        torch._foreach_copy_(parts, list(torch.split(weights, [last - first for first, last in cuts])))

    # ---- state

    def _read_step(self) -> np.ndarray:
        return array_of(self.steps[(self._stepped or [0])[0]])  # an empty piece counts no steps

    @torch.no_grad()
    def _load_step(self, step: np.ndarray) -> None:
        for steps in self.steps:
            steps.copy_(torch.from_numpy(np.asarray(step)))

    def _read(self, slot: torch.Tensor) -> np.ndarray:
        return array_of(slot.view(-1))

    @torch.no_grad()
    def _write(self, slot: torch.Tensor, part: np.ndarray) -> None:
        slot.view(-1).copy_(torch.from_numpy(part))

    def _to_native(self, piece: Piece, stored: np.ndarray) -> np.ndarray:
        x = stored.reshape(piece.flat.shapes[piece.member])
        return x.transpose(0, 3, 1, 2) if piece.flat.channels_last and x.ndim == 4 else x

    def _to_stored(self, piece: Piece, native: np.ndarray) -> np.ndarray:
        return native.transpose(0, 2, 3, 1) if piece.flat.channels_last and native.ndim == 4 else native

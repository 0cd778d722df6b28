"""The optimizers over this rank's part of each bucket of Keras' variables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from hvd_train.config import OptimConfig
from hvd_train.errors import ConfigError
from hvd_train.frontends.named_arrays import TensorLayout
from hvd_train.frontends.sharded_slots import ShardedSlots
from hvd_train.frontends.tensorflow.host_memory import CommonWeights
from hvd_train.frontends.tensorflow.optimizers import Kernel, make_kernel, rated, view
from hvd_train.protocol import DividedUpdate
from hvd_train.update.parameter_groups import rule_of
from hvd_train.update.sharded import pieces


class Piece(NamedTuple):
    """The consecutive entries of a variable that this rank updates. ``weight``: the variable that a kernel updates."""

    layout: TensorLayout
    variable: Any
    first: int
    last: int
    weight: tf.Variable

    def read(self) -> tf.Tensor:
        return tf.reshape(tf.reshape(self.variable.value, (-1,))[self.first : self.last], self.weight.shape)


class ShardedOptimizer(ShardedSlots):
    """A kernel over pieces of variables, each with its own variable, because TensorFlow's kernels update whole ones."""

    def __init__(
        self,
        options: OptimConfig,
        trainable: Mapping[str, Any],
        layouts: Mapping[str, TensorLayout],
        update: DividedUpdate,
        common: CommonWeights | None = None,
    ) -> None:
        """``common``: set if ranks share memory. Pieces then keep their values between steps."""
        self._update, self._variables, self._common = update, list(trainable.values()), common
        self.kernel: Kernel = make_kernel(options)
        rules = {layout.name: rule_of(options, layout.name) for layout in layouts.values()}
        kernels = {rule: make_kernel(rule.options(options)) for rule in rules.values()}
        self._rules = {name: (kernels[rule], rule) for name, rule in rules.items()}
        paths = list(trainable)
        self._pieces: list[list[Piece]] = []
        for b, members in enumerate(update.buckets):
            bounds = pieces([int(np.prod(self._variables[i].shape)) for i in members], *update.bounds(b))
            tensors = [(layouts[paths[i]], self._variables[i]) for i in members]
            self._pieces.append(
                [
                    Piece(layout, v, first, last, self._make(v, layout, last - first))
                    for (layout, v), (first, last) in zip(tensors, bounds, strict=True)
                ]
            )
        self.slots = {
            slot: [self._make(piece.variable, piece.layout, piece.last - piece.first) for piece in self._all()]
            for slot in self.kernel.slots
        }
        self.steps = tf.Variable(0, trainable=False, dtype=tf.int64)
        if common:
            common.refresh = self._read_pieces
            self._read_pieces()

    def _read_pieces(self) -> None:
        for piece in self._all():
            piece.weight.assign(piece.read())

    @staticmethod
    def _make(variable: Any, layout: TensorLayout, entries: int) -> tf.Variable:
        """Make (n, 1) for a piece of a matrix, (n,) of a vector: layer-wise formulas treat vectors differently."""
        shape = (entries,) if layout.is_vector else (entries, 1)
        return tf.Variable(tf.zeros(shape, variable.dtype), trainable=False)

    def step(self, gradients: Sequence[tf.Tensor], learning_rate: tf.Tensor) -> None:
        """Update the weights. ``gradients``: (n,) of this rank's part of each bucket."""
        step = self.steps.value() + 1
        slots = list(zip(*self.slots.values(), strict=True)) or [()] * sum(map(len, self._pieces))
        parts = [
            part
            for bucket, gradient in zip(self._pieces, gradients, strict=True)
            for part in tf.split(gradient, [piece.last - piece.first for piece in bucket])
        ]
        for piece, gradient, cells in zip(self._all(), parts, slots, strict=True):
            # If norms are added over ranks, every rank must ask for every tensor, even without entries of it.
            if piece.last > piece.first or self.kernel.per_tensor:
                if not self._common:
                    piece.weight.assign(piece.read())
                gradient = tf.reshape(gradient, piece.weight.shape)
                kernel, rule = self._rules[piece.layout.name]
                rate = rated(tf.cast(learning_rate, gradient.dtype), rule)
                kernel(piece.weight, gradient, cells, step, rate, self._update.total)
        if self.kernel.counts_steps:
            self.steps.assign(step)
        if self._common:
            self._common.write([(p.variable, p.first, p.last, p.weight.read_value()) for p in self._all()])

    def parts(self, bucket: int) -> list[tf.Tensor]:
        return [tf.reshape(piece.weight.value(), (-1,)) for piece in self._pieces[bucket]]

    def slot(self, name: str, bucket: int) -> tf.Tensor:
        """Return (n,): a slot of this rank's part of a bucket."""
        return tf.concat([tf.reshape(x.value(), (-1,)) for x in self._of_bucket(name, bucket)], 0)

    def take(self, bucket: int, bounds: tuple[int, int], weights: tf.Tensor) -> None:
        """Assign (n,) to a bucket's weights between ``bounds``: to all, or with common memory to this rank's."""
        variables = [piece.variable for piece in self._pieces[bucket]]
        cuts = pieces([int(np.prod(variable.shape)) for variable in variables], *bounds)
        parts = tf.split(weights, [last - first for first, last in cuts])
        if self._common:
            self._common.write([(v, *span, part) for v, span, part in zip(variables, cuts, parts, strict=True)])
            return
        for variable, part in zip(variables, parts, strict=True):
            variable.assign(tf.reshape(part, variable.shape))
            if variable.constraint is not None:
                variable.assign(variable.constraint(variable))

    # ---- state

    def _read_step(self) -> np.ndarray:
        return np.asarray(view(self.steps).astype(np.float32))  # float32, as in PyTorch

    def _load_step(self, step: np.ndarray) -> None:
        self.steps.assign(int(step))

    def _read(self, slot: tf.Variable) -> np.ndarray:
        return view(slot).reshape(-1)

    def _write(self, slot: tf.Variable, part: np.ndarray) -> None:
        slot.assign(part.reshape(slot.shape).astype(slot.dtype.as_numpy_dtype))

    def _to_native(self, piece: Piece, stored: np.ndarray) -> np.ndarray:
        return stored.reshape(piece.variable.shape)

    def _to_stored(self, piece: Piece, native: np.ndarray) -> np.ndarray:
        return native


def check_constraints(trainable: Mapping[str, Any], averages: bool) -> None:
    """Raise ConfigError if a weight has a constraint and its average over time is kept.

    A constraint needs the whole tensor, which a rank has only after it has averaged its part.
    """
    constrained = next((path for path, v in trainable.items() if v.constraint is not None), "")
    if constrained and averages:
        what = f"{constrained} has a constraint, which averages of parts of the weights would not know"
        fix = "leave optim.sharded out, or the average of the weights"
        raise ConfigError(what, where="optim.sharded", fix=fix, common=True)

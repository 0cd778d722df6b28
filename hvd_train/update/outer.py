"""Each rank trains by its local gradients; now and then an outer optimizer moves the weights that all share.

DiLoCo (Douillard et al. 2023). SlowMo, post-local SGD and local SGD are special cases. With ``topk`` and a momentum of
0 it is SparseLoCo (arXiv 2508.15706).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from hvd_train.errors import ConfigError
from hvd_train.protocol import EXCHANGE_PREFIX, Communicator, Entry, Exchange, Parameters, Placement, Tensor
from hvd_train.update.flat_state import FlatState
from hvd_train.update.local_update import LocalUpdate

MOMENTUM, SAMPLES = f"{EXCHANGE_PREFIX}outer_momentum/", f"{EXCHANGE_PREFIX}samples"


class Outer(LocalUpdate):
    """Move the global weights G by what the ranks have learned, with w those of a rank and n its samples since then:

    d = sum of n (G - w) / sum of n;  v = momentum (v + d);  G -= rate (d + v);  w = G

    after every ``steps`` steps. v is ``momentum`` times Nesterov's, which saves the memory of a product. Up to step
    ``start`` gradients travel, and all ranks make the same steps.

    With a compressor, e being what it left out: s = C(feedback e + n (G - w) / sum of n), and d is the sum of s.
    """

    mix = 0.0  # the share of w that stays

    def __init__(
        self,
        frontend: Parameters,
        exchange: Exchange,
        alone: Communicator,
        steps: int,
        rate: float,
        momentum: float,
        start: int,
        feedback: float = 0.0,
    ) -> None:
        self.steps, self.rate, self.momentum, self.synchronous, self.feedback = steps, rate, momentum, start, feedback
        fragments = self._divide(frontend)
        exchange = exchange.divided(fragments)
        self._joint, self._together = exchange.unclipped(), exchange.uncompressed(exchange.communicator)
        # The same buckets for gradients, so that the weights of a bucket are those of a delta.
        self._alone = exchange.uncompressed(alone)
        super().__init__(frontend, self._alone)
        self._flat = FlatState(frontend, self.buckets)
        self._fragments = [[b for b, members in enumerate(self.buckets) if members[0] in part] for part in fragments]
        self._errors = self._kept_residuals = self._cells(self._joint)
        first = [frontend.ops.to_numpy(x) for x in frontend.flat_weights()]
        self._global = [frontend.ops.keep(x) for x in first]
        self._velocity = [frontend.ops.keep(np.zeros_like(x)) for x in first if momentum]
        # (fragments, 3): samples since a fragment's last join, of this rank and of all; steps by local gradients.
        self._samples = np.zeros((len(fragments), 3), np.int64)
        self._combine_all = frontend.compiled(self._combine)
        self.interval = steps  # steps between two joins, of any part of the weights

    def _divide(self, frontend: Parameters) -> Sequence[Collection[int]]:
        """Return the parts of the weights that join at a time, as indices into the specs."""
        return [range(len(frontend.specs()))]

    # ---- when

    def before_step(self, step: int, samples: int) -> None:
        local = step > self.synchronous
        exchange = self._alone if local else self._together
        if self.exchange is not exchange:
            self.exchange, self.local_gradients = exchange, local
            self.frontend.retrace()
        if local:
            self._samples[:, 1:] += samples, 1
        elif local_before := int(self._samples[0, 2]):  # of a run that goes on with a later start: slots differ
            what = "the ranks have trained apart before, and their optimizers differ"
            fix = f"set it to at most {step - 1 - local_before}"
            raise ConfigError(what, where=f"exchange.outer_start: {self.synchronous}", fix=fix, common=True)

    def after_step(self, step: int, samples: int) -> None:
        if step > self.synchronous:
            self._samples[:, 0] += samples
            self._after_local_step(step)
        elif step == self.synchronous:
            self._take_as_global()

    def _after_local_step(self, step: int) -> None:
        self.diverged = True
        if step % self.steps == 0:
            self.join_all()

    def join_all(self) -> None:
        """Join all weights at once; all ranks call it after the same step."""
        self._combine_all(self._share(0))
        self.diverged = False

    def _share(self, fragment: int) -> Tensor:
        """Return this rank's share of the samples since the last join, () float64, and begin to count anew."""
        local, total = self._samples[fragment, :2]
        self._samples[fragment, :2] = 0
        return self.frontend.ops.from_numpy(np.array(local / max(total, 1)))

    # ---- how: what a front-end may trace

    def _combine(self, share: Tensor) -> None:
        buckets = range(len(self.buckets))
        self._move(buckets, self._reduce(self._deltas(buckets, share)))

    def _deltas(self, buckets: Sequence[int], share: Tensor) -> list[Tensor]:
        """Return this rank's part of d, (n,) for each bucket."""
        ops, deltas = self.frontend.ops, []
        for b in buckets:
            delta = self._global[b].read() - self.optimizer.weights(b)
            # In place where the framework can, here and below: a large model has no room in a cache.
            delta *= ops.cast(share, ops.dtype(delta))
            deltas.append(delta)
        return deltas

    def _reduce(self, deltas: Sequence[Tensor]) -> list[Tensor]:
        """Return d of all buckets."""
        states = [tuple(cell.read() for cell in cells) for cells in self._errors]
        # What follows the residual is no gradient: PowerSGD's basis.
        faded = [(self.feedback * state[0], *state[1:]) if state else () for state in states]
        reduced, states = self._joint.reduce(deltas, faded)
        for cells, state in zip(self._errors, states, strict=True):
            for cell, value in zip(cells, state, strict=True):
                cell.write(value)
        return reduced

    def _move(self, buckets: Sequence[int], deltas: Sequence[Tensor]) -> None:
        """Move v, G and w."""
        for b, delta in zip(buckets, deltas, strict=True):
            cells = [self._global[b], *self._velocity[b : b + 1]]
            local = [self.optimizer.weights(b)] if self.mix else []
            weights, *moved = self.frontend.ops.in_blocks(self._moved, delta, *(cell.read() for cell in cells), *local)
            for cell, x in zip(cells, moved, strict=True):
                cell.write(x)
            self.optimizer.take(b, weights)

    def _moved(self, delta: Tensor, common: Tensor, *rest: Tensor) -> list[Tensor]:
        """Return w, G and v, if there is one, after a step; ``rest``: v and w before it."""
        velocities = list(rest[:1]) if self._velocity else []
        if velocities:
            (velocity,) = velocities
            velocity += delta
            velocity *= self.momentum
            delta += velocity
            velocities = [velocity]
        delta *= self.rate
        common -= delta
        return [(1 - self.mix) * common + self.mix * rest[-1] if self.mix else common, common, *velocities]

    # ---- the global weights, and what a checkpoint keeps

    def common_weights(self) -> list[Tensor]:
        """Return (n,) for each bucket: the global weights, which are not to be changed."""
        return [cell.read() for cell in self._global]

    def set_common_weights(self, weights: Sequence[Tensor]) -> None:
        """Take (n,) for each bucket as the global weights; those of the model stay."""
        for cell, x in zip(self._global, weights, strict=True):
            cell.write(x)

    def _load_common_weights(self) -> None:
        for b, weights in enumerate(self.common_weights()):
            self.optimizer.take(b, weights)

    def _take_as_global(self) -> None:
        """Take the model's weights, equal on all ranks, as G."""
        self.frontend.run_queued()
        self.set_common_weights(self.frontend.flat_weights())

    def state(self) -> list[Entry]:
        samples = Entry(SAMPLES, Placement.PER_RANK, lambda: self._samples)
        entries = [*super().state(), samples]
        for b, cell in enumerate(self._velocity):
            entries += self._flat.entries(MOMENTUM, b, cell.read)
        return entries

    def load(self, tree: Mapping[str, np.ndarray], placement: Placement) -> None:
        if placement is Placement.REPLICATED:
            for b, cell in enumerate(self._velocity):
                self._flat.load(MOMENTUM, b, cell, tree)
        else:
            # The model has the checkpoint's weights, and gets this rank's below.
            self._load_training()
            self._take_as_global()
            self._samples = np.array(tree.get(SAMPLES, np.zeros_like(self._samples)))
        super().load(tree, placement)

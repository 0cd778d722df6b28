"""Local training with an outer optimizer, which moves the global weights every few steps.

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
    """Outer steps of the global weights G. A rank has weights w, and n samples since the last outer step:

    d = sum of n (G - w) / sum of n;  v = momentum (v + d);  G -= rate (d + v);  w = G

    after every ``steps`` steps. v is ``momentum`` times Nesterov's, which saves the memory of a product. Up to step
    ``start`` training is synchronous.

    With a compressor C and its residual e: s = C(feedback e + n (G - w) / sum of n), and d is the sum of s.
    """

    mix = 0.0  # after an outer step w = (1 - mix) G + mix w

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
        self._delta_exchange, self._synchronous_exchange = (
            exchange.unclipped(),
            exchange.uncompressed(exchange.communicator),
        )
        # The same buckets for gradients, so that the optimizer's flat weights match the deltas.
        self._local_exchange = exchange.uncompressed(alone)
        super().__init__(frontend, self._local_exchange)
        self._flat = FlatState(frontend, self.buckets)
        self._fragments = [[b for b, members in enumerate(self.buckets) if members[0] in part] for part in fragments]
        self._errors = self._kept_residuals = self._cells(self._delta_exchange)
        first = [frontend.ops.to_numpy(x) for x in frontend.flat_weights()]
        self._global = [frontend.ops.keep(x) for x in first]
        self._velocity = [frontend.ops.keep(np.zeros_like(x)) for x in first if momentum]
        # (fragments, 3): samples since a fragment's last sync, of this rank and of all; steps by local gradients.
        self._samples = np.zeros((len(fragments), 3), np.int64)
        self._combine_all = frontend.compiled(self._combine)
        self.interval = steps  # steps between two synchronizations of any fragment

    def _divide(self, frontend: Parameters) -> Sequence[Collection[int]]:
        """Divide the weights into fragments, which synchronize one at a time, as indices into the specs."""
        return [range(len(frontend.specs()))]

    # ---- when to synchronize

    def before_step(self, step: int, samples: int) -> None:
        local = step > self.synchronous
        exchange = self._local_exchange if local else self._synchronous_exchange
        if self.exchange is not exchange:
            self.exchange, self.local_gradients = exchange, local
            self.frontend.retrace()
        if local:
            self._samples[:, 1:] += samples, 1
        elif local_before := int(self._samples[0, 2]):  # a resumed run with a later start: optimizer states differ
            what = "the ranks have trained locally before, and their optimizers differ"
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
        """Synchronize all weights; all ranks call it after the same step."""
        self._combine_all(self._take_share(0))
        self.diverged = False

    def _take_share(self, fragment: int) -> Tensor:
        """Return this rank's share of the samples since the last sync, () float64, and reset the counts."""
        local, total = self._samples[fragment, :2]
        self._samples[fragment, :2] = 0
        return self.frontend.ops.from_numpy(np.array(local / max(total, 1)))

    # ---- the outer step, which a front-end may trace

    def _combine(self, share: Tensor) -> None:
        buckets = range(len(self.buckets))
        self._outer_step(buckets, self._reduce(self._deltas(buckets, share)))

    def _deltas(self, buckets: Sequence[int], share: Tensor) -> list[Tensor]:
        """Return this rank's part of d, (n,) for each bucket."""
        ops, deltas = self.frontend.ops, []
        for b in buckets:
            delta = self._global[b].read() - self.optimizer.weights(b)
            # In place if the framework can, here and below: a large model does not fit into a cache.
            delta *= ops.cast(share, ops.dtype(delta))
            deltas.append(delta)
        return deltas

    def _reduce(self, deltas: Sequence[Tensor]) -> list[Tensor]:
        """Compress and sum the deltas over the ranks; return d of all buckets."""
        states = [tuple(cell.read() for cell in cells) for cells in self._errors]
        # Only the residual is scaled; PowerSGD's basis follows it.
        faded = [(self.feedback * state[0], *state[1:]) if state else () for state in states]
        reduced, states = self._delta_exchange.reduce(deltas, faded)
        for cells, state in zip(self._errors, states, strict=True):
            for cell, value in zip(cells, state, strict=True):
                cell.write(value)
        return reduced

    def _outer_step(self, buckets: Sequence[int], deltas: Sequence[Tensor]) -> None:
        """Update v, G and w."""
        for b, delta in zip(buckets, deltas, strict=True):
            cells = [self._global[b], *self._velocity[b : b + 1]]
            local = [self.optimizer.weights(b)] if self.mix else []
            weights, *moved = self.frontend.ops.in_blocks(
                self._outer_formula, delta, *(cell.read() for cell in cells), *local
            )
            for cell, x in zip(cells, moved, strict=True):
                cell.write(x)
            self.optimizer.take(b, weights)

    def _outer_formula(self, delta: Tensor, common: Tensor, *rest: Tensor) -> list[Tensor]:
        """Return w, G and v, if there is one, after an outer step; ``rest``: v and w before it."""
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
        """Return the global weights, (n,) for each bucket; callers must not change them."""
        return [cell.read() for cell in self._global]

    def set_common_weights(self, weights: Sequence[Tensor]) -> None:
        """Set the global weights, (n,) for each bucket; the model's stay unchanged."""
        for cell, x in zip(self._global, weights, strict=True):
            cell.write(x)

    def _load_common_weights(self) -> None:
        for b, weights in enumerate(self.common_weights()):
            self.optimizer.take(b, weights)

    def _take_as_global(self) -> None:
        """Set G to the model's weights, which are equal on all ranks."""
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
            # The model holds the checkpoint's weights; ``super().load`` loads this rank's.
            self._load_training()
            self._take_as_global()
            self._samples = np.array(tree.get(SAMPLES, np.zeros_like(self._samples)))
        super().load(tree, placement)

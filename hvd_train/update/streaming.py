"""Outer steps of one part of the weights at a time, whose transfer overlaps with training.

Streaming DiLoCo (Douillard et al. 2025, arXiv 2501.18512). It sends as many bytes as ``outer``, in smaller portions.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial

import numpy as np

from hvd_train.errors import ConfigError
from hvd_train.protocol import EXCHANGE_PREFIX, Communicator, Entry, Exchange, Parameters, Placement, Tensor, Tree
from hvd_train.update.outer import Outer

PART = f"{EXCHANGE_PREFIX}part_under_way/"


def _result(deltas: Sequence[Tensor]) -> Callable[[], Sequence[Tensor]]:
    return lambda: deltas


class Streaming(Outer):
    """The update that sends d of the next fragment every ``steps / fragments`` steps and uses it ``delay`` steps later.

    Then v and G of the fragment are updated as in ``Outer``, and w = (1 - mix) G + mix w. A checkpoint waits for the d
    in flight and keeps it, so that a resumed run uses it at the same step.
    """

    def __init__(
        self,
        frontend: Parameters,
        exchange: Exchange,
        alone: Communicator,
        steps: int,
        rate: float,
        momentum: float,
        start: int,
        fragments: int,
        delay: int,
        mix: float,
    ) -> None:
        self.fragments, self.lag, self.mix = fragments, delay, mix
        super().__init__(frontend, exchange, alone, steps, rate, momentum, start)
        self.interval = steps // fragments
        ways = (
            [partial(self._deltas, part) for part in self._fragments],
            [partial(self._fragment_step, k) for k in range(fragments)],
        )
        self._fragment_deltas, self._fragment_steps = ([frontend.compiled(way) for way in of] for of in ways)
        self._send_fragment = [
            frontend.in_background(partial(self._start, part), self._finish) for part in self._fragments
        ]
        # The fragment in flight, and the function that waits for its d.
        self._in_flight: tuple[int, Callable[[], Sequence[Tensor]]] | None = None
        self._received: Tree = {}  # from a checkpoint

    def _divide(self, frontend: Parameters) -> Sequence[Collection[int]]:
        """Assign each tensor, the largest first, to the fragment with the fewest entries."""
        specs = frontend.specs()
        if self.fragments > len(specs):
            what = f"the model has {len(specs)} tensors, and none is divided"
            raise ConfigError(what, where=f"exchange.fragments: {self.fragments}", fix="set fewer", common=True)
        parts: list[list[int]] = [[] for _ in range(self.fragments)]
        # By names, so that both frameworks divide alike.
        for i in sorted(range(len(specs)), key=lambda i: (-specs[i].size, specs[i].name)):
            min(parts, key=lambda part: sum(specs[j].size for j in part)).append(i)
        return parts

    # ---- when to synchronize

    def _after_local_step(self, step: int) -> None:
        self.diverged = True
        turn, place = divmod(step, self.interval)
        if place == 0:
            self._start_fragment((turn - 1) % self.fragments)
        if place == self.lag and self._in_flight:
            self._apply_fragment()
            self.diverged = self.fragments > 1 or self.lag > 0 or self.mix > 0

    def join_all(self) -> None:
        if self._in_flight:
            self._apply_fragment()
        for fragment, (_, samples, _) in enumerate(self._samples.tolist()):
            if samples:  # else it has sent in this step
                self._start_fragment(fragment)
                self._apply_fragment()
        self._load_common_weights()
        self.diverged = False

    def _start_fragment(self, fragment: int) -> None:
        self._in_flight = (
            fragment,
            self._send_fragment[fragment](*self._fragment_deltas[fragment](self._take_share(fragment))),
        )

    def _apply_fragment(self) -> None:
        """Wait for the averaged change in flight, and apply it to its fragment."""
        assert self._in_flight
        (fragment, wait), self._in_flight = self._in_flight, None
        self._fragment_steps[fragment](*wait())

    # ---- the outer step of a fragment

    def _start(self, buckets: Sequence[int], *deltas: Tensor) -> list[Tensor]:
        return [self._delta_exchange.start(b, delta, ()) for b, delta in zip(buckets, deltas, strict=True)]

    def _finish(self, started: Sequence[Tensor]) -> list[Tensor]:
        return self._delta_exchange.finish(started)[0]

    def _fragment_step(self, fragment: int, *deltas: Tensor) -> None:
        self._outer_step(self._fragments[fragment], deltas)

    # ---- what a checkpoint keeps

    @property
    def in_flight(self) -> bool:
        return self._in_flight is not None

    def finish_transfers(self) -> None:
        """Wait for the averaged change in flight. It is applied later, at its own step."""
        if self._in_flight:
            fragment, wait = self._in_flight
            self._in_flight = fragment, _result(wait())

    def state(self) -> list[Entry]:
        entries = super().state()
        self.finish_transfers()
        if self._in_flight:
            fragment, wait = self._in_flight
            for b, delta in zip(self._fragments[fragment], wait(), strict=True):
                entries += self._flat.entries(PART, b, lambda delta=delta: delta)  # type: ignore[misc]
        return entries

    def load(self, tree: Mapping[str, np.ndarray], placement: Placement) -> None:
        if placement is Placement.REPLICATED:
            self._received |= {key: x for key, x in tree.items() if key.startswith(PART)}
        else:
            self._in_flight, received, self._received = None, self._received, {}
            for fragment, part in enumerate(self._fragments):
                names = [name for b in part for name in self._flat.names(PART, b)]
                if received.keys() == set(names):  # else the fragments were others
                    self._in_flight = fragment, _result([self._flat.flat(PART, b, received) for b in part])
        super().load(tree, placement)

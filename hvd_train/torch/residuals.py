"""What a compressor left out of a gradient comes with the next one, if the gradient was used."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hvd_train.protocol import State


class Residuals:
    """The compressor's state of every bucket, as it is after the last pass and as it was before passes of no known end.

    A pass makes a new state of the old one: gradient + old residual = what came out + new residual. If the gradients
    are thrown away instead of being used for a step, the old one holds again.
    """

    def __init__(self, buckets: Sequence[Sequence[int]], sizes: Sequence[int], state: Sequence[State]) -> None:
        self.state = list(state)
        self._before = list(state)
        self._buckets, self._sizes = buckets, sizes
        self._open: list[set[int]] = [set() for _ in buckets]

    def passed(self, state: Sequence[State]) -> None:
        """The states after a pass; every member's end is open."""
        for b, new in enumerate(state):
            if new:  # else nothing of the bucket is compressed
                self.state[b] = new
                self._open[b] = set(self._buckets[b])

    def open(self) -> list[int]:
        """Members whose gradients were neither used nor thrown away."""
        return [i for members in self._open for i in members]

    def settle(self, used: Mapping[int, bool]) -> None:
        """Members' gradients were used for a step (True), or thrown away (False)."""
        for b, members in enumerate(self._open):
            ends = {i: used[i] for i in members if i in used}
            if not ends:
                continue
            if len(ends) < len(self._buckets[b]) or len(set(ends.values())) > 1:
                self._copy(b, ends)
            elif any(ends.values()):
                self._before[b] = self.state[b]
            else:
                self.state[b] = self._before[b]
            members.difference_update(ends)
            if not members:
                self._before[b] = self.state[b]

    def _copy(self, b: int, ends: Mapping[int, bool]) -> None:
        """A part of a bucket: its arrays are flat (sparse and quantized ones), and members lie one behind another."""
        sizes = [self._sizes[i] for i in self._buckets[b]]
        for now, before in zip(self.state[b], self._before[b], strict=True):
            parts = zip(self._buckets[b], now.split(sizes), before.split(sizes), strict=True)
            for i, new, old in parts:
                if i in ends:
                    old.copy_(new) if ends[i] else new.copy_(old)

"""Residuals: a compressor adds what it left out of a gradient to the next one, if the gradient was used for a step."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch

from hvd_train.protocol import State
from hvd_train.torch import backward
from hvd_train.torch.bit_sum import bits
from hvd_train.torch.gradient_memory import GradientMemory


class Residuals:
    """The compressor's state of every bucket, as it is after the last pass and as it was before passes of no known end.

    A pass makes a new state of the old one: gradient + old residual = what came out + new residual. If the gradients
    are thrown away instead of being used for a step, the old one holds again.
    """

    def __init__(self, buckets: Sequence[Sequence[int]], sizes: Sequence[int], state: Sequence[State]) -> None:
        self.state = list(state)
        self._before = list(state)
        self._buckets, self._sizes = buckets, sizes
        # By bucket: members of which it is open whether their gradients are used.
        self._open: list[set[int]] = [set() for _ in buckets]

    def passed(self, state: Sequence[State]) -> None:
        """Take the states after a pass; whether its gradients are used is open."""
        for b, new in enumerate(state):
            if new:  # else nothing of the bucket is compressed
                self.state[b] = new
                self._open[b] = set(self._buckets[b])

    def open(self) -> list[int]:
        """Return the members whose gradients were neither used nor thrown away."""
        return [i for members in self._open for i in members]

    @torch.no_grad()
    def rescale(self, factor: float) -> None:
        """Multiply all states, after which gradients are ``factor`` times as large."""
        # A state after a pass may be that before it. PowerSGD's basis is of no unit.
        for x in {id(x): x for state in (*self.state, *self._before) for x in state}.values():
            x.mul_(factor)

    def commit(self, used: Mapping[int, bool]) -> None:
        """Keep the new state of members whose gradients were used (True), the old one of those thrown away (False)."""
        for b, members in enumerate(self._open):
            ends = {i: used[i] for i in members if i in used}
            if not ends:
                continue
            # If all members of a bucket were used, or all thrown away, one of the two states stays: nothing is copied.
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
        """Commit a part of a bucket: its arrays are flat, also sparse and quantized ones, one member behind another."""
        sizes = [self._sizes[i] for i in self._buckets[b]]
        for now, before in zip(self.state[b], self._before[b], strict=True):
            parts = zip(self._buckets[b], now.split(sizes), before.split(sizes), strict=True)
            for i, new, old in parts:
                if i in ends:
                    old.copy_(new) if ends[i] else new.copy_(old)


class GradientUse:
    """Find out, for the residuals, whether the gradients of a pass were used for a step or thrown away.

    A distributed optimizer says so. A loop may also update weights by itself, clear gradients, or keep them.
    """

    def __init__(self, residuals: Residuals, tensors: Sequence[torch.Tensor], memory: GradientMemory) -> None:
        self._residuals, self._tensors, self._memory = residuals, tensors, memory
        self._pass = -1  # autograd's number of the pass at whose beginning this was last asked
        self._weights: dict[int, int] = {}  # bit sums of parameters that no optimizer has stepped so far
        self._stepped: set[int] = set()

    def used(self, members: Collection[int]) -> None:
        """Note that an optimizer has used the gradients of ``members``."""
        self._stepped.update(members)
        self._residuals.commit(dict.fromkeys(members, True))

    def pass_ended(self, state: Sequence[State]) -> None:
        """Take the compressor's states after a pass."""
        self._residuals.passed(state)

    def note(self, absent: Collection[int]) -> None:
        """Note weights and gradients as a pass leaves them; ``absent``: members whose gradient no rank has."""
        self._residuals.commit(dict.fromkeys(absent, False))
        pending = self._residuals.open()
        # Parameters that an optimizer has stepped need no bit sum: its hook says when it uses them.
        self._weights = {i: int(bits(self._tensors[i])) for i in pending if i not in self._stepped}
        self._memory.note_versions(pending)

    @torch.no_grad()
    def before_backward(self, stepping: bool) -> None:
        """Decide about the last pass, before a new one adds its first gradient. ``stepping``: within a step."""
        if (number := backward.current_pass()) == self._pass:
            return
        self._pass = number
        ends = {}
        for i in self._residuals.open():
            view, gradient = self._memory.views[i], self._tensors[i].grad
            # In this order: a script that updates weights itself may clear the gradient afterwards.
            moved = i in self._weights and int(bits(self._tensors[i])) != self._weights[i]
            if moved or stepping:
                ends[i] = True
            elif gradient is view:
                # Zeroed in place: thrown away. Else it stays open, as the next pass adds to it.
                if self._memory.is_changed(i) and not view.any():
                    ends[i] = False
            else:
                del gradient
                # Set to None; used only if the script holds the tensor elsewhere, to use it later.
                ends[i] = self._memory.is_referenced(i, 1)  # ``view`` is one more reference
        self._residuals.commit(ends)

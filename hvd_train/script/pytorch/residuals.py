"""Compression residuals: they are carried to the next gradient only if the last one was used in a step."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch

from hvd_train.protocol import State
from hvd_train.script.pytorch import backward
from hvd_train.script.pytorch.bit_sum import bits
from hvd_train.script.pytorch.gradient_memory import GradientMemory


class Residuals:
    """The compressor states of every bucket: after the last pass, and before passes whose outcome is unknown.

    A pass makes a new state from the old one: gradient + old residual = decoded part + new residual. If the gradients
    are discarded instead of being used in a step, the old state is restored.
    """

    def __init__(self, buckets: Sequence[Sequence[int]], sizes: Sequence[int], state: Sequence[State]) -> None:
        self.state = list(state)
        self._before = list(state)
        self._buckets, self._sizes = buckets, sizes
        # By bucket: members whose gradients are neither used nor discarded yet.
        self._open: list[set[int]] = [set() for _ in buckets]

    def passed(self, state: Sequence[State]) -> None:
        """Store the states after a pass, whose gradients may still be used or discarded."""
        for b, new in enumerate(state):
            if new:  # else the bucket is not compressed
                self.state[b] = new
                self._open[b] = set(self._buckets[b])

    def open(self) -> list[int]:
        """Return the members whose gradients are neither used nor discarded yet."""
        return [i for members in self._open for i in members]

    @torch.no_grad()
    def rescale(self, factor: float) -> None:
        """Multiply all states by ``factor``, by which the loss scale has changed."""
        # Old and new states may be the same tensors. PowerSGD's basis may be scaled as well.
        for x in {id(x): x for state in (*self.state, *self._before) for x in state}.values():
            x.mul_(factor)

    def commit(self, used: Mapping[int, bool]) -> None:
        """Keep the new state of members whose gradients were used (True), the old one of discarded ones (False)."""
        for b, members in enumerate(self._open):
            ends = {i: used[i] for i in members if i in used}
            if not ends:
                continue
            # If all members of a bucket were used, or all discarded, one of the two states is kept without a copy.
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
        """Commit some members of a bucket; its states are flat, with one member after another."""
        sizes = [self._sizes[i] for i in self._buckets[b]]
        for now, before in zip(self.state[b], self._before[b], strict=True):
            parts = zip(self._buckets[b], now.split(sizes), before.split(sizes), strict=True)
            for i, new, old in parts:
                if i in ends:
                    old.copy_(new) if ends[i] else new.copy_(old)


class GradientUse:
    """The decision, for the residuals, whether the gradients of a pass were used in a step or discarded.

    Distributed optimizers report it. A loop may also update weights itself, clear gradients, or keep them.
    """

    def __init__(self, residuals: Residuals, tensors: Sequence[torch.Tensor], memory: GradientMemory) -> None:
        self._residuals, self._tensors, self._memory = residuals, tensors, memory
        self._pass = -1  # autograd's number of the last pass that was checked at its beginning
        self._weights: dict[int, int] = {}  # checksums of parameters that no optimizer has stepped so far
        self._stepped: set[int] = set()

    def used(self, members: Collection[int]) -> None:
        """Record that an optimizer has used the gradients of ``members``."""
        self._stepped.update(members)
        self._residuals.commit(dict.fromkeys(members, True))

    def note(self, absent: Collection[int]) -> None:
        """Record weights and gradients at the end of a pass; ``absent``: members without a gradient on any rank."""
        self._residuals.commit(dict.fromkeys(absent, False))
        pending = self._residuals.open()
        # Parameters with an optimizer need no checksum, because its hook reports their use.
        self._weights = {i: int(bits(self._tensors[i])) for i in pending if i not in self._stepped}
        self._memory.note_versions(pending)

    @torch.no_grad()
    def before_backward(self, stepping: bool) -> None:
        """Decide whether the last pass was used, before a new one adds its first gradient. ``stepping``: in a step."""
        if (number := backward.current_pass()) == self._pass:
            return
        self._pass = number
        ends = {}
        for i in self._residuals.open():
            view, gradient = self._memory.views[i], self._tensors[i].grad
            # Weights first: a script that updates weights itself may clear the gradient afterwards.
            moved = i in self._weights and int(bits(self._tensors[i])) != self._weights[i]
            if moved or stepping:
                ends[i] = True
            elif gradient is view:
                # Zeroed in place means discarded. Otherwise it stays open, because the next pass adds to it.
                if self._memory.is_changed(i) and not view.any():
                    ends[i] = False
            else:
                del gradient
                # Set to None: used only if the script still holds the tensor, to use it later.
                ends[i] = self._memory.is_referenced(i, 1)  # ``view`` is one more reference
        self._residuals.commit(ends)

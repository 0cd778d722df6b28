"""Averages or sums over ranks of gradients that a script sets itself (``p.grad = g``), before a step."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hvd_train.errors import ConfigError
from hvd_train.protocol import Communicator
from hvd_train.script.pytorch.gradient_memory import GradientMemory

WHERE = "ht.distribute(average=False)"
# Sent with the numbers of tensors: this rank requests a comparison of weights; see ``pass_flags.LENGTHS``.
CHECK, LENGTHS = -1, -2


def replaced_sum(by: str) -> ConfigError:
    """Return the error for a gradient that was replaced after ``by`` had summed it over the ranks."""
    what = f"a gradient was replaced after {by} had summed it, and would be summed again"
    return ConfigError(what, where=WHERE, fix="change it in its place, as in p.grad /= n", common=True)


class ManualGradients:
    """The manual gradients of one model. ``first``: the index of its first parameter in ``tensors``."""

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        first: int,
        memory: GradientMemory,
        communicator: Communicator,
        name: str,
        *,
        average: bool = True,
    ) -> None:
        self._tensors, self._first, self._memory = tensors, first, memory
        self._communicator, self._name, self._average = communicator, name, average
        # Reduced gradients and their versions, until a step has used them.
        self._reduced: dict[int, tuple[torch.Tensor, int]] = {}
        self._used: dict[int, tuple[torch.Tensor, int]] = {}  # reduced gradients that a step has used

    def set_by_script(self, members: Sequence[int]) -> list[int]:
        """Return those of ``members`` whose gradient is not where backward passes put it."""
        grads = ((i, self._tensors[i].grad) for i in members)
        return [i for i, g in grads if g is not self._memory.views[i] or not self._memory.in_place(i)]

    def reduce(self, members: Sequence[int], factor: float, check: bool, lengths: bool) -> tuple[bool, bool, bool]:
        """Sum over all ranks, times ``factor``, the gradients of ``members`` that the script has set on any rank.

        All ranks call it. Returns whether any were exchanged, and whether any rank sets ``check`` and ``lengths``.
        """
        # In a nested step (super().step()) the outer one has already reduced the gradients.
        new = [i for i in members if not self._is_reduced(i)] + [CHECK] * check + [LENGTHS] * lengths
        everyone = self._communicator.allgather_bytes(",".join(map(str, new)).encode())
        listed = {int(i) for part in everyone for i in part.decode().split(",") if i}
        chosen = sorted(listed - {CHECK, LENGTHS})
        for dtype in dict.fromkeys(self._tensors[i].dtype for i in chosen):
            self._reduce([i for i in chosen if self._tensors[i].dtype == dtype], factor, f"{self._name}.{dtype}")
        return bool(chosen), CHECK in listed, LENGTHS in listed

    def _reduce(self, members: Sequence[int], factor: float, name: str) -> None:
        """Sum gradients of one type in one transfer."""
        pairs = [(self._tensors[i], self._tensors[i].grad) for i in members]
        parts = [torch.zeros_like(x) if g is None else g for x, g in pairs]
        flat = torch.cat([part.detach().to_dense().reshape(-1) for part in parts])
        if factor != 1.0:
            flat.mul_(factor)
        flat = self._communicator.synchronize(self._communicator.allreduce_async(flat, name))
        for i, part in zip(members, flat.split([self._tensors[i].numel() for i in members]), strict=True):
            p = self._tensors[i]
            p.grad = torch.empty_like(p, requires_grad=False).copy_(part.reshape(p.shape))
            self._reduced[i] = p.grad, p.grad._version

    def used(self) -> None:
        """Note that a step has used the gradients. One that is left as it is for another step is reduced already."""
        self._used |= {i: (g, g._version) for i, (g, _) in self._reduced.items()}
        self._reduced.clear()

    def replaced(self, members: Sequence[int]) -> bool:
        """Return whether a gradient of ``members`` was set by the script after all were reduced."""
        return any(self._reduced.get(i, (None,))[0] is not self._tensors[i].grad for i in self.set_by_script(members))

    def _is_reduced(self, i: int) -> bool:
        used, version = self._used.get(i, (None, 0))
        if used is not None and self._tensors[i].grad is used and used._version == version:
            return True
        gradient, version = self._reduced.get(i, (None, 0))
        if gradient is None:
            return False
        same = self._tensors[i].grad is gradient
        if self._average:
            return same and gradient._version == version
        # Averaging a mean again does not change it, but summing a sum does.
        if not same:
            raise replaced_sum("the step")
        return True

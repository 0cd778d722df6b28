"""Gradients of ``ht.distribute(average=False)``: checks that no gradient is summed over the ranks twice."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import torch

from hvd_train.errors import ConfigError
from hvd_train.script.pytorch.gradient_memory import GradientMemory
from hvd_train.script.pytorch.manual_gradients import WHERE, replaced_sum


def _summed_twice() -> ConfigError:
    what = "a second backward() before the step would count the first one's sum once more for each rank"
    fix = "put all but the last into ht.no_sync, or clear the gradients before"
    return ConfigError(what, where=WHERE, fix=fix, common=True)


class SummedGradients:
    """The gradients that hold a sum over all ranks, by index of their tensor."""

    def __init__(self, tensors: Sequence[torch.Tensor], memory: GradientMemory) -> None:
        self._tensors, self._memory = tensors, memory
        self._arrivals: dict[int, int] = {}  # how often backward has added to a gradient since the last exchange
        self._kept: set[int] = set()  # gradients in which backward has added to the last sum
        self._unused: set[int] = set()  # sums that no step has used yet
        # Sums that a step has used, and to which another loss was added, as to a discriminator's: to be cleared.
        self._spoiled: set[int] = set()

    def before(self, i: int) -> None:
        """Record whether gradient ``i``, to which backward is about to add, is the last sum or was cleared."""
        if not self._arrivals.get(i) or i in self._kept:
            view = self._memory.views[i]
            # A changed view may be a clipped or a zeroed sum; only its contents show which.
            kept = self._tensors[i].grad is view and (not self._memory.is_changed(i) or bool(view.any()))
            (self._kept.add if kept else self._kept.discard)(i)

    def arrived(self, i: int) -> None:
        """Record that backward has added to gradient ``i``."""
        self._arrivals[i] = self._arrivals.get(i, 0) + 1

    def factor(self, i: int, mean: float) -> float:
        """Return the factor for gradient ``i`` in the memory of the last sum. Raises if it includes that sum."""
        arrivals = self._arrivals.get(i, 0)
        if arrivals and i in self._kept:
            if i in self._unused:
                raise _summed_twice()
            self._spoiled.add(i)
        return 1.0 if arrivals else mean  # without arrivals it is the last sum, clipped or cleared

    def pass_ended(self, parameters: Sequence[tuple[int, torch.nn.Parameter]]) -> None:
        """Record that all gradients are now sums over all ranks."""
        self._spoiled = {i for i in self._spoiled if not self._arrivals.get(i) or i in self._kept}
        self._arrivals = {}
        self._unused = {i for i, p in parameters if p.grad is not None}
        self._memory.note_versions([i for i, _ in parameters])

    def used(self, members: Collection[int]) -> None:
        """Record that a step has used the sums of ``members``."""
        self._unused.difference_update(members)

    def check_cleared(self, members: Iterable[int]) -> None:
        """Raise ConfigError if a step is about to use a sum to which another loss was added."""
        if any((g := self._tensors[i].grad) is not None and bool(g.any()) for i in self._spoiled.intersection(members)):
            raise _summed_twice()

    def check_replaced(self, members: Iterable[int]) -> None:
        """Raise ConfigError if the script has replaced an unused sum among ``members``."""
        if self._unused.intersection(members):
            raise replaced_sum("backward()")

"""Gradients of ``ht.distribute(average=False)``: a sum over the ranks, to which nothing may be added twice."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import torch

from hvd_train.errors import ConfigError
from hvd_train.torch.gradient_memory import GradientMemory
from hvd_train.torch.manual_gradients import WHERE, replaced_sum


class SummedGradients:
    """The gradients that hold a sum of all ranks, by the number of their tensor."""

    def __init__(self, tensors: Sequence[torch.Tensor], memory: GradientMemory) -> None:
        self._tensors, self._memory = tensors, memory
        self._arrivals: dict[int, int] = {}  # how often backward has added to a gradient since the last exchange
        self._kept: set[int] = set()  # those to whose last sum it has added
        self._unused: set[int] = set()  # sums that no step has used

    def before(self, i: int) -> None:
        """Note whether gradient ``i``, to which backward is about to add, is the last sum or was cleared."""
        if not self._arrivals.get(i) or i in self._kept:
            view = self._memory.views[i]
            # A changed view may be a sum that was clipped, or one that was zeroed: only its contents show which.
            kept = self._tensors[i].grad is view and (not self._memory.is_changed(i) or bool(view.any()))
            (self._kept.add if kept else self._kept.discard)(i)

    def arrived(self, i: int) -> None:
        """Note that backward has added to gradient ``i``."""
        self._arrivals[i] = self._arrivals.get(i, 0) + 1

    def factor(self, i: int, mean: float) -> float:
        """Return the factor of gradient ``i``, which lies where the last sum lay: with that in it, or in its place."""
        arrivals = self._arrivals.get(i, 0)
        if arrivals and i in self._kept:
            what = "a second backward() before the step would count the first one's sum once more for each rank"
            fix = "put all but the last into ht.no_sync, or clear the gradients before"
            raise ConfigError(what, where=WHERE, fix=fix, common=True)
        return 1.0 if arrivals else mean  # without one it is the last sum, clipped or cleared

    def pass_ended(self, parameters: Sequence[tuple[int, torch.nn.Parameter]]) -> None:
        """Note that all gradients are sums of all ranks now."""
        self._arrivals = {}
        self._unused = {i for i, p in parameters if p.grad is not None}
        self._memory.note_versions([i for i, _ in parameters])

    def used(self, members: Collection[int]) -> None:
        """Note that a step has used the sums of ``members``."""
        self._unused.difference_update(members)

    def check_replaced(self, members: Iterable[int]) -> None:
        """Raise ConfigError where one of ``members``, gradients that the script has set, stands for an unused sum."""
        if self._unused.intersection(members):
            raise replaced_sum("backward()")

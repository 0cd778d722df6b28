"""Parameters that are frozen at ``ht.distribute`` and unfrozen later, on all ranks alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from hvd_train.frontends.pytorch.eager import eager
from hvd_train.script.pytorch import backward
from hvd_train.script.pytorch.reducer import Reducer


class Frozen:
    """The frozen parameters of a model.

    At the end of the first backward pass that trains some of them, ``unfreeze`` makes a reducer for these. It exchanges
    this pass' gradients at once and takes part in all later passes.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        first: Reducer,
        unfreeze: Callable[[dict[str, torch.nn.Parameter]], Reducer],
    ) -> None:
        self._frozen, self._first, self._unfreeze = dict(parameters), first, unfreeze
        # Members of a pass finish in the order of numbers: this after its first reducer, before the next model's.
        self.number = first.number + 0.5
        self._hooks: dict[str, Any] = {}
        for name, p in self._frozen.items():
            p.requires_grad_(True)  # torch refuses hooks on tensors that need no gradient
            self._hooks[name] = p.register_post_accumulate_grad_hook(eager(lambda _: self._reached()))
            p.requires_grad_(False)

    def _reached(self) -> None:
        if self._first.reducing:
            self._first.reached()

    def arrived(self) -> None:
        """Join a backward pass of the model if some of the frozen parameters are now trained."""
        if any(p.requires_grad for p in self._frozen.values()):
            backward.register(self)

    def finish(self) -> None:
        """Make a reducer for the unfrozen parameters, at the end of a backward pass."""
        unfrozen = {name: p for name, p in self._frozen.items() if p.requires_grad}
        for name in unfrozen:
            self._hooks.pop(name).remove()
            del self._frozen[name]
        late = self._unfreeze(unfrozen)
        late.model_reducers = self._first.model_reducers
        late.model_reducers.append(late)
        # The reducer did not exist when the pass began.
        late.adopt()

    def abandon(self) -> None:
        """Do nothing after a failed pass: the next one detects the parameters again."""

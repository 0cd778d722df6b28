"""Parameters that are frozen at ``ht.distribute``, and that the script unfreezes later, on all ranks alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from hvd_train.frontends.pytorch.eager import eager
from hvd_train.torch import backward
from hvd_train.torch.reducer import Reducer


class Frozen:
    """The frozen parameters of a model.

    At the end of the first backward pass in which some of them are trained, ``unfreeze`` makes a reducer for them. It
    exchanges this pass' gradients at once and takes part in all later passes. Nothing travels before.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        first: Reducer,
        unfreeze: Callable[[dict[str, torch.nn.Parameter]], Reducer],
    ) -> None:
        self._frozen, self._first, self._unfreeze = dict(parameters), first, unfreeze
        # Members of a pass finish in the order of numbers: after the first reducer, before the next model's.
        self.number = first.number + 0.5
        self._hooks: dict[str, Any] = {}
        for name, p in self._frozen.items():
            p.requires_grad_(True)  # torch refuses hooks of what has no gradient
            self._hooks[name] = p.register_post_accumulate_grad_hook(eager(lambda _: self._reached()))
            p.requires_grad_(False)

    def _reached(self) -> None:
        if self._first.reducing:
            self._first.reached()

    def arrived(self) -> None:
        """Join the pass, if some of them are trained: backward has reached a parameter of the model, on all ranks."""
        if any(p.requires_grad for p in self._frozen.values()):
            backward.register(self)

    def finish(self) -> None:
        """Unfreeze, at the end of a backward pass."""
        unfrozen = {name: p for name, p in self._frozen.items() if p.requires_grad}
        for name in unfrozen:
            self._hooks.pop(name).remove()
            del self._frozen[name]
        late = self._unfreeze(unfrozen)
        late.model_reducers = self._first.model_reducers
        late.model_reducers.append(late)
        # It was made at the end of the pass whose gradients it exchanges.
        late.adopt()

    def abandon(self) -> None:
        """Do nothing: an error ended the pass, and the next one finds the parameters again."""

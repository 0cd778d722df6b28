"""The lengths of what the distributed models were called with, from which a step's batch is known where its order is
not."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from hvd_train.protocol import Communicator

MOST = 64  # lengths that are kept


class ModelInputs:
    """The lengths of first and second dimensions of models' inputs in forward passes that record gradients.

    The models are watched only while it is needed: torch.jit.script refuses models with hooks.
    """

    def __init__(self, communicator: Communicator, models: Callable[[], Iterable[torch.nn.Module]]) -> None:
        self.lengths: tuple[set[int], set[int]] = (set(), set())
        self._communicator, self._models = communicator, models
        self._hooks: dict[int, tuple[torch.nn.Module, Any]] = {}

    def follow(self, needed: bool) -> None:
        """Start or stop recording the inputs of the models."""
        for model in self._models() if needed else ():
            if id(model) not in self._hooks:
                handle = model.register_forward_pre_hook(_Hook(self), with_kwargs=True)
                self._hooks[id(model)] = model, handle
        while self._hooks and not needed:
            self._hooks.popitem()[1][1].remove()

    @property
    def watched(self) -> bool:
        return bool(self._hooks)

    def gather(self, own: bytes) -> list[bytes]:
        return self._communicator.allgather_bytes(own, "lengths of inputs")

    def add(self, x: Any) -> None:
        if isinstance(x, torch.Tensor):
            for lengths, length in zip(self.lengths, x.shape, strict=False):
                if len(lengths) < MOST:
                    lengths.add(length)
        elif isinstance(x, dict | list | tuple):
            for each in x.values() if isinstance(x, dict) else x:
                self.add(each)


class _Hook:
    """Records the inputs of a model. In a copied or unpickled model it does nothing."""

    def __init__(self, inputs: ModelInputs | None = None) -> None:
        self._inputs = inputs

    def __reduce__(self) -> tuple:
        return _Hook, ()

    def __call__(self, model: torch.nn.Module, arguments: tuple, keywords: dict[str, Any]) -> None:
        # A compiled graph would keep this call's lengths for later ones.
        if self._inputs and torch.is_grad_enabled() and not torch.compiler.is_compiling():
            self._inputs.add((arguments, keywords))

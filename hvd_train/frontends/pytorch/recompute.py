"""Layers whose activations are not kept for backward, which runs them again (``model.recompute``).

Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost".
"""

from __future__ import annotations

import copyreg
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from hvd_train.frontends.pytorch.batchnorm import Context
from hvd_train.frontends.recompute import chosen


class _Again:
    """The forward pass in training, mixed in before the layer's class: names and evaluation do not change."""

    _norms: Context

    def forward(self, *inputs: Any, **named: Any) -> Any:
        plain = super().forward  # type: ignore[misc]
        if not self.training or not torch.is_grad_enabled():  # type: ignore[attr-defined]
            return plain(*inputs, **named)
        return checkpoint(plain, *inputs, use_reentrant=False, context_fn=self._contexts, **named)

    def _contexts(self) -> tuple[AbstractContextManager, AbstractContextManager]:
        return nullcontext(), self._second()

    @contextmanager
    def _second(self) -> Iterator[None]:
        """The second pass over a batch: running statistics count the first one alone."""
        norms, before = self._norms, self._norms.again
        norms.again = True
        try:
            yield
        finally:
            norms.again = before

    def __reduce_ex__(self, protocol: Any) -> tuple:
        """Pickle and copy the layer as its plain class."""
        return copyreg._reconstructor, (type(self).__mro__[2], object, None), self.__dict__  # type: ignore[attr-defined]


def take(model: torch.nn.Module, patterns: Sequence[str] | bool, norms: Context) -> list[str]:
    """Run the layers that ``patterns`` match (True: repeated blocks) again in backward. Returns their names.

    The layers get another class. Raises ConfigError if there are none.
    """
    layers = {name: x for name, x in model.named_modules() if name and not isinstance(x, _BatchNorm)}
    names = chosen(layers, patterns, _repeated(model))
    for name in names:
        layer, kind = layers[name], type(layers[name])
        if not isinstance(layer, _Again):
            layer.__class__ = type(kind.__name__, (_Again, kind), {"_norms": norms, "__module__": kind.__module__})
        else:
            kind._norms = norms  # of an earlier training
    return names


def _repeated(model: torch.nn.Module) -> list[str]:
    """Return the names of layers with layers of their own, of which a list or a sequence has several of a class."""
    found = []
    for name, parent in model.named_modules():
        if isinstance(parent, torch.nn.ModuleList | torch.nn.Sequential):
            blocks = [(key, one) for key, one in parent.named_children() if any(True for _ in one.children())]
            classes = Counter(type(one) for _, one in blocks)
            found += [f"{name}.{key}".lstrip(".") for key, one in blocks if classes[type(one)] > 1]
    return found

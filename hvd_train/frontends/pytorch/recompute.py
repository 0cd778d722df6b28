"""Activation checkpointing (``model.recompute``): backward computes the outputs of layers again.

Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost".
"""

from __future__ import annotations

import copyreg
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from hvd_train.errors import ConfigError
from hvd_train.frontends.recompute import OTHER_VALUES, WHERE, WITHOUT, chosen

LOOKS = 2  # calls of a layer whose second pass is compared with the first
CLOSE = {"rtol": 1e-2, "atol": 1e-3}  # kernels of GPUs may add in another order


class _Again:
    """The forward pass in training, mixed in before the layer's class: names and evaluation do not change."""

    _name: str
    _calls = 0

    def forward(self, *inputs: Any, **named: Any) -> Any:
        plain = super().forward  # type: ignore[misc]
        if not self.training or not torch.is_grad_enabled():  # type: ignore[attr-defined]
            return plain(*inputs, **named)
        type(self)._calls += 1
        compared = type(self)._calls <= LOOKS
        first: list[torch.Tensor] = []

        def run(*inputs: Any, **named: Any) -> Any:
            outputs = plain(*inputs, **named)
            if compared:
                self._compare(first, outputs)
            return outputs

        before = self._buffers_now()
        # Without an early end of the second pass, which leaves out what the gradients do not need.
        with set_checkpoint_early_stop(False) if compared else nullcontext():
            contexts = lambda: (nullcontext(), _with_buffers(before))  # noqa: E731
            return checkpoint(run, *inputs, use_reentrant=False, context_fn=contexts, **named)

    def _buffers_now(self) -> list[tuple[dict[str, Any], str, torch.Tensor]]:
        """Return (the buffers of a layer, a name in them, a copy): a forward pass may change them."""
        layers = self.modules()  # type: ignore[attr-defined]
        return [(x._buffers, name, b.clone()) for x in layers for name, b in x._buffers.items() if b is not None]

    def _compare(self, first: list[torch.Tensor], outputs: Any) -> None:
        tensors = [x for x in torch.utils._pytree.tree_leaves(outputs) if isinstance(x, torch.Tensor)]
        if not first:
            first += [x.detach() for x in tensors]
            return
        if not all(torch.allclose(a, b.detach(), equal_nan=True, **CLOSE) for a, b in zip(first, tensors, strict=True)):
            raise ConfigError(f"layer {self._name} {OTHER_VALUES}", where=WHERE, fix=WITHOUT, common=True)
        first.clear()

    def __reduce_ex__(self, protocol: Any) -> tuple:
        """Pickle and copy the layer as its plain class."""
        return copyreg._reconstructor, (type(self).__mro__[2], object, None), self.__dict__  # type: ignore[attr-defined]


@contextmanager
def _with_buffers(before: Sequence[tuple[dict[str, Any], str, torch.Tensor]]) -> Iterator[None]:
    """Run the second pass on copies of the buffers as they were before the first one, then put the real ones back."""
    live = [(buffers, name, buffers[name]) for buffers, name, _ in before]
    for buffers, name, x in before:
        buffers[name] = x
    try:
        yield
    finally:
        for buffers, name, x in live:
            buffers[name] = x


def take(model: torch.nn.Module, patterns: Sequence[str] | bool) -> list[str]:
    """Run the layers that ``patterns`` match (True: repeated blocks) again in backward. Returns their names.

    The layers get another class. Raises ConfigError if there are none.
    """
    layers = {name: x for name, x in model.named_modules() if name}
    names = chosen(layers, patterns, _repeated(model))
    for name in names:
        layer, kind = layers[name], type(layers[name])
        if not isinstance(layer, _Again):
            # A layer with a class of its own already, such as batch normalization's, has that as its plain one.
            layer.__class__ = type(kind.__name__, (_Again, kind), {"_name": name, "__module__": kind.__module__})
    return names


def _repeated(model: torch.nn.Module) -> list[str]:
    """Return the names of layers with layers of their own, of which a list or a sequence has several of a class."""
    found = []
    for name, parent in model.named_modules():
        if isinstance(parent, torch.nn.ModuleList | torch.nn.Sequential):
            blocks = [(key, one) for key, one in parent.named_children() if any(True for _ in one.children())]
            classes = Counter(_plain_class(one) for _, one in blocks)
            found += [f"{name}.{key}".lstrip(".") for key, one in blocks if classes[_plain_class(one)] > 1]
    return found


def _plain_class(layer: torch.nn.Module) -> type:
    return type(layer).__mro__[2] if isinstance(layer, _Again) else type(layer)

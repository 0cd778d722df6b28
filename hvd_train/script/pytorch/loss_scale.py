"""Rescaling of compression residuals when ``torch.amp.GradScaler`` changes the loss scale."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Collection
from typing import Any, Protocol

from torch.amp.grad_scaler import GradScaler


class Scaled(Protocol):
    def is_stepped_by(self, optimizers: Collection[int]) -> bool: ...

    def rescale(self, factor: float) -> None: ...


_all: weakref.WeakSet[Scaled] = weakref.WeakSet()
_by_scaler: weakref.WeakKeyDictionary[GradScaler, weakref.WeakSet[Scaled]] = weakref.WeakKeyDictionary()


def follow(reducer: Scaled) -> None:
    """Rescale the residuals of ``reducer`` whenever its loss scale changes."""
    _all.add(reducer)
    _watch_scalers()


@functools.cache
def _watch_scalers() -> None:
    update: Callable[..., Any] = GradScaler.update

    @functools.wraps(update)
    def watched(self: GradScaler, *arguments: Any, **keywords: Any) -> None:
        reducers = _by_scaler.setdefault(self, weakref.WeakSet())
        # ``update`` forgets its optimizers, and one may step less often than another.
        reducers.update(each for each in _all if each.is_stepped_by(self._per_optimizer_states))
        before = self.get_scale() if reducers else 1.0  # synchronizes with a GPU
        update(self, *arguments, **keywords)
        factor = self.get_scale() / before if reducers else 1.0
        for reducer in reducers if factor != 1.0 else ():
            reducer.rescale(factor)

    GradScaler.update = watched

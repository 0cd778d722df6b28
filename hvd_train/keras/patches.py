"""The changes that ``hk.distribute`` makes in a model and its optimizers, and which optimizers a model has."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import keras

MARK = "_hvd_train"  # an attribute of a model, and of its optimizer


class Patches:
    """The attributes that ``hk.distribute`` sets in instances, never in their classes, and the way back.

    ``compiled``: an object that each ``compile`` makes anew. ``fits``: calls of ``fit`` so far. ``optimizers``: those
    that a loop of the script applies itself.
    """

    def __init__(self, compiled: Any, fits: int = 0, optimizers: Sequence[Any] = ()) -> None:
        self.compiled, self.fits, self.optimizers = compiled, fits, tuple(optimizers)
        self.apart: Any = None  # a LocalModel, with local training
        self._back = contextlib.ExitStack()
        self.undo = self._back.close
        self.on_undo = self._back.callback

    def put(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute of this instance."""
        # An attribute of the class shows again when the instance's is deleted.
        if name in vars(owner):
            self.on_undo(setattr, owner, name, vars(owner)[name])
        else:
            self.on_undo(delattr, owner, name)
        setattr(owner, name, value)


def optimizers_of(model: Any) -> list[Any]:
    """Return the optimizers of a model.

    Those given to ``hk.distribute`` or the one given to ``compile`` come first, then those in attributes of the model,
    also in their lists and dicts.
    """
    patches = getattr(model, MARK, None)
    optimizers = [*(patches.optimizers if patches else ()), getattr(model, "optimizer", None)]
    optimizers = [x for x in optimizers if x is not None]
    for value in vars(model).values():
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else [value]
        optimizers += [x for x in inner if isinstance(x, keras.optimizers.Optimizer)]
    return list({id(x): x for x in optimizers}.values())


def with_rates(optimizers: Sequence[Any]) -> list[Any]:
    """Return those within them that have a learning rate: loss scaling has an inner one, a MultiOptimizer several."""
    inner = [getattr(x, "inner_optimizer", x) for x in optimizers]
    several = [x for each in inner for x in getattr(each, "optimizers", [each])]
    return list({id(x): x for x in several}.values())

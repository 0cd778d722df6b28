"""The changes that ``hk.distribute`` makes to a model and its optimizers, and the list of these optimizers."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import keras

SAVING = ("save", "save_weights", "export")  # methods of a model that write files
MARK = "_hvd_train"  # an attribute of a model, and of its optimizer


class Patches:
    """Attributes that ``hk.distribute`` sets on instances, never on classes, and how to undo this.

    ``compiled``: an object that each ``compile`` replaces. ``fits``: calls of ``fit`` so far. ``optimizers``: those
    that a script's loop applies.
    """

    def __init__(self, compiled: Any, fits: int = 0, optimizers: Sequence[Any] = ()) -> None:
        self.compiled, self.fits, self.optimizers = compiled, fits, tuple(optimizers)
        self.local: Any = None  # a LocalModel, with local training
        self._back = contextlib.ExitStack()
        self.undo = self._back.close
        self.on_undo = self._back.callback

    def put(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute of this instance."""
        # The class' attribute reappears when the instance's is deleted.
        if name in vars(owner):
            self.on_undo(setattr, owner, name, vars(owner)[name])
        else:
            self.on_undo(delattr, owner, name)
        setattr(owner, name, value)


def optimizers_of(model: Any) -> list[Any]:
    """Return the optimizers of a model.

    First those passed to ``hk.distribute`` or ``compile``, then those in attributes of the model, also in lists and
    dicts.
    """
    patches = getattr(model, MARK, None)
    optimizers = [*(patches.optimizers if patches else ()), getattr(model, "optimizer", None)]
    optimizers = [x for x in optimizers if x is not None]
    for value in vars(model).values():
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else [value]
        optimizers += [x for x in inner if isinstance(x, keras.optimizers.Optimizer)]
    return list({id(x): x for x in optimizers}.values())


def with_rates(optimizers: Sequence[Any]) -> list[Any]:
    """Return those with a learning rate: the inner one of loss scaling, several of a MultiOptimizer."""
    inner = [getattr(x, "inner_optimizer", x) for x in optimizers]
    several = [x for each in inner for x in getattr(each, "optimizers", [each])]
    return list({id(x): x for x in several}.values())

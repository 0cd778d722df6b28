"""The table of optimizers. The configuration reads it, so it imports no formula."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class OptimizerSpec:
    """An optimizer: a value of ``optim.name``.

    ``made_by``: file in ``hvd_train/update`` and formula, which a framework may replace by a kernel of its own.
    ``slots``: the names of its state tensors for each weight. ``counts_steps``: the formula needs the step number.
    ``options``: its keys of ``optim``, which are errors with optimizers that do not list them.

    ``per_tensor``: the formula uses norms of whole tensors (update/layerwise.py); otherwise it is elementwise
    (update/elementwise.py). ``undivided``: why ``optim.sharded`` is not supported; "": it is. ``momentum``: a working
    value, if the optimizer needs momentum. ``schedule_free``: a mean of the weights is evaluated and saved.
    """

    made_by: str
    slots: tuple[str, ...] = ()
    counts_steps: bool = False
    options: tuple[str, ...] = ()
    per_tensor: bool = False
    undivided: str = ""
    momentum: float = 0.0
    schedule_free: bool = False

    @property
    def formula(self) -> Callable[..., Any]:
        file, name = self.made_by.split(":")
        return getattr(importlib.import_module(f"hvd_train.update.{file}"), name)

    def slots_of(self, momentum: float) -> tuple[str, ...]:
        """Return the slots for this momentum: elementwise formulas need no slot for a momentum of 0."""
        return tuple(slot for slot in self.slots if slot != "momentum" or momentum or self.per_tensor)


_MEANS = ("exp_avg", "exp_avg_sq")
_ADAM = ("betas", "eps")
_WHOLE = "needs whole matrices, of which each rank would have a part"
OPTIMIZERS = {
    "sgd": OptimizerSpec("elementwise:sgd", ("momentum",), options=("momentum", "nesterov")),
    "adam": OptimizerSpec("elementwise:adam", _MEANS, True, _ADAM),
    "adamw": OptimizerSpec("elementwise:adamw", _MEANS, True, _ADAM),
    "lars": OptimizerSpec(
        "layerwise:lars", ("momentum",), options=("momentum", "trust_coefficient", "eps"), per_tensor=True
    ),
    "lamb": OptimizerSpec("layerwise:lamb", _MEANS, True, _ADAM, per_tensor=True),
    "rmsprop": OptimizerSpec("elementwise:rmsprop", ("square_avg", "momentum"), options=("momentum", "alpha", "eps")),
    "adagrad": OptimizerSpec("elementwise:adagrad", ("sum",), options=("eps",)),
    "nadam": OptimizerSpec("elementwise:nadam", _MEANS, True, _ADAM),
    "radam": OptimizerSpec("elementwise:radam", _MEANS, True, _ADAM),
    "lion": OptimizerSpec("elementwise:lion", ("exp_avg",), options=("betas",)),
    "muon": OptimizerSpec(
        "muon:muon", _MEANS, True, ("momentum", "nesterov", *_ADAM), per_tensor=True, undivided=_WHOLE, momentum=0.95
    ),
    "schedule_free_sgd": OptimizerSpec(
        "elementwise:schedule_free_sgd", ("offset",), options=("betas",), schedule_free=True
    ),
    "schedule_free_adamw": OptimizerSpec(
        "elementwise:schedule_free_adamw", ("offset", "exp_avg_sq"), True, _ADAM, schedule_free=True
    ),
}


def takers(option: str) -> list[str]:
    """Return the names of the optimizers that have this key of ``optim``."""
    return [name for name, spec in OPTIMIZERS.items() if option in spec.options]

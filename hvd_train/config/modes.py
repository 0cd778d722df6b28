"""The names of the updates. The configuration reads this table, so it imports no update."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class ModeSpec:
    """An update: a value of ``exchange.mode``, or what other keys put in its place.

    ``made_by``: the file in ``hvd_train/update``, and the class in it. ``options``: the keys of ``exchange`` that are
    its, with which the class is called. ``gradients``: whether gradients travel, or stay on their rank. ``exact``:
    whether N ranks train as one rank does. ``deltas``: whether changes of weights travel as gradients do, through an
    exchange over all ranks. ``compression``: whether what travels may be compressed. ``lockstep``: all ranks take each
    step together; else none waits for another within an epoch, which needs MPI. ``sums``: whether the changes of all
    ranks are added up and not averaged: N ranks move the weights N times as far. ``note``: for whoever chose it.

    ``interval``: the option with the steps between two joins of the ranks. ``result``: whether evaluations and the
    result have the weights of the last join alone, "all" of them or "parts" at a time; "": they have all steps.
    ``scripts``: the options that ``ht.distribute`` and ``hk.distribute`` take; None: they refuse the mode. The class of
    such a mode is derived from ``Outer``. ``shares_memory``: ranks of a host can have the weights in common; the class
    is called with whether they may.
    """

    made_by: str
    options: tuple[str, ...] = ()
    gradients: bool = False
    exact: bool = False
    deltas: bool = False
    compression: bool = False
    lockstep: bool = True
    sums: bool = False
    note: str = ""
    interval: str = ""
    result: Literal["", "all", "parts"] = ""
    scripts: tuple[str, ...] | None = None
    shares_memory: bool = False

    @property
    def update_class(self) -> Any:
        # Imported when it is asked for: this table is read wherever a configuration is.
        file, name = self.made_by.split(":")
        return getattr(importlib.import_module(f"hvd_train.update.{file}"), name)


ALLREDUCE = "allreduce"  # gradients travel, and all ranks move their weights alike
# The options of outer steps that a script takes: it has no exchange for gradients of the first steps (outer_start).
_IN_SCRIPTS = ("outer_steps", "outer_lr", "outer_momentum")
_OUTER = (*_IN_SCRIPTS, "outer_start")
_STREAM = ("fragments", "stream_delay", "mix")
DOES_NOT_SCALE = "all weights travel to and from rank 0 in each step of each rank, so more ranks are hardly faster"
MODES = {
    ALLREDUCE: ModeSpec("replicated:Replicated", gradients=True, exact=True, compression=True, scripts=()),
    "delayed": ModeSpec("delayed:Delayed", ("delay", "compensation"), gradients=True, exact=True, compression=True),
    "partial": ModeSpec("partial:Partial", ("partial_fraction",)),
    "local_sgd": ModeSpec("local_sgd:LocalSGD", ("local_steps",), interval="local_steps"),
    "outer": ModeSpec(
        "outer:Outer",
        (*_OUTER, "outer_feedback"),
        deltas=True,
        compression=True,
        interval="outer_steps",
        result="all",
        scripts=(*_IN_SCRIPTS, "outer_feedback"),
    ),
    "streaming": ModeSpec(
        "streaming:Streaming",
        (*_OUTER, *_STREAM),
        deltas=True,
        interval="outer_steps",
        result="parts",
        scripts=(*_IN_SCRIPTS, *_STREAM),
    ),
    "async": ModeSpec(
        "elastic:Elastic", ("async_steps", "async_pull"), lockstep=False, interval="async_steps", result="parts"
    ),
    "parameter_server": ModeSpec("parameter_server:ParameterServer", lockstep=False, sums=True, note=DOES_NOT_SCALE),
}
# What stands in the place of ``allreduce`` with optim.sharded and with parallel.pipeline.
SHARDED = ModeSpec("sharded:Sharded", gradients=True, exact=True, compression=True, shares_memory=True)
STAGES = ModeSpec("staged:Staged", gradients=True, exact=True, compression=True)

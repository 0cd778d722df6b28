"""The names of the updates. The configuration reads this table, so it imports no update."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Row:
    """An update: the value of ``exchange.mode``.

    ``made_by``: the file in ``hvd_train/update``, and the class in it. ``options``: the keys of ``exchange`` that are
    its, with which the class is called. ``gradients``: whether gradients travel, or stay on their rank. ``exact``:
    whether N ranks train as one rank does. ``deltas``: whether changes of weights travel as gradients do, through an
    exchange over all ranks. ``compression``: whether what travels may be compressed. ``lockstep``: all ranks take each
    step together; else none waits for another within an epoch, which needs MPI. ``sums``: whether the changes of all
    ranks are added up and not averaged: N ranks move the weights N times as far. ``note``: for whoever chose it.
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

    @property
    def update_class(self) -> Any:
        # Imported when it is asked for: this table is read wherever a configuration is.
        file, name = self.made_by.split(":")
        return getattr(importlib.import_module(f"hvd_train.update.{file}"), name)


ALLREDUCE = "allreduce"  # gradients travel, and all ranks move their weights alike
_OUTER = ("outer_steps", "outer_lr", "outer_momentum", "outer_start")
DOES_NOT_SCALE = "all weights travel to and from rank 0 in each step of each rank, so more ranks are hardly faster"
MODES = {
    ALLREDUCE: Row("replicated:Replicated", gradients=True, exact=True, compression=True),
    "delayed": Row("delayed:Delayed", ("delay", "compensation"), gradients=True, exact=True, compression=True),
    "partial": Row("partial:Partial", ("partial_fraction",)),
    "local_sgd": Row("local_sgd:LocalSGD", ("local_steps",)),
    "outer": Row("outer:Outer", (*_OUTER, "outer_feedback"), deltas=True, compression=True),
    "streaming": Row("streaming:Streaming", (*_OUTER, "fragments", "stream_delay", "mix"), deltas=True),
    "async": Row("elastic:Elastic", ("async_steps", "async_pull"), lockstep=False),
    "parameter_server": Row("parameter_server:ParameterServer", lockstep=False, sums=True, note=DOES_NOT_SCALE),
}

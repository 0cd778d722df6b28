"""The table of updates. The configuration reads it, so it imports no update."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class ModeSpec:
    """An update: a value of ``exchange.mode``, or a replacement by other keys.

    ``made_by``: file in ``hvd_train/update`` and class. ``options``: keys of ``exchange``, the class's arguments.
    ``gradients``: gradients are exchanged, not local. ``exact``: N ranks train as one rank does. ``deltas``: changes of
    weights go through the exchange, as gradients do. ``compression``: the exchange may be compressed. ``lockstep``: all
    ranks take each step together; if not, no rank waits for another within an epoch, which needs MPI. ``sums``: the
    changes of all ranks are summed and not averaged, so N ranks take N times as large steps. ``note``: a note to users.

    ``interval``: the option with the steps between two synchronizations. ``result``: evaluations and checkpoints have
    the weights of the last synchronization, "all" at once or "parts" at a time; "": they include all steps.
    ``scripts``: the options for ``ht.distribute`` and ``hk.distribute``, where the class is derived from ``Outer``;
    None: not for scripts. ``shares_memory``: ranks of a host can share the memory of the weights; the class gets that
    memory.
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
        # Imported on demand, because every configuration reads this table.
        file, name = self.made_by.split(":")
        return getattr(importlib.import_module(f"hvd_train.update.{file}"), name)


ALLREDUCE = "allreduce"  # gradients are summed over ranks, and all weights stay equal
# The options of outer steps for scripts. They have no synchronous first steps (outer_start).
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
# The replacements of ``allreduce`` with optim.sharded and with parallel.pipeline.
SHARDED = ModeSpec("sharded:Sharded", gradients=True, exact=True, compression=True, shares_memory=True)
STAGES = ModeSpec("staged:Staged", gradients=True, exact=True, compression=True)
# The modes in which all ranks exchange in each step.
EVERY_STEP = tuple(name for name, spec in MODES.items() if spec.lockstep and not spec.interval)

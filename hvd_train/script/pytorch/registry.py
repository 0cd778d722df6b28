"""The distributed models, parameters, optimizers and loaders of this process."""

from __future__ import annotations

import functools
import warnings
import weakref
from typing import Any

import torch

from hvd_train.protocol import Communicator
from hvd_train.script.pytorch import uneven_parts
from hvd_train.script.pytorch.local_training import LocalModel
from hvd_train.script.pytorch.model_inputs import ModelInputs
from hvd_train.script.pytorch.reducer import HAND_FIX, Reducer
from hvd_train.script.pytorch.sharded import ShardedStep
from hvd_train.script.shared import main_rank
from hvd_train.script.shared.slow_rank import SlowRankReport
from hvd_train.script.shared.world import open_session

distributed: list[tuple[torch.nn.Module, Reducer | None]] = []
parameters: dict[int, tuple[torch.nn.Parameter, Reducer | None]] = {}  # by id
loaders = 0  # number of sharded loaders
optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()  # those given to ``ht.distribute``
local_training: dict[Any, LocalModel] = {}  # by model and by optimizer, with local training
# States of optimizers from files that were loaded before ``ht.distribute``; None: not of local training.
read_before: weakref.WeakKeyDictionary[torch.optim.Optimizer, Any] = weakref.WeakKeyDictionary()
sharded: weakref.WeakKeyDictionary[torch.optim.Optimizer, ShardedStep] = weakref.WeakKeyDictionary()


@functools.cache
def communicator() -> Communicator:
    """Open the session, limit torch to this rank's share of the cores, and return the communicator."""
    session = open_session("pytorch")
    # The script, or the user's OMP_NUM_THREADS, may have set fewer.
    torch.set_num_threads(min(torch.get_num_threads(), session.threads))
    return session.communicator


@functools.cache
def slow_rank_report() -> SlowRankReport:
    """Return the report of slow ranks, shared by all models."""
    return SlowRankReport(communicator(), lambda fresh: communicator().waited)


@functools.cache
def model_inputs() -> ModelInputs:
    """Return the recorder of the inputs of all distributed models."""
    return ModelInputs(communicator(), lambda: [model for model, reducer in distributed if reducer])


@functools.cache
def unshared_sums() -> main_rank.UnsharedSums:
    """Return the warning about sums over local samples."""
    return main_rank.UnsharedSums(
        not communicator().rank and communicator().size > 1, "add them up: loss, count = ht.sum(loss, count)"
    )


def averaging() -> bool:
    """Return whether the gradients of any model are averaged, not summed."""
    return any(reducer.average for _, reducer in distributed if reducer)


def pass_without_steps() -> None:
    """Warn of possible training without communication, at the end of a pass without a step or a sum."""
    untouched = [reducer and not reducer.passes + reducer.steps for _, reducer in distributed]
    if untouched and all(untouched) and any(model.training for model, _ in distributed):
        warn_of_functional_training()


@functools.cache
def warn_of_functional_training() -> None:
    if not communicator().rank:
        what = "a pass in training mode has ended, and no gradient of the model was ever exchanged"
        fix = f"{HAND_FIX}, or add them up by ht.sum; evaluate under torch.no_grad()"
        warnings.warn(f"{what}; ht.shard; {fix}", stacklevel=5)


@functools.cache
def part_sync() -> uneven_parts.PartSync:
    """Return the synchronization of ranks with unequal numbers of parts of a batch."""
    return uneven_parts.PartSync(communicator())

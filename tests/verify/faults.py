"""Faults that trainers really have, for ranks of ``verify``: ``python -m tests.verify.faults record FOLDER``.

The plan FAULT-NAME.yaml runs with that fault. Each shows with more than one rank alone.
"""

from __future__ import annotations

import functools

from hvd_train.cli.main import main
from hvd_train.core.learning_rate import Schedule
from hvd_train.core.loop import Trainer
from hvd_train.core.step import StepRunner
from hvd_train.data import loader
from hvd_train.frontends.serial import Serial
from hvd_train.jobs import job
from hvd_train.launch.environment import world
from hvd_train.update.exchange import Exchange
from hvd_train.verify import record

planted = ""


def fault(owner, name):
    """Call the decorated function, whose name is the fault's, in the place of ``owner.name``, which it gets first."""

    def decorate(faulty):
        given = getattr(owner, name)
        at_fault = functools.partial(faulty, given)
        setattr(owner, name, lambda *args, **keys: (at_fault if planted == faulty.__name__ else given)(*args, **keys))

    return decorate


@fault(Exchange, "__init__")
def missing_allreduce(given, self, specs, packing, compressor, communicator, *args, **keys):
    """Gradients stay on their rank, as with Horovod's Keras optimizer under Keras 3."""
    given(self, specs, packing, compressor, Serial(), *args, **keys)


@fault(loader, "share")
def overlapping_shard(given, count, size, rank):
    """Every rank but the first begins one sample too early."""
    start, stop = given(count, size, rank)
    return max(start - 1, 0), stop - (start > 0)


@fault(Schedule, "rate")
def learning_rate(given, self, step):
    """It is scaled by the number of ranks."""
    return given(self, step) * world().size


@fault(job, "build_job")
def batch_norm_apart(given, config, *rest):
    """sync_batchnorm is asked for and does nothing, as Keras' synchronized=True under Horovod."""
    return given(config.model_copy(update={"sync_batchnorm": False}), *rest)


@fault(StepRunner, "run")
def sum_for_average(given, self, step):
    """The loss is divided by this rank's samples, the gradients are added."""
    frontend, size = self.training.frontend, self.training.communicator.size
    real = frontend.train_step
    frontend.train_step = lambda placed, scale, *rest: real(placed, scale * size, *rest)
    try:
        return given(self, step)
    finally:
        frontend.train_step = real


@fault(Trainer, "restore")
def first_weight(given, self, snapshot):
    """The last rank's first weights are not those of the others."""
    notes = given(self, snapshot)
    if self.communicator.rank == self.communicator.size - 1 > 0:
        tree = {k: x for k, x in self.frontend.state().items() if k.startswith("weights/")}
        tree[min(tree)].flat[0] += 1e-3
        self.frontend.load(tree)
    return notes


def load_config(path, given=record.load_config):
    global planted
    planted = path.stem.partition("-")[0]
    return given(path)


record.load_config = load_config
main()

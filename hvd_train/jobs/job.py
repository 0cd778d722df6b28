"""A job on this rank: its world, its data and the model that was built for them."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from hvd_train import __version__
from hvd_train.config import Config, digest
from hvd_train.config.own import look_in
from hvd_train.core.agreement import collectively
from hvd_train.core.loop import start_agreement
from hvd_train.data.catalog import open_data
from hvd_train.data.dataset import DataSet
from hvd_train.data.loader import Loader
from hvd_train.errors import CommunicationError
from hvd_train.frameworks import FRAMEWORKS, version
from hvd_train.frontends.rank import settle
from hvd_train.jobs.resume import data_as_before, resumes
from hvd_train.protocol import Communicator, FrontEnd, FrontEndModule, Sample, one_or_all


@dataclass
class Job:
    """A job on this rank: its world, its data and the model that was built for them."""

    config: Config
    communicator: Communicator
    data: DataSet
    frontend: FrontEnd
    settings: dict[str, Any]  # what this rank runs with: launcher, threads, environment, and who chose each
    user_config: Config  # the configuration without what the data added
    split: str = "val"  # the part that eval and predict read

    def loader(self, split: str) -> Loader:
        c, communicator = self.config, self.communicator
        return Loader(
            self.data.parts[split],
            global_batch=c.global_batch(communicator.size),
            accumulate=c.accumulate_grad_batches,
            rank=communicator.rank,
            size=communicator.size,
            seed=c.seed,
            workers=c.data.workers,
        )


@contextmanager
def opened_job(config: Config, verbose: bool, resume: str | None = None) -> Iterator[Job]:
    """Open data first (they fail fastest), then the framework, the world and the model."""
    look_in(config.code_dir)
    data = open_data(config.data, config.task)
    rank = settle(config.framework, config.threads, verbose, lean=True)
    rank.module.configure(rank.threads)
    communicator = rank.communicator()
    communicator.open()
    with failures_explained(communicator):
        data = data_as_before(config, communicator, data, resume)
        yield build_job(
            config.restoring() if resumes(config, communicator, resume) else config,
            rank.module,
            communicator,
            data,
            rank.settings,
        )
        communicator.barrier()
    communicator.close()


def build_job(
    config: Config,
    module: FrontEndModule,
    communicator: Communicator,
    data: DataSet,
    settings: dict[str, Any] | None = None,
    split: str = "val",
) -> Job:
    """Build the model on every rank, and compare over the ranks all that training rests on."""
    frontend = collectively(communicator, lambda: module.open_frontend(config, communicator, data.sample))
    sizes = " + ".join(str(len(part)) for part in data.parts.values())
    user_config, config = config, with_classes(config, data.sample)
    facts = {
        "config": digest(config),
        "data": f"{data.name}, {sizes} samples, {data.fingerprint}",
        "global batch": str(config.global_batch(communicator.size)),
        **versions(config),
    }
    start_agreement(config, frontend, facts)
    return Job(config, communicator, data, frontend, settings or {}, user_config, split)


def with_classes(config: Config, sample: Sample) -> Config:
    """Write the data's class names into ``data.classes``, so that a run keeps its classes."""
    classes = {name: list(field.names) for name, field in sample.labels.items() if field.names}
    if not classes or config.data.classes == one_or_all(classes):
        return config
    several = len(sample.labels) > 1
    return config.model_copy(
        update={"data": config.data.model_copy(update={"classes": classes if several else one_or_all(classes)})}
    )


def versions(config: Config) -> dict[str, str]:
    """Return the versions of the packages that a run depends on."""
    names = (*FRAMEWORKS[config.framework].packages, "horovod", "numpy")
    installed = {name: number for name in names if (number := version(name))}
    return {"hvd_train": __version__, "python": platform.python_version(), **installed}


@contextmanager
def failures_explained(communicator: Communicator) -> Iterator[None]:
    """Raise what a lost rank or too little memory caused as an error that says so."""
    try:
        yield
    except Exception as error:
        failure = communicator.failure(error) or _out_of_memory(error)
        if failure is None:
            raise
        raise failure from error


def _out_of_memory(error: Exception) -> CommunicationError | None:
    """Python, PyTorch (on CPUs without a type of its own) and TensorFlow report it in three ways."""
    text = str(error)
    kinds = {"MemoryError", "OutOfMemoryError", "ResourceExhaustedError"} & {c.__name__ for c in type(error).__mro__}
    if not kinds and "can't allocate memory" not in text and "std::bad_alloc" not in text:
        return None
    what = f"out of memory: {text.splitlines()[0][:200] if text else type(error).__name__}"
    fix = "lower batch_size (accumulate_grad_batches keeps the global batch), or start fewer ranks on this host"
    return CommunicationError(what, fix=fix)

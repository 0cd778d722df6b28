"""A job on this rank: its session, its data and the model that was built for them."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Protocol

from hvd_train import __version__
from hvd_train.config import Config, FrontEndConfig, digest
from hvd_train.config.user_code import look_in
from hvd_train.core.agreement import agree_on_start, collectively
from hvd_train.data.catalog import open_data
from hvd_train.data.dataset import DataSet
from hvd_train.data.loader import Loader
from hvd_train.engine.library import horovod
from hvd_train.errors import TrainError
from hvd_train.frameworks import FRAMEWORKS, version
from hvd_train.jobs.class_weights import with_class_weights
from hvd_train.jobs.initial_weights import initialize
from hvd_train.jobs.resume import resumes, split_as_before
from hvd_train.launch.environment import prepare_rank, world
from hvd_train.protocol import Communicator, FrontEnd, Sample, one_or_all
from hvd_train.run_folder.terminal import long_step
from hvd_train.session import Session
from hvd_train.update.parameter_groups import ParameterGroups


@dataclass
class Job:
    """A job on this rank: its session, its data and the model that was built for them."""

    config: Config
    session: Session
    data: DataSet
    frontend: FrontEnd
    split: str = "val"  # the split that eval and predict read
    initialization: Sequence[str] = ()  # lines about model.init_from, on rank 0
    parameter_groups: ParameterGroups | None = None  # of a training with optim.groups

    @property
    def communicator(self) -> Communicator:
        return self.session.communicator

    def loader(self, split: str) -> Loader:
        c, ranks = self.config, self.session.groups.data
        return Loader(
            self.data.parts[split],
            global_batch=c.global_batch(ranks.size),
            accumulate=c.micro_batches,
            rank=ranks.rank,
            size=ranks.size,
            seed=c.seed,
            workers=c.data.workers,
        )


class Sizer(Protocol):
    """Chooses the batch size. ``begin`` runs before the model is built, ``finish`` after it, if ``tries`` is set."""

    tries: bool

    def begin(self, config: Config, communicator: Communicator, resume: str | None) -> Config: ...
    def finish(self, job: Job) -> Job: ...


@contextmanager
def opened_job(
    config: Config,
    verbose: bool,
    resume: str | None = None,
    progress: bool = False,
    metered: bool = False,
    sizer: Sizer | None = None,
) -> Iterator[Job]:
    """Open data, framework, world and model, in this order, and close the world after the block.

    ``progress``: rank 0 shows steps that take long. ``metered``: the session counts the bytes that this rank sends.
    ``sizer``: for ``batch_size: auto``.
    """
    # Data first, because a wrong path is found in a fraction of a second, while a framework takes seconds to import.
    look_in(config.code_dir)
    prepare_rank(world(), config.framework, config.threads, verbose)  # a user's data module may import the framework
    shown = progress and world().rank == 0
    with long_step("opening the data", shown):
        data = open_data(config.data, config.task)
    with long_step(f"loading {config.framework}", shown):
        session = Session.prepare(config.framework, config.threads, verbose)
    with ExitStack() as stack:
        with long_step("waiting for all ranks", shown):
            communicator = stack.enter_context(session.opened(config.parallel.pipeline))
        if metered:
            session.count_traffic()
        with long_step("building the model", shown):
            config = split_as_before(config, communicator, resume)
            config = config.restoring() if resumes(config, communicator, resume) else config
            if sizer:
                config = sizer.begin(config, communicator, resume)
            job = build_job(config, session, data)
        if sizer and sizer.tries:
            with long_step("trying batch sizes", shown):
                job = sizer.finish(job)
        with noting_inputs(config, data.sample):
            yield job


@contextmanager
def noting_inputs(config: Config, sample: Sample) -> Iterator[None]:
    """Add the model and its inputs to an unexpected error."""
    try:
        yield
    except TrainError:
        raise
    except Exception as error:
        error.add_note(f"the model {config.model.name} gets {described_inputs(config, sample)}")
        raise


def described_inputs(config: Config, sample: Sample) -> str:
    """Describe a sample in the framework's order of axes, as "images (1, 28, 28) float32"."""
    first = FRAMEWORKS[config.framework].channels_first
    weights = "float64" if config.precision == "64" else "float32"
    listed = []
    for name, field in sample.inputs.items():
        shape = (field.shape[2], *field.shape[:2]) if field.image and first else field.model_shape
        kind = ("bool" if field.dtype == "bool" else "int64") if field.whole else weights
        title = [name] * (len(sample.inputs) > 1) + ["images"] * bool(field.image)
        listed.append(" ".join([*title, f"{shape} {kind}"]))
    return ", ".join(listed)


def build_job(config: Config, session: Session, data: DataSet, split: str = "val") -> Job:
    """Build the model on every rank, and check that all ranks agree on everything that training depends on."""
    groups = session.groups
    config = with_class_weights(config, data, groups.world)
    record, parts, module = FRAMEWORKS[config.framework], 1, session.module
    if groups.links:
        parts, module = groups.links.size, record.stages_module()
    elif config.parallel.devices_per_rank > 1:
        parts, module = config.parallel.devices_per_rank, record.multi_device_module()
    with noting_inputs(config, data.sample):
        frontend = collectively(
            groups.world, lambda: module.open_frontend(FrontEndConfig.of(config), groups, data.sample)
        )
    # All that must be equal on all ranks. One with other data or another version would silently train on.
    sizes = " + ".join(str(len(part)) for part in data.parts.values())
    config = with_classes(config, data.sample)
    if data.fitted:
        config = config.model_copy(update={"data": config.data.model_copy(update={"fitted": data.fitted})})
    facts = {
        "config": digest(config),
        "data": f"{data.name}, {sizes} samples, {data.fingerprint}",
        "global batch": str(config.global_batch(groups.data.size)),
        **versions(config),
    }
    agree_on_start(config.model.name, frontend, facts)
    begins = config.model.init_from and not config.restores and groups.world.rank == 0
    initialization = collectively(groups.world, lambda: initialize(config, frontend, data) if begins else [])
    if parts > 1:
        from hvd_train.frontends.stages.in_blocks import InBlocks, divide

        assert isinstance(frontend, InBlocks)
        blocks = divide(frontend, parts, config.global_batch(groups.data.size))
        config = config.model_copy(update={"parallel": config.parallel.model_copy(update={"split": blocks})})
    return Job(config, session, data, frontend, split, initialization)


def with_classes(config: Config, sample: Sample) -> Config:
    """Write the class names of the data into ``data.classes``, so that a run keeps its classes."""
    classes = {name: list(field.names) for name, field in sample.labels.items() if field.names}
    if not classes or config.data.classes == one_or_all(classes):
        return config
    several = len(sample.labels) > 1
    return config.model_copy(
        update={"data": config.data.model_copy(update={"classes": classes if several else one_or_all(classes)})}
    )


def versions(config: Config) -> dict[str, str]:
    """Return the versions of the packages that a run depends on."""
    names = (*FRAMEWORKS[config.framework].packages, "numpy")
    installed = {name: number for name in names if (number := version(name))}
    return {"hvd_train": __version__, "python": platform.python_version(), "horovod": horovod(), **installed}

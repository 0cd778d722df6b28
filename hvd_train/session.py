"""Run this process as a rank: its cores and settings, its framework, joining and leaving the world."""

from __future__ import annotations

import importlib
import os
import platform
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hvd_train.engine.library import use_stock
from hvd_train.errors import CommunicationError, ConfigError, amount, named_reason
from hvd_train.frameworks import FRAMEWORKS, Framework
from hvd_train.frontends.serial import Serial
from hvd_train.frontends.traffic import Traffic, metered
from hvd_train.launch import peers
from hvd_train.launch.environment import check_horovod, prepare_rank, rank_settings, threads, world
from hvd_train.launch.launchers import named
from hvd_train.launch.rendezvous import client as rendezvous
from hvd_train.launch.status import StatusSlot
from hvd_train.launch.world import World
from hvd_train.protocol import Communicator, CommunicatorModule, FrontEndModule, Groups, StageLinks

if TYPE_CHECKING:  # mypy reports here if a front-end breaks the contract
    from hvd_train.frontends.jax import communicator as jax_communicator
    from hvd_train.frontends.jax import model as jax_model
    from hvd_train.frontends.pytorch import communicator, model
    from hvd_train.frontends.tensorflow import communicator as tf_communicator
    from hvd_train.frontends.tensorflow import model as tf_model

    KEPT: tuple[FrontEndModule, ...] = (model, tf_model, jax_model)
    CONNECTED: tuple[CommunicatorModule, ...] = (communicator, tf_communicator, jax_communicator)

IDLE = "HOROVOD_IDLE_WAIT_MS"  # see launch/environment.py


@dataclass
class Session:
    """This process as a rank; a world of one until it is opened.

    ``module``: its front-end; ``world``: the launcher's ranks; ``threads``: its share of the cores; ``settings``:
    launcher, threads, environment, and who chose each.
    """

    module: FrontEndModule
    communicator: Communicator = field(default_factory=Serial)
    framework: str = ""
    world: World = field(default_factory=World)
    threads: int = 1
    settings: dict[str, Any] = field(default_factory=dict)
    links: StageLinks | None = None  # to the other stages of a pipeline
    traffic: Traffic | None = None  # counts the bytes that this rank sends

    @classmethod
    def prepare(
        cls, framework: str, wanted_threads: int | str = "auto", verbose: bool = False, user_process: bool = False
    ) -> Session:
        """Set what frameworks and Horovod read while they load, unless the user has; then load the framework.

        Call it before the world is opened. ``user_process``: the process is a user's script, whose framework keeps its
        number of threads and loads all modules that the script may use.
        """
        here = world()
        rendezvous.prepare(here)
        if named(here.launcher).opens_terminals:  # this launcher does not tell where the output goes
            os.environ.setdefault("HVD_TRAIN_TERMINAL", "0")
        count, environment = prepare_rank(here, framework, wanted_threads, verbose)
        settings = {
            "host": platform.node(),
            "launcher": here.launcher or "none",
            "ranks": here.size,
            "ranks_on_this_host": here.local_size,
            "cores": os.cpu_count(),
            "cores_of_rank_0": sorted(os.sched_getaffinity(0)),
            "threads": count,
            "environment": environment,
        }
        module = _load(framework, verbose, skip_unneeded=not user_process)
        if not user_process:
            module.configure(count)
        return cls(module, Serial(), framework, here, count, settings)

    def open(self, part: Any = None, stages: int = 1) -> Communicator:
        """Join the launcher's world, or ``part`` of it, mpi4py's communicator of some of its ranks.

        A single rank needs no Horovod. ``stages``: of the pipeline into which ranks are divided.
        """
        size = self.world.size if part is None else part.size
        if size > 1:
            check_horovod()
        if size % stages:
            what = f"{amount(stages, 'stage')} do not divide {amount(size, 'rank')}"
            fix = f"start {stages}, {2 * stages}, {3 * stages}, ... ranks, or set parallel.pipeline"
            raise ConfigError(what, where=f"parallel.pipeline: {stages}", fix=fix, common=True)
        communicator: Any = FRAMEWORKS[self.framework].make_communicator(size) if size > 1 else Serial()
        if part is not None and size > 1:
            communicator.part = part
        if stages > 1:
            communicator.stages = stages
            self._wake_often()
        communicator.open()
        if part is not None:  # GPUs belong to the host, whatever part of its ranks this is
            communicator.local_rank, communicator.local_size = self.world.local_rank, self.world.local_size
            self.settings = self.settings | {"ranks": size}
        self.communicator = communicator
        if stages > 1:
            from hvd_train.frontends.stages.links import Links

            self.links = Links.connect(communicator, stages)
        return communicator

    def _wake_often(self) -> None:
        """Make Horovod's idle thread wake every millisecond, unless the user has set an interval.

        Each exchange within a stage waits for the threads of all ranks, and those of other stages may be asleep.
        """
        environment = self.settings.get("environment", {})
        if environment.get(IDLE, {}).get("chosen_by") == "hvd_train":
            os.environ[IDLE] = "1"
            environment[IDLE] = {"value": "1", "chosen_by": "hvd_train"}

    @property
    def groups(self) -> Groups:
        groups = Groups.of(self.communicator)
        if self.links is not None:
            horovod: Any = self.communicator
            alone = self.communicator.size == self.links.size  # one replica
            groups = Groups(horovod, Serial() if alone else horovod.of_stage(), self.links)
        return metered(groups, self.traffic) if self.traffic else groups

    def count_traffic(self) -> None:
        """Count, from now on, the bytes that this rank sends; call it before a front-end is opened."""
        horovod: Any = self.communicator
        self.traffic = horovod.traffic() if horovod.size > 1 else Traffic()

    @contextmanager
    def opened(self, stages: int = 1) -> Iterator[Communicator]:
        """Join the world during a block, at whose end all ranks wait for each other and leave."""
        self.open(stages=stages)
        with failures_explained(self.communicator):
            yield self.communicator
            self.communicator.barrier()
        if self.links:
            self.links.close()
        self.communicator.close()

    def watch(self, seconds: float, then: str = "") -> StatusSlot | None:
        """Watch from now on for ranks that are stuck: after ``seconds`` all ranks of this host are ended.

        Call it on all ranks. Returns the slot of this rank's status, or None if nobody reads it.
        """
        return peers.watch(self.communicator, seconds, then) if self.communicator.size > 1 else None


@contextmanager
def failures_explained(communicator: Communicator) -> Iterator[None]:
    """Raise clear errors for failures caused by a lost rank or lack of memory."""
    try:
        yield
    except Exception as error:
        failure = communicator.failure(error) or _out_of_memory(error)
        if failure is None:
            raise
        raise failure from error


def _out_of_memory(error: Exception) -> CommunicationError | None:
    """Return the error for exhausted memory, which Python, PyTorch and TensorFlow report differently, else None."""
    text = str(error)
    kinds = {"MemoryError", "OutOfMemoryError", "ResourceExhaustedError"} & {c.__name__ for c in type(error).__mro__}
    if not kinds and "can't allocate memory" not in text and "std::bad_alloc" not in text:
        return None
    what = f"out of memory: {text.splitlines()[0][:200] if text else type(error).__name__}"
    fix = "lower batch_size (accumulate_grad_batches keeps the global batch), or start fewer ranks on this host"
    return CommunicationError(what, fix=fix)


def preload(framework: str, wanted_threads: int | str, ranks: int, verbose: bool) -> None:
    """Load, in the process from which ranks are forked, what each of the ``ranks`` of this host would load."""
    here = World(size=ranks, local_size=ranks)
    for name, value in rank_settings(here, framework, threads(wanted_threads, here), verbose).items():
        os.environ.setdefault(name, value)
    _load(framework, verbose, skip_unneeded=True)
    if FRAMEWORKS[framework].horovod and use_stock():
        with _without_noise(verbose):
            importlib.import_module(FRAMEWORKS[framework].horovod)


def _load(framework: str, verbose: bool, skip_unneeded: bool) -> FrontEndModule:
    record = FRAMEWORKS[framework]
    try:
        with _without_noise(verbose):
            return record.load(skip_unneeded)
    except Exception:  # a damaged installation may raise anything
        for package in record.packages:
            _check_import(package, record)
        raise


def _check_import(package: str, record: Framework) -> None:
    """Raise ConfigError if a framework's package cannot be imported."""
    try:
        importlib.import_module(package)
    except Exception as error:
        gone = isinstance(error, ModuleNotFoundError) and error.name == package
        reason = "is not installed" if gone else f"cannot be imported: {named_reason(error)}"
        fix = record.install if gone else record.repair
        raise ConfigError(f"{record.name} {reason}", where=f"framework: {record.name}", fix=fix) from error


@contextmanager
def _without_noise(verbose: bool) -> Iterator[None]:
    """Hide what TensorFlow writes to descriptor 2 while it loads, whatever its log level, unless loading fails."""
    if verbose:
        yield
        return
    # The descriptor, not sys.stderr: C++ writes to it.
    sys.stderr.flush()
    real = os.dup(2)
    with tempfile.TemporaryFile() as kept:
        os.dup2(kept.fileno(), 2)
        try:
            yield
        except BaseException:
            kept.seek(0)
            os.write(real, kept.read())
            raise
        finally:
            os.dup2(real, 2)
            os.close(real)

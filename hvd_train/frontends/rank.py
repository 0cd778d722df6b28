"""One rank, in the order in which all must open one: its cores and settings, its framework, then the world."""

from __future__ import annotations

import importlib
import os
import platform
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hvd_train.errors import ConfigError
from hvd_train.frameworks import FRAMEWORKS, Framework
from hvd_train.frontends.serial import Serial
from hvd_train.launch.environment import bind, rank_settings, threads, world
from hvd_train.launch.launchers import named
from hvd_train.launch.launchers.base import World
from hvd_train.launch.rendezvous import rank as rendezvous
from hvd_train.protocol import Communicator, CommunicatorModule, FrontEndModule

if TYPE_CHECKING:  # where a front-end that breaks the contract is told so
    from hvd_train.frontends.pytorch import communicator, model
    from hvd_train.frontends.tensorflow import communicator as tf_communicator
    from hvd_train.frontends.tensorflow import model as tf_model

    KEPT: tuple[FrontEndModule, ...] = (model, tf_model)
    CONNECTED: tuple[CommunicatorModule, ...] = (communicator, tf_communicator)


@dataclass(frozen=True)
class Rank:
    """This process with its framework loaded. ``threads``: its share of the cores; ``settings``: what it runs with
    (launcher, threads, environment, and who chose each)."""

    world: World
    framework: Framework
    threads: int
    module: FrontEndModule
    settings: dict[str, Any]

    def communicator(self, size: int | None = None) -> Communicator:
        """Make the communicator of the world that a launcher started, or of ``size`` of its ranks; not yet opened."""
        size = self.world.size if size is None else size
        return self.framework.make_communicator(size) if size > 1 else Serial()


def settle(framework: str, wanted_threads: int | str = "auto", verbose: bool = False, lean: bool = False) -> Rank:
    """Sets what frameworks and Horovod read when they load, where the user has set nothing, and loads the framework
    (``lean``: as ``Framework.load`` says, where the process is no script of the user's)."""
    here = world()
    rendezvous.prepare(here)
    if named(here.launcher).opens_terminals:  # this one says nothing about where the output goes
        os.environ.setdefault("HVD_TRAIN_TERMINAL", "0")
    bind(here)
    count = threads(wanted_threads, here)
    chosen = rank_settings(here, framework, count, verbose)
    by = {name: "user" if name in os.environ else "hvd_train" for name in chosen}
    for name, value in chosen.items():
        os.environ.setdefault(name, value)
    settings = {
        "host": platform.node(),
        "launcher": here.launcher or "none",
        "ranks": here.size,
        "ranks_on_this_host": here.local_size,
        "cores": os.cpu_count(),
        "cores_of_rank_0": sorted(os.sched_getaffinity(0)),
        "threads": count,
        "environment": {name: {"value": os.environ[name], "chosen_by": by[name]} for name in chosen},
    }
    return Rank(here, FRAMEWORKS[framework], count, _load(framework, verbose, lean), settings)


def warm(framework: str, wanted_threads: int | str, ranks: int, verbose: bool) -> None:
    """Loads what a rank among ``ranks`` of this host loads, under its settings, in a process that is forked for it."""
    here = World(size=ranks, local_size=ranks)
    for name, value in rank_settings(here, framework, threads(wanted_threads, here), verbose).items():
        os.environ.setdefault(name, value)
    _load(framework, verbose, lean=True)
    with _without_noise(verbose):
        importlib.import_module(FRAMEWORKS[framework].horovod)


def _load(framework: str, verbose: bool, lean: bool) -> FrontEndModule:
    record = FRAMEWORKS[framework]
    try:
        with _without_noise(verbose):
            return record.load(lean)
    except ImportError as error:
        if (error.name or "").split(".")[0] not in record.packages:
            raise
        fix = f"run scripts/setup --frameworks {framework}"
        raise ConfigError(f"{framework} is not installed", where=f"framework: {framework}", fix=fix) from error


@contextmanager
def _without_noise(verbose: bool) -> Iterator[None]:
    """TensorFlow writes to descriptor 2 while it loads, whatever its log level; shown if loading fails."""
    if verbose:
        yield
        return
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

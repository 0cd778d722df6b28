"""The launchers, one file each. A row of ``LAUNCHERS`` adds one; no other module names them."""

from __future__ import annotations

from collections.abc import Mapping

from hvd_train.errors import ConfigError
from hvd_train.launch.launchers.base import Launcher
from hvd_train.launch.launchers.detected import DETECTED, refuse_unknown
from hvd_train.launch.launchers.horovodrun import Horovodrun
from hvd_train.launch.launchers.mpirun import Mpirun
from hvd_train.launch.launchers.srun import Srun
from hvd_train.launch.world import World

AUTO = "auto"
NONE = Launcher()  # for a process that was started alone
# The first launcher that detects a rank wins, so an inner launcher comes before one that may have started it.
LAUNCHERS: list[Launcher] = [
    Horovodrun(),
    Mpirun(),
    *DETECTED,
    Srun(),
]
# ``auto`` takes the first usable one. MPI comes before Gloo: on CPUs its allreduce uses shared memory.
PREFERRED = (Mpirun.name, Horovodrun.name)
HELP = "What starts the ranks of -np; auto: mpirun where Horovod speaks MPI, else horovodrun (Gloo)."


def startable(in_allocation: bool = False) -> list[Launcher]:
    """Return the choices of ``--launcher``, preferred ones first. ``in_allocation``: include those that start ranks in
    an allocation."""
    offered = [one for one in LAUNCHERS if one.starts_ranks and (in_allocation or not one.in_allocation)]
    return sorted(offered, key=lambda one: PREFERRED.index(one.name) if one.name in PREFERRED else len(PREFERRED))


def named(name: str) -> Launcher:
    """Return the launcher of this name; "" is the name of ``NONE``."""
    for launcher in LAUNCHERS:
        if launcher.name == name:
            return launcher
    if name:
        names = ", ".join(sorted(one.name for one in startable(in_allocation=True)))
        raise ConfigError(f"there is no launcher '{name}'", where="--launcher", fix=f"one of auto, {names}")
    return NONE


def choose(name: str) -> Launcher:
    """Return the launcher of this name, or the preferred one for ``auto``. Raises ConfigError if it cannot start ranks
    here."""
    if name == AUTO:
        preferred = [named(one) for one in PREFERRED]
        launcher = next((one for one in preferred if one.usable()), preferred[-1])
    else:
        launcher = named(name)
    launcher.check()
    return launcher


def detect(environ: Mapping[str, str]) -> World:
    """Return this process's rank and world. Raises ConfigError if its launcher is one that Horovod does not support."""
    for launcher in LAUNCHERS:
        if world := launcher.detect(environ):
            return world
    refuse_unknown(environ)
    return World()

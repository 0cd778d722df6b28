"""mpi4py's world, for work that needs ranks and no framework."""

from __future__ import annotations

from typing import Any

from hvd_train.errors import ConfigError
from hvd_train.launch.environment import World


def mpi_world(here: World) -> Any:
    """mpi4py's communicator of all ranks that the launcher started."""
    fix = "start it with mpirun"
    if here.launcher == "horovodrun":  # which may speak MPI, but tells nobody
        raise ConfigError("horovodrun's ranks cannot meet over mpi4py", where="horovodrun", fix=fix, common=True)
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # RuntimeError: there is no MPI library
        what = f"several ranks need mpi4py: {str(error).splitlines()[0]}"
        raise ConfigError(what, fix="run scripts/setup, or start one process", common=True) from error
    found = MPI.COMM_WORLD
    if found.size != here.size:
        what = f"the launcher started {here.size} ranks, but mpi4py sees a world of {found.size}"
        raise ConfigError(what, where=here.launcher, fix=fix, common=True)
    return found

"""Launchers that hvd_train detects but does not call; those that Horovod does not support are refused."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import suppress

from hvd_train.errors import ConfigError
from hvd_train.launch.launchers.base import Launcher
from hvd_train.launch.world import World

# Variables with a rank but no size: a rank above 0 shows that there are other processes.
RANK_ALONE = ("PMIX_RANK", "PALS_RANKID", "ALPS_APP_PE", "SLURM_PROCID")
ALONE = "to train with this process alone, unset"


class Detected(Launcher):
    """A launcher that is known by its variables of each rank: rank, world size, local rank, local size."""

    def __init__(self, name: str, *place_variables: str) -> None:
        self.name, self.place_variables = name, place_variables


class Mpiexec(Detected):
    """MPICH and Intel MPI."""

    def detect(self, environ: Mapping[str, str]) -> World | None:
        # srun --mpi=pmi2 also sets MPICH's variables, but its ranks belong to srun.
        slurm = [environ.get(name) for name in ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS")]
        if [environ.get(name) for name in self.place_variables[:2]] == slurm:
            return None
        return super().detect(environ)


PLACE = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
# MVAPICH's, IBM's, Flux' and MPICH's.
DETECTED = (
    Detected("mpirun_rsh", *(f"MV2_COMM_WORLD_{what}" for what in PLACE)),
    Detected("jsrun", *(f"JSM_NAMESPACE_{what}" for what in PLACE)),
    Detected("flux", "FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID", ""),
    Mpiexec("mpiexec", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)


def refuse_unknown(environ: Mapping[str, str]) -> None:
    """Raise ConfigError if a launcher that Horovod does not support has started several processes."""
    who = "torchrun" if "TORCHELASTIC_RUN_ID" in environ else "the launcher"
    variables: dict[str, str] = {}
    if "RANK" in environ or "TORCHELASTIC_RUN_ID" in environ:
        variables = _above(environ, "WORLD_SIZE", 1, "RANK")  # torch.distributed: Kubeflow, DeepSpeed, torchrun
    if "PET_NODE_RANK" in environ:
        variables = variables or _above(environ, "PET_NNODES", 1, "PET_NODE_RANK")  # Kubeflow for torchrun
    if _tasks(environ.get("TF_CONFIG", "")) > 1:
        variables = variables or {"TF_CONFIG": f"a cluster of {_tasks(environ['TF_CONFIG'])}"}
    for name in RANK_ALONE if "SLURM_STEP_NUM_TASKS" not in environ else ():
        variables = variables or _above(environ, name, 0)
    if variables:
        shown = ", ".join(f"{name}={value}" for name, value in variables.items())
        raise ConfigError(
            f"{who} is not supported by Horovod ({shown}): each process would train alone",
            where=f"environment variable {next(iter(variables))}",
            fix="start it with horovodrun, mpirun or srun, or N ranks with hvd-train fit -np N or run -np N; "
            f"{ALONE} {' '.join(variables)}",
        )


def _above(environ: Mapping[str, str], name: str, least: int, partner: str = "") -> dict[str, str]:
    """Return the variable and its partner if it is a number (or, as "1:4", ends in one) above ``least``."""
    last = re.search(r"\d+$", environ.get(name, ""))
    if last is None or int(last[0]) <= least:
        return {}
    return {key: environ[key] for key in (name, partner) if key in environ}


def _tasks(config: str) -> int:
    """Count the processes of TensorFlow's TF_CONFIG that would train."""
    with suppress(ValueError, KeyError, TypeError, AttributeError):
        cluster = json.loads(config)["cluster"]
        return sum(len(cluster.get(kind, [])) for kind in ("chief", "master", "worker"))
    return 1

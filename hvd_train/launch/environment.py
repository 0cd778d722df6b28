"""What the launcher's environment says, and the settings that a rank takes when the user has set none."""

from __future__ import annotations

import ctypes
import json
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from hvd_train.errors import ConfigError
from hvd_train.frameworks import FRAMEWORKS

CORES = "HVD_TRAIN_CORES"  # set by -np: the cores that its ranks share, comma-separated
STALL, STALL_SECONDS = "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "600"

# launcher: variables of (rank, world size, local rank, local size)
LAUNCHERS = {
    "horovodrun": ("HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE"),
    "mpirun": (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    "mpirun_rsh": (
        "MV2_COMM_WORLD_RANK",
        "MV2_COMM_WORLD_SIZE",
        "MV2_COMM_WORLD_LOCAL_RANK",
        "MV2_COMM_WORLD_LOCAL_SIZE",
    ),
    "jsrun": (
        "JSM_NAMESPACE_RANK",
        "JSM_NAMESPACE_SIZE",
        "JSM_NAMESPACE_LOCAL_RANK",
        "JSM_NAMESPACE_LOCAL_SIZE",
    ),
    "flux": ("FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID", ""),
    "mpiexec": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
}
# Ranks by variables that come without a size: above 0 they say that this process is not the only one.
RANK_ALONE = ("PMIX_RANK", "PALS_RANKID", "ALPS_APP_PE", "SLURM_PROCID")
ALONE = "to train with this process alone, unset"


@dataclass(frozen=True)
class World:
    """This process' place; ``launcher`` is empty for a process that was started alone."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    launcher: str = ""


def world(environ: Mapping[str, str] = os.environ) -> World:
    """Reads the variables of the launchers above, or srun's, in this order; but what srun tells MPICH as well
    (--mpi=pmi2) is srun's. Raises ConfigError for a world that Horovod cannot know of."""
    step = [environ.get(name) for name in ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS")]
    for launcher, names in LAUNCHERS.items():
        if names[0] in environ and names[1] in environ:
            if launcher == "mpiexec" and [environ[name] for name in names[:2]] == step:
                continue
            rank, size = (number(environ, name, None) for name in names[:2])
            local = (number(environ, names[2], rank), number(environ, names[3], size))
            return World(rank, size, *local, launcher)
    # A step of one task is a shell or a launcher within an allocation; one of several tasks is a world.
    if number(environ, "SLURM_STEP_NUM_TASKS", 1) > 1:
        rank, size = number(environ, "SLURM_PROCID", None), number(environ, "SLURM_STEP_NUM_TASKS", None)
        if _typed_in_a_step(environ):
            fix = f"leave the shell and start the ranks with srun -n {size}; or 'export SLURM_STEP_NUM_TASKS=1', after "
            fix += "which hvd-train fit -np N starts ranks on this host"
            raise ConfigError(
                f"this shell is one of {size} tasks of its step (srun --pty), and the others have none",
                where="environment variable SLURM_STEP_NUM_TASKS",
                fix=fix,
            )
        per_node = tasks_per_node(environ.get("SLURM_STEP_TASKS_PER_NODE", str(size)))
        node = min(node_of(environ), len(per_node) - 1)
        return World(rank, size, number(environ, "SLURM_LOCALID", 0), per_node[node], "srun")
    _refuse_unknown(environ)
    return World()


def _typed_in_a_step(environ: Mapping[str, str]) -> bool:
    """Return whether a user typed this command in the shell of ``srun --pty``.

    Only a shell at a terminal gives each command a process group of its own. The task at the terminal leads its
    session, and a script's commands stay in its group. The other tasks have no terminal."""
    terminal = any(os.isatty(descriptor) for descriptor in (0, 1, 2))
    return "SLURM_PTY_PORT" in environ and terminal and os.getpgrp() != os.getsid(0)


def _refuse_unknown(environ: Mapping[str, str]) -> None:
    """Raises ConfigError where a launcher that Horovod does not know says that this process is one of several."""
    who = "torchrun" if "TORCHELASTIC_RUN_ID" in environ else "the launcher"
    found: dict[str, str] = {}
    if "RANK" in environ or "TORCHELASTIC_RUN_ID" in environ:
        found = _above(environ, "WORLD_SIZE", 1, "RANK")  # torch.distributed: Kubeflow, DeepSpeed, torchrun
    if "PET_NODE_RANK" in environ:
        found = found or _above(environ, "PET_NNODES", 1, "PET_NODE_RANK")  # Kubeflow for torchrun
    if _tasks(environ.get("TF_CONFIG", "")) > 1:
        found = found or {"TF_CONFIG": f"a cluster of {_tasks(environ['TF_CONFIG'])}"}
    for name in RANK_ALONE if "SLURM_STEP_NUM_TASKS" not in environ else ():
        found = found or _above(environ, name, 0)
    if found:
        shown = ", ".join(f"{name}={value}" for name, value in found.items())
        raise ConfigError(
            f"{who} tells Horovod nothing ({shown}): each process would train alone",
            where=f"environment variable {next(iter(found))}",
            fix="start it with horovodrun, mpirun or srun, or N ranks on this host with hvd-train fit -np N; "
            f"{ALONE} {' '.join(found)}",
        )


def _above(environ: Mapping[str, str], name: str, least: int, beside: str = "") -> dict[str, str]:
    """The variable, and the one beside it, if it is a number (or, as "1:4", ends in one) above ``least``."""
    last = re.search(r"\d+$", environ.get(name, ""))
    if last is None or int(last[0]) <= least:
        return {}
    return {key: environ[key] for key in (name, beside) if key in environ}


def _tasks(config: str) -> int:
    """Count the processes of TensorFlow's TF_CONFIG that would train."""
    with suppress(ValueError, KeyError, TypeError, AttributeError):
        cluster = json.loads(config)["cluster"]
        return sum(len(cluster.get(kind, [])) for kind in ("chief", "master", "worker"))
    return 1


def tasks_per_node(text: str) -> list[int]:
    """Slurm's "4(x2),3" -> [4, 4, 3]."""
    found: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        found += [int(count)] * int(times or 1)
    return found or [1]


def node_of(environ: Mapping[str, str]) -> int:
    """This node's place in the step's list of nodes, which is that of its number of tasks. In a heterogeneous job,
    SLURM_NODEID counts the nodes in another order."""
    nodes = node_names(environ.get("SLURM_STEP_NODELIST", ""))
    own = environ.get("SLURMD_NODENAME")
    return nodes.index(own) if own in nodes else number(environ, "SLURM_NODEID", 0)


def node_names(text: str) -> list[str]:
    """Slurm's "rack[0-1]n[07,09-10],login" -> [rack0n07, rack0n09, rack0n10, rack1n07, ..., login]."""
    found = []
    for word in re.split(r",(?![^[]*\])", text):
        pieces = re.split(r"\[([^]]*)\]", word)  # what stands in brackets has odd places
        choices = [_numbers(piece) if k % 2 else [piece] for k, piece in enumerate(pieces)]
        found += ["".join(chosen) for chosen in product(*choices)]
    return found


def _numbers(text: str) -> list[str]:
    """ "07,09-10" -> [07, 09, 10]."""
    found = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        found += [str(k).zfill(len(first)) for k in range(int(first), int(last or first) + 1)]
    return found


def number(environ: Mapping[str, str], name: str, default: int | None) -> int:
    text = environ.get(name, str(default))
    if not text.isdigit():
        raise ConfigError(
            f"'{text}' is not a number", where=f"environment variable {name}", fix="unset it, or start anew"
        )
    return int(text)


def bind(here: World) -> None:
    """Binds this rank to its share of the cores where its launcher gives all of them to every rank: under ``-np`` and
    horovodrun's Gloo. mpirun and srun have switches for it, which stand, and so does a narrower set of cores. To be
    called before ``threads``.

    A rank that moves between cores leaves its caches behind: unbound, the wide MLP took 1.2 times as long over Gloo.
    """
    allowed = os.sched_getaffinity(0)
    if CORES in os.environ:
        shared = {int(core) for core in os.environ[CORES].split(",")}
    else:
        shared = set(range(os.cpu_count() or 1)) if here.launcher == "horovodrun" else set()
    own = _share(allowed, here)
    if allowed == shared and own:
        with suppress(OSError):  # not allowed in every container; a thread may just have ended
            for thread in os.listdir("/proc/self/task"):
                os.sched_setaffinity(int(thread), own)


def _share(cores: set[int], here: World) -> list[int]:
    """The cores of one of a host's ranks: neighbours, on one socket if it can be; none where there are more ranks."""
    each = len(cores) // here.local_size
    return sorted(cores, key=_place)[each * here.local_rank :][:each]


def _place(cpu: int) -> tuple[int, int, int]:
    """(socket, core, cpu) as the kernel numbers them: threads of one core stand side by side."""
    topology = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology")
    with suppress(OSError, ValueError):
        socket, core = (int((topology / name).read_text()) for name in ("physical_package_id", "core_id"))
        return socket, core, cpu
    return 0, cpu, cpu


def threads(config_threads: int | str, here: World) -> int:
    """Threads per rank: as configured, as OMP_NUM_THREADS says, or this rank's share of the host's cores.

    Launchers differ in binding: a rank that is bound to a core sees that alone, one that is bound to a socket all of
    the socket, and so may others.
    """
    if config_threads != "auto":
        return int(config_threads)
    if os.environ.get("OMP_NUM_THREADS", "").isdigit() and int(os.environ["OMP_NUM_THREADS"]) > 0:
        return int(os.environ["OMP_NUM_THREADS"])
    return max(1, min(len(os.sched_getaffinity(0)), (os.cpu_count() or 1) // here.local_size))


def rank_settings(here: World, framework: str | None, count: int, verbose: bool) -> dict[str, str]:
    """Environment of one rank, before any framework is loaded; set it by ``setdefault``: the user's word stands.
    ``framework`` None: any may come."""
    settings = {"OMP_NUM_THREADS": str(count), "MKL_NUM_THREADS": str(count)}
    if framework:
        record = FRAMEWORKS[framework]
        settings |= {**record.settings, **({} if verbose else record.quiet)}
    if here.size > 1:
        settings |= {
            # Fusing by arrival time would change the order of sums from run to run with three or more ranks.
            "HOROVOD_FUSION_THRESHOLD": "0",
            # A rank that waits must not take the core from one that computes.
            "OMPI_MCA_mpi_yield_when_idle": "1",
            # At Horovod's 1 ms a small model's step is mostly waiting.
            "HOROVOD_CYCLE_TIME": "0.1",
            # Ours (see scripts/horovod-*.patch): a rank that has nothing to exchange does not wake every cycle, ...
            "HOROVOD_IDLE_WAIT_MS": "1000",
            # ... and MPI reduces large tensors in pieces: on one host what a cache holds; over a network more, for at
            # the end of each the link waits until a computing thread leaves this one the core.
            "HOROVOD_MPI_PIECE_BYTES": str((8 if here.local_size == here.size else 32) << 20),
            # UCX, below Open MPI, would take SIGHUP for its own debugging, and a closed terminal would end nothing.
            "UCX_DEBUG_SIGNO": "0",
            # Open MPI's default less "put", whose acknowledgements take turns with the data: messages of 2 MB and more
            # crossed a 1 Gbit link at two thirds of its speed or less.
            "OMPI_MCA_btl_tcp_flags": "send,inplace,need-ack,need-csum,hetero-rdma",
            # Ranks that call different things wait for one another. The limit is torch's own for NCCL: a rank that
            # saves, evaluates or builds a graph while the others wait may take minutes.
            STALL: (limit := os.environ.get(STALL, STALL_SECONDS)),
            "HOROVOD_STALL_CHECK_TIME_SECONDS": str(_check_seconds(limit)),
        }
    return settings


M_MMAP_THRESHOLD, M_TRIM_THRESHOLD, M_ARENA_MAX = -3, -1, -8  # malloc.h
KEPT_BYTES = (1 << 30, (1 << 31) - 1)


def _check_seconds(limit: str) -> int:
    """Between two looks for a stall; Horovod wants fewer than the limit, and at the first warns."""
    return max(1, min(60, int(limit) // 10)) if limit.isdigit() and int(limit) else 60


def keep_memory() -> bool:
    """Lets this process keep memory that it frees; False: the C library has no such switch, or the user set another.

    glibc hands large blocks back to the kernel at once, and every step takes them again, page by page: a million page
    faults in 500 steps of SINGA's CNN, a tenth of its time. Peak memory stays the same where buffers are small; BERT's
    logits of 42 MB do not always find a hole of their size: a rank takes 80 to 160 MB more than it needs.
    """
    return _mallopt({M_MMAP_THRESHOLD: KEPT_BYTES[0], M_TRIM_THRESHOLD: KEPT_BYTES[1]})


def share_memory() -> bool:
    """Lets all threads of this process take memory from one place. To be called before they start.

    A thread's own heap goes back to the kernel as soon as all of it is free, whatever ``keep_memory`` says: under
    Keras' ``fit`` half of a wide layer's gradient in every step.
    """
    return _mallopt({M_ARENA_MAX: 1})


def _mallopt(options: dict[int, int]) -> bool:
    if any(name.startswith(("MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD")) for name in os.environ):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and all([mallopt(option, value) for option, value in options.items()])

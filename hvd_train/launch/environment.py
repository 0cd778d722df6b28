"""Which rank this process is, and the default environment variables of a rank."""

from __future__ import annotations

import ctypes
import os
import re
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from hvd_train.errors import ConfigError
from hvd_train.frameworks import FRAMEWORKS, KERNELS
from hvd_train.launch import launchers
from hvd_train.launch.world import World

BEGAN = "HVD_TRAIN_BEGAN"  # set by -np: when the command began, in seconds since 1970
CORES = "HVD_TRAIN_CORES"  # set by -np: the cores that all ranks share, comma-separated
# Horovod's variable: seconds until it ends ranks that do not call the same collective.
STALL, STALL_SECONDS = "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "600"
# The ends of the names of Horovod's variables that are whole numbers. Its C++ reads "1e9" as 1, and a word as 0.
WHOLE = ("_SECONDS", "_MS", "_BYTES", "_SIZE", "_THRESHOLD", "_CAPACITY", "_STREAMS", "_SAMPLES", "_SAMPLE", "_TIMEOUT")
GLOO_SECONDS = "HOROVOD_GLOO_TIMEOUT_SECONDS"
CYCLE = "HOROVOD_CYCLE_TIME"  # milliseconds, with fractions


def world(environ: Mapping[str, str] = os.environ) -> World:
    """Return this process's rank and world from its launcher's variables. Raises ConfigError for a launcher that
    Horovod does not support."""
    return launchers.detect(environ)


def command_began() -> float:
    """Return when the command began that started this rank, in seconds since 1970."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    began = time.time() - age
    with suppress(ValueError):  # the hosts' clocks may differ
        return min(float(os.environ.get(BEGAN, began)), began)
    return began


def bind(here: World) -> None:
    """Bind this rank to its share of the cores, under ``-np`` and launchers that do not bind ranks. Cores that another
    launcher or the user has already restricted stay as they are. Must be called before ``threads``.

    A rank that moves between cores leaves its caches behind: unbound, the wide MLP took 1.2 times as long over Gloo.
    """
    allowed = os.sched_getaffinity(0)
    if CORES in os.environ:
        shared = {int(core) for core in os.environ[CORES].split(",")}
    else:
        shared = set() if launchers.named(here.launcher).binds_ranks else set(range(os.cpu_count() or 1))
    share = _share(allowed, here)
    if allowed == shared and share:
        with suppress(OSError):  # not allowed in every container; a thread may just have ended
            for thread in os.listdir("/proc/self/task"):
                os.sched_setaffinity(int(thread), share)


def _share(cores: set[int], here: World) -> list[int]:
    """Return adjacent cores for one rank, on one socket if possible; [] if there are more ranks than cores."""
    each = len(cores) // here.local_size
    return sorted(cores, key=_place)[each * here.local_rank :][:each]


def _place(cpu: int) -> tuple[int, int, int]:
    """Return (socket, core, cpu) as the kernel numbers them, so that the threads of one core are neighbours."""
    topology = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology")
    with suppress(OSError, ValueError):
        socket, core = (int((topology / name).read_text()) for name in ("physical_package_id", "core_id"))
        return socket, core, cpu
    return 0, cpu, cpu


def threads(config_threads: int | str, here: World) -> int:
    """Return the number of threads: from the configuration, OMP_NUM_THREADS, or the rank's share of the cores.

    A rank may be bound to a core, which it then has to itself, or to a socket, which others may share.
    """
    if config_threads != "auto":
        return int(config_threads)
    if os.environ.get("OMP_NUM_THREADS", "").isdigit() and int(os.environ["OMP_NUM_THREADS"]) > 0:
        return int(os.environ["OMP_NUM_THREADS"])
    return max(1, min(len(os.sched_getaffinity(0)), (os.cpu_count() or 1) // here.local_size))


def rank_settings(here: World, framework: str | None, count: int, verbose: bool) -> dict[str, str]:
    """Return default environment variables for one rank, to set before a framework is loaded. Variables that the user
    has set take precedence. ``framework`` None: not known yet."""
    settings = {"OMP_NUM_THREADS": str(count), "MKL_NUM_THREADS": str(count)}
    if count > 1:
        # By default threads spin 300 000 times before they sleep. If another process used one of the cores, a small
        # step took 100 ms instead of 1 (two threads, two cores). With 1000 spins an idle machine is as fast.
        settings["GOMP_SPINCOUNT"] = "1000"
    if framework:
        record = FRAMEWORKS[framework]
        settings |= {**record.settings, **({} if verbose else record.quiet)}
    else:
        settings |= KERNELS
    if here.size > 1:
        settings |= {
            # With three or more ranks, fusion by arrival time would change the order of sums from run to run.
            "HOROVOD_FUSION_THRESHOLD": "0",
            # A waiting rank must yield its core to one that computes.
            "OMPI_MCA_mpi_yield_when_idle": "1",
            # At Horovod's 1 ms a small model's step is mostly waiting.
            CYCLE: "0.1",
            # Ours (see scripts/horovod-*.patch): a rank that has nothing to exchange does not wake every cycle, ...
            "HOROVOD_IDLE_WAIT_MS": "1000",
            # ... and MPI reduces large tensors in pieces. On one host a piece fits into the cache. Over a network it is
            # larger, because after each piece the link idles until this thread gets a core.
            "HOROVOD_MPI_PIECE_BYTES": str((8 if here.local_size == here.size else 32) << 20),
            # UCX, below Open MPI, would handle SIGHUP itself, and closing the terminal would not end the ranks.
            "UCX_DEBUG_SIGNO": "0",
            # Open MPI's default without "put", whose acknowledgements alternate with the data: messages of 2 MB and
            # more reached at most two thirds of the speed of a 1 Gbit link.
            "OMPI_MCA_btl_tcp_flags": "send,inplace,need-ack,need-csum,hetero-rdma",
            # Ranks that call different collectives wait for one another. The limit is torch's for NCCL: a rank that
            # saves, evaluates or builds a graph while the others wait may take minutes.
            STALL: (limit := os.environ.get(STALL, STALL_SECONDS)),
            "HOROVOD_STALL_CHECK_TIME_SECONDS": str(_check_seconds(limit)),
        }
    return settings


def check_horovod(environ: Mapping[str, str] = os.environ) -> None:
    """Raise ConfigError if one of Horovod's variables must be a number, and is not."""
    for name, value in environ.items():
        if name == CYCLE:
            pattern, kind = r"\d+\.?\d*|\.\d+", "number"
        elif name == GLOO_SECONDS:
            pattern, kind = "0*[1-9][0-9]*", "whole number above 0"
        elif name.startswith("HOROVOD_") and name.endswith(WHOLE):
            pattern, kind = "[0-9]+", "whole number"
        else:
            continue
        if not re.fullmatch(pattern, value):
            what, fix = f"'{value}' is no {kind}", "unset or correct it"
            raise ConfigError(what, where=f"environment variable {name}", fix=fix)


def prepare_rank(
    here: World, framework: str | None, wanted_threads: int | str, verbose: bool
) -> tuple[int, dict[str, dict[str, str]]]:
    """Bind this rank to its cores and set its environment, before any framework is loaded; again changes nothing.

    Returns the number of threads, and for each variable {"value": ..., "chosen_by": "user" or "hvd_train"}.
    """
    bind(here)
    count = threads(wanted_threads, here)
    settings = rank_settings(here, framework, count, verbose)
    for name, value in settings.items():
        if name not in os.environ:
            os.environ[name] = _chosen[name] = value
    by = {name: "hvd_train" if _chosen.get(name) == os.environ[name] else "user" for name in settings}
    return count, {name: {"value": os.environ[name], "chosen_by": by[name]} for name in settings}


_chosen: dict[str, str] = {}  # what ``prepare_rank`` has set in this process


M_MMAP_THRESHOLD, M_TRIM_THRESHOLD, M_ARENA_MAX = -3, -1, -8  # malloc.h
KEPT_BYTES = (1 << 30, (1 << 31) - 1)


def _check_seconds(limit: str) -> int:
    """Return the seconds between stall checks. Horovod requires fewer than the limit, and warns at the first check."""
    return max(1, min(60, int(limit) // 10)) if limit.isdigit() and int(limit) else 60


def keep_memory() -> bool:
    """Let malloc keep freed memory. Returns False if the C library has no such option, or the user has set one.

    glibc returns large blocks to the kernel at once, and each step faults them in again: a million page faults in 500
    steps of SINGA's CNN, a tenth of its time. With small buffers peak memory stays the same. With BERT's logits of 42
    MB the heap fragments, and a rank uses 80 to 160 MB more.
    """
    return _mallopt({M_MMAP_THRESHOLD: KEPT_BYTES[0], M_TRIM_THRESHOLD: KEPT_BYTES[1]})


def share_memory() -> bool:
    """Let all threads allocate from one heap (malloc arena). Must be called before they start.

    A thread's own arena returns to the kernel as soon as it is empty, despite ``keep_memory``: under Keras' ``fit``
    half of a wide layer's gradient in every step.
    """
    return _mallopt({M_ARENA_MAX: 1})


def _mallopt(options: dict[int, int]) -> bool:
    if any(name.startswith(("MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD")) for name in os.environ):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and all([mallopt(option, value) for option, value in options.items()])

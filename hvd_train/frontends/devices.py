"""Choose the device of a rank, and whether gradients are exchanged during the backward pass."""

from __future__ import annotations

import os
from collections.abc import Sequence

from hvd_train.config import FrontEndConfig
from hvd_train.errors import ConfigError, amount
from hvd_train.protocol import Communicator


def overlaps(wanted: bool | str, communicator: Communicator, gpu: bool, threads: int) -> bool:
    """Return whether exchanges run during the backward pass.

    ``auto``: if the communication thread has a core to itself, or mostly waits for a network. When all cores of one
    host are busy, it would slow down the computing thread.
    """
    if communicator.size == 1:
        return False
    if isinstance(wanted, bool):
        return wanted
    # An unbound rank shares all cores; a rank bound to a socket shares the socket's cores.
    cores = min(len(os.sched_getaffinity(0)), (os.cpu_count() or 1) // communicator.local_size)
    return gpu or communicator.local_size < communicator.size or cores > threads


def gpu_of(config: FrontEndConfig, communicator: Communicator, visible: int, framework: str) -> int | None:
    """Return this rank's GPU among the ``visible`` ones; None: the CPU. Raises ConfigError if ``cuda`` has no GPU."""
    if config.device == "cpu" or (config.device == "auto" and not visible):
        return None
    if not visible:
        fix = "set device: cpu, or see 'hvd-train doctor'"
        raise ConfigError(f"this {framework} sees no GPU", where="device: cuda", fix=fix)
    return gpu_index(visible, communicator.local_rank, config.devices)


def gpus_of(config: FrontEndConfig, communicator: Communicator, visible: int, framework: str) -> list[int]:
    """Return the ``parallel.devices_per_rank`` GPUs of this rank, or [] for the CPU.

    Local rank r takes GPUs k r to k r + k - 1 of the visible ones, or of ``devices``. Raises ConfigError if the host
    has too few.
    """
    count, local = config.parallel.devices_per_rank, communicator.local_size
    if count == 1 or not visible or config.device == "cpu":
        index = gpu_of(config, communicator, visible, framework)
        return [] if index is None else [index]
    choice = list(range(visible)) if config.devices is None else config.devices
    # With --gpus-per-task, Slurm shows each rank only its own GPUs.
    alone = config.devices is None and "SLURM_GPUS_PER_TASK" in os.environ and visible < count * local
    first = 0 if alone else count * communicator.local_rank
    indices = choice[first : first + count]
    too_few = not alone and len(choice) < count * local
    if too_few or len(indices) < count or max(indices) >= visible or len(set(indices)) < count:
        needed = f"{amount(local, 'rank')} of {count} devices need {count * local} GPUs"
        what = f"{needed}, and this host has {visible}" + f" (devices {choice})" * (config.devices is not None)
        fix = "start fewer ranks on a host, set parallel.devices_per_rank: 1, or set device: cpu"
        raise ConfigError(what, where=f"parallel.devices_per_rank: {count}", fix=fix)
    return indices


def gpu_index(visible: int, local_rank: int, devices: Sequence[int] | None) -> int:
    """Return the index of this rank's GPU: its local rank among the visible ones, or among ``devices``."""
    # With --gpus-per-task, Slurm shows each rank one GPU, numbered 0 on every rank.
    if devices is None and visible == 1 and "SLURM_GPUS_PER_TASK" in os.environ:
        return 0
    choice = list(devices) if devices is not None else list(range(visible))
    if local_rank >= len(choice) or choice[local_rank] >= visible:
        raise ConfigError(
            f"local rank {local_rank} has no GPU: {visible} visible, devices {choice}",
            fix="start as many ranks per host as it has GPUs, or set device: cpu",
        )
    return choice[local_rank]

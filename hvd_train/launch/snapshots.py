"""The newest state of a job with ``--max-restarts``, in memory: checkpoints in a folder of /dev/shm.

They outlive a rank and are removed at the end of the job. What a killed job left is removed by its last rank, or when
the next job begins.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hvd_train.errors import ConfigError
from hvd_train.run_folder.lock import ticks

VARIABLE = "HVD_TRAIN_SNAPSHOTS"  # the folder, set for the ranks
PLACE, PREFIX = Path("/dev/shm"), "hvd-train-snapshots-"
# The owner's pid, and when that process began: the kernel gives pids again.
NAME = re.compile(PREFIX + r"(\d+)-(\d+)-\w+")


@contextmanager
def in_memory(wanted: bool) -> Iterator[None]:
    """Make the folder, and pass it to the ranks that are started meanwhile."""
    if not wanted:
        yield
        return
    try:
        for old in PLACE.glob(f"{PREFIX}*"):
            remove_if_orphaned(old)
        folder = tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-{ticks(os.getpid())}-", dir=PLACE)
    except OSError as error:
        where, fix = "checkpoint.snapshot_every_n_steps", "set it to 0, and every_n_steps for the disk"
        raise ConfigError(f"{PLACE} cannot be written: {error.strerror}", where=where, fix=fix) from error
    try:
        os.environ[VARIABLE] = folder
        yield
    finally:
        del os.environ[VARIABLE]
        shutil.rmtree(folder, ignore_errors=True)


def folder_of_rank() -> Path | None:
    """Return where this rank is to keep its state, or None if it keeps none in memory."""
    return Path(os.environ[VARIABLE]) if VARIABLE in os.environ else None


def remove_if_orphaned(folder: Path | None = None) -> None:
    """Remove a folder (None: that of this rank) if its job is gone."""
    folder = folder or folder_of_rank()
    if folder is None:
        return
    match = NAME.fullmatch(folder.name)
    with suppress(OSError):
        if match and folder.lstat().st_uid == os.geteuid() and ticks(int(match[1])) != int(match[2]):
            shutil.rmtree(folder, ignore_errors=True)

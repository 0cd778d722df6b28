"""The newest state of a job with ``--max-restarts``, in memory: checkpoints in a folder of /dev/shm.

They outlive a rank and are removed at the end of the job. What a killed job left is removed by its last rank, or when
the next job begins.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hvd_train.errors import ConfigError

VARIABLE = "HVD_TRAIN_SNAPSHOTS"  # the folder, set for the ranks
PLACE, PREFIX = Path("/dev/shm"), "hvd-train-memory-"


@contextmanager
def in_memory(wanted: bool) -> Iterator[None]:
    """Make the folder, and pass it to the ranks that are started meanwhile."""
    if not wanted:
        yield
        return
    try:
        for old in PLACE.glob(f"{PREFIX}*"):
            remove_if_orphaned(old)
        # Another name until it is locked: without a lock it would be an orphan's.
        folder = Path(tempfile.mkdtemp(prefix=f".{PREFIX}{os.getpid()}-", dir=PLACE))
        lock = _lock(folder)
        folder = folder.rename(folder.with_name(folder.name[1:]))
    except OSError as error:
        where, fix = "checkpoint.snapshot_every_n_steps", "set it to 0, and every_n_steps for the disk"
        raise ConfigError(f"{PLACE} cannot be written: {error.strerror}", where=where, fix=fix) from error
    try:
        os.environ[VARIABLE] = str(folder)
        yield
    finally:
        del os.environ[VARIABLE]
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def folder_of_rank() -> Path | None:
    """Return where this rank is to keep its state, or None if it keeps none in memory."""
    return Path(os.environ[VARIABLE]) if VARIABLE in os.environ else None


def remove_if_orphaned(folder: Path | None = None) -> None:
    """Remove a folder (None: that of this rank) if its job is gone."""
    folder = folder or folder_of_rank()
    if folder is None:
        return
    with suppress(OSError):
        if folder.lstat().st_uid != os.geteuid():
            return
        lock = _lock(folder)  # BlockingIOError: the job lives
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _lock(folder: Path) -> int:
    """Lock a folder for as long as this process lives, and return its descriptor. Raises BlockingIOError.

    A lock tells the living from the dead in any container: /dev/shm may be shared by several, in each of which a pid
    means another process.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor

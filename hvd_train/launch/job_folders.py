"""Folders for the files of one job on this host, in memory or in the folder of temporary files.

They are removed at the end of the job; those of a killed job by its last rank, or when the next job begins.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

VARIABLE = "HVD_TRAIN_FOLDERS"  # the job's folders, set for its ranks
PREFIX = "hvd-train-"


@contextmanager
def job_folder(place: Path, kind: str) -> Iterator[Path]:
    """Create a folder in ``place`` for the duration of the block, and remove those of dead jobs.

    Raises OSError.
    """
    for old in place.glob(f"{PREFIX}{kind}-*"):
        remove_if_orphaned(old)
    # Renamed once it is locked, because an unlocked folder counts as orphaned.
    folder = Path(tempfile.mkdtemp(prefix=f".{PREFIX}{kind}-{os.getpid()}-", dir=place))
    lock = _lock(folder)
    folder = folder.rename(folder.with_name(folder.name[1:]))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def remove_orphaned() -> None:
    """Remove the folders of this rank's job if the process that created them is gone."""
    for name in filter(None, os.environ.get(VARIABLE, "").split(os.pathsep)):
        remove_if_orphaned(Path(name))


def remove_if_orphaned(folder: Path) -> None:
    """Remove a folder of this user if its job is gone."""
    with suppress(OSError):
        if folder.lstat().st_uid != os.geteuid():
            return
        lock = _lock(folder)  # BlockingIOError: the job is alive
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _lock(folder: Path) -> int:
    """Lock a folder for as long as this process lives, and return its descriptor. Raises BlockingIOError.

    A lock works across containers, which may share /dev/shm but not process ids.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor

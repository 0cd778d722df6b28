"""In-memory checkpoints (in /dev/shm) of the newest state of a job with ``--max-restarts``.

They outlive a rank and are removed at the end of the job.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from hvd_train.errors import ConfigError
from hvd_train.launch.job_folders import job_folder, remove_if_orphaned

VARIABLE = "HVD_TRAIN_SNAPSHOTS"  # the folder, set for the ranks
PLACE = Path("/dev/shm")


@contextmanager
def in_memory(wanted: bool) -> Iterator[None]:
    """Create the folder, and pass it to the ranks that are started within the block."""
    if not wanted:
        yield
        return
    with ExitStack() as stack:
        try:
            folder = stack.enter_context(job_folder(PLACE, "memory"))
        except OSError as error:
            where, fix = "checkpoint.snapshot_every_n_steps", "set it to 0, and every_n_steps for the disk"
            raise ConfigError(f"{PLACE} cannot be written: {error.strerror}", where=where, fix=fix) from error
        os.environ[VARIABLE] = str(folder)
        try:
            yield
        finally:
            del os.environ[VARIABLE]


def folder_of_rank() -> Path | None:
    """Return the folder for this rank's in-memory checkpoints, or None if it keeps none."""
    return Path(os.environ[VARIABLE]) if VARIABLE in os.environ else None


def remove_orphaned() -> None:
    """Remove this rank's folder if its job is gone."""
    if folder := folder_of_rank():
        remove_if_orphaned(folder)

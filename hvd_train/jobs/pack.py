"""Packed data sets: ``hvd-train data pack`` and ``data check``."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from hvd_train.config import Config
from hvd_train.config.user_code import look_in
from hvd_train.data import catalog, packing
from hvd_train.data.packed_manifest import summary
from hvd_train.errors import amount
from hvd_train.launch.environment import world
from hvd_train.run_folder.terminal import say


def pack(config: Config, folder: Path) -> None:
    """Write the data of ``config`` into ``folder``. The ranks of an MPI launcher share the work."""
    began = time.monotonic()
    look_in(config.code_dir)
    ranks = _ranks()
    manifest = catalog.pack(config.data, config.task, folder, ranks)
    if ranks.rank == 0:
        took = f"{time.monotonic() - began:.1f} s, {amount(ranks.size, 'rank')}"
        say(f"packed {summary(manifest)}: {folder} ({took})")


def check(folder: Path) -> None:
    """Verify all checksums of a packed data set. Raises DataError for the first damaged file."""
    ranks = _ranks()
    manifest = packing.check(folder, ranks)
    if ranks.rank == 0:
        say(f"as it was written: {summary(manifest)}: {folder}")


def _ranks() -> Any:
    here = world()
    if here.size == 1:
        return packing.Alone()
    # mpi4py, because packing needs no framework, while importing Horovod loads one.
    from hvd_train.frontends.mpi import mpi_world

    return mpi_world(here)

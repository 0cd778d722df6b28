"""Ranks over Gloo, started by ``launch/ssh_starter.py`` with the variables of ``horovodrun --gloo``."""

from __future__ import annotations

from collections.abc import Sequence

from hvd_train.launch.launchers import installed
from hvd_train.launch.launchers.base import Launcher, Layout


class Horovodrun(Launcher):
    name = "horovodrun"
    place_variables = ("HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE")
    starts_ranks = True
    library = "gloo"
    binds_ranks = False
    forwards_stops = True
    leads_session = True
    opens_mpi = False

    def command(self, layout: Layout, program: Sequence[str]) -> list[str]:
        # Not Horovod's command of this name, which puts the whole environment on command lines.
        line = [*installed.python("hvd_train.launch.ssh_starter"), "-np", str(layout.num_proc)]
        return [*line, *(layout.hosts.options if layout.hosts else []), *program]

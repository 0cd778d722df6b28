"""Slurm's ``srun``: a step of ranks within an allocation (``salloc``, a batch script)."""

from __future__ import annotations

import functools
import os
import re
import shutil
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import product
from typing import TYPE_CHECKING

from hvd_train.errors import ConfigError
from hvd_train.launch.launchers import installed
from hvd_train.launch.launchers.base import Launcher, Layout, number
from hvd_train.launch.world import World

if TYPE_CHECKING:
    from hvd_train.launch.rendezvous.job_step import JobStep

WHERE = "--launcher srun"


class Srun(Launcher):
    name = tool = "srun"
    place_variables = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "")
    starts_ranks = True
    help = "within an allocation of Slurm"
    in_allocation = True
    no_hosts = "leave it out: the allocation has the hosts, and 'hvd-train submit --requeue' starts again"
    # srun does not forward a first SIGINT, and on SIGTERM ends the ranks before they have saved.
    forwarded_signals = dict.fromkeys((signal.SIGINT, signal.SIGTERM, signal.SIGHUP), signal.SIGUSR1)
    opens_mpi = False  # with --mpi=pmix it may, which has not been tried
    other_library = "set HOROVOD_CONTROLLER=gloo"

    def check(self) -> None:
        if shutil.which(self.tool) is None or "SLURM_JOB_ID" not in os.environ:
            fix = "start it with salloc, or see 'hvd-train submit'"
            raise ConfigError("this is not a Slurm allocation", where=WHERE, fix=fix)

    def command(self, layout: Layout, program: Sequence[str]) -> list[str]:
        from hvd_train.launch.hosts import ranks_in_all

        num_proc, nodes, each = layout.num_proc, layout.nodes, layout.ranks_per_node
        if nodes and each:
            num_proc = ranks_in_all(num_proc, nodes * each)
        if num_proc is None:
            raise ConfigError(
                "the number of ranks is missing", where=WHERE, fix="give -np, or --nnodes and --nproc-per-node"
            )
        options = {"-n": num_proc, "-N": nodes, "--ntasks-per-node": each}
        return [self.tool, *(str(word) for pair in options.items() if pair[1] for word in pair), *program]

    def exit_code(self, code: int, signals: Sequence[int], layout: Layout) -> int:
        # srun itself prints which task was killed by a signal.
        return super().exit_code(code, signals, layout) if signals else code

    def detect(self, environ: Mapping[str, str]) -> World | None:
        rank, size, local_rank, _ = self.place_variables
        # A step of one task is a shell or a launcher within an allocation; one of several tasks is a world.
        if number(environ, size, 1) < 2:
            return None
        place = number(environ, rank), number(environ, size)
        if _typed_in_a_step(environ):
            fix = f"leave the shell and start the ranks with srun -n {place[1]}; or 'export {size}=1', after "
            fix += "which hvd-train fit -np N starts ranks on this host"
            what = f"this shell is one of {place[1]} tasks of its step (srun --pty), and the others have none"
            raise ConfigError(what, where=f"environment variable {size}", fix=fix)
        per_node = tasks_per_node(environ.get("SLURM_STEP_TASKS_PER_NODE", str(place[1])))
        node = min(node_of(environ), len(per_node) - 1)
        return World(*place, number(environ, local_rank, 0), per_node[node], self.name)

    def joins_ranks(self, environ: Mapping[str, str]) -> bool:
        """Return whether MPI connects the ranks: with srun --mpi=pmix, or if the user says so."""
        if environ.get("HOROVOD_CONTROLLER"):
            return environ["HOROVOD_CONTROLLER"].lower() == "mpi"
        return "PMIX_RANK" in environ and installed.mpi_built()

    def step(self, environ: Mapping[str, str]) -> JobStep:
        from hvd_train.launch.rendezvous.job_step import JobStep

        names = ("SLURM_CLUSTER_NAME", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
        first = node_names(environ.get("SLURM_STEP_NODELIST", "localhost"))[0]
        node = node_of(environ)
        this = environ.get("SLURMD_NODENAME", f"node {node}" if node else first)
        per_node = tasks_per_node(environ.get("SLURM_STEP_TASKS_PER_NODE", environ["SLURM_STEP_NUM_TASKS"]))
        return JobStep(
            ".".join(environ.get(name, "0") for name in names), self.name, first, this, len(per_node), address
        )


def _typed_in_a_step(environ: Mapping[str, str]) -> bool:
    """Return whether a user typed this command in the shell of ``srun --pty``.

    Only a shell at a terminal gives each command a process group of its own. The task at the terminal leads its
    session, and a script's commands stay in its group. The other tasks have no terminal."""
    terminal = any(os.isatty(descriptor) for descriptor in (0, 1, 2))
    return "SLURM_PTY_PORT" in environ and terminal and os.getpgrp() != os.getsid(0)


def tasks_per_node(text: str) -> list[int]:
    """Expand Slurm's "4(x2),3" to [4, 4, 3]."""
    counts: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [int(count)] * int(times or 1)
    return counts or [1]


def node_of(environ: Mapping[str, str]) -> int:
    """Return this node's index in the step's lists of nodes and of tasks per node. In a heterogeneous job, SLURM_NODEID
    has another order."""
    nodes = node_names(environ.get("SLURM_STEP_NODELIST", ""))
    this = environ.get("SLURMD_NODENAME")
    return nodes.index(this) if this in nodes else number(environ, "SLURM_NODEID", 0)


def node_names(text: str) -> list[str]:
    """Expand Slurm's "rack[0-1]n[07,09-10],login" to [rack0n07, rack0n09, rack0n10, rack1n07, ..., login]."""
    names = []
    for word in re.split(r",(?![^[]*\])", text):
        pieces = re.split(r"\[([^]]*)\]", word)  # the parts in brackets have odd indices
        choices = [_numbers(piece) if k % 2 else [piece] for k, piece in enumerate(pieces)]
        names += ["".join(choice) for choice in product(*choices)]
    return names


def _numbers(text: str) -> list[str]:
    """Expand "07,09-10" to [07, 09, 10]."""
    numbers = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        numbers += [str(k).zfill(len(first)) for k in range(int(first), int(last or first) + 1)]
    return numbers


@functools.cache
def address(node: str) -> str:
    """Return a node's IPv4 address, from the name service or else from Slurm's configuration."""
    with suppress(OSError):
        return socket.gethostbyname(node)
    shown = ""
    with suppress(subprocess.TimeoutExpired):
        line = ["scontrol", "show", "node", node]
        shown = subprocess.run(line, capture_output=True, text=True, timeout=30, check=False).stdout
    match = re.search(r"\bNodeAddr=(\S+)", shown)
    if match is None:
        raise ValueError(f"the host name {node} cannot be resolved")
    return socket.gethostbyname(match[1])

"""``fit --launcher srun``: a step of ranks within an allocation of Slurm (``salloc``, a batch script)."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Sequence

from hvd_train.errors import ConfigError
from hvd_train.launch.hosts import ranks_in_all
from hvd_train.launch.local import run

WHERE, SIGNALS = "--launcher srun", (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def command(num_proc: int | None, nnodes: int | None, nproc_per_node: int | None, program: Sequence[str]) -> list[str]:
    """``srun`` with as many ranks; the hosts are the allocation's, the first ``nnodes`` of them."""
    if nnodes and nproc_per_node:
        num_proc = ranks_in_all(num_proc, nnodes * nproc_per_node)
    if num_proc is None:
        raise ConfigError("how many ranks", where=WHERE, fix="give -np, or --nnodes and --nproc-per-node")
    given = {"-n": num_proc, "-N": nnodes, "--ntasks-per-node": nproc_per_node}
    return ["srun", *(str(word) for pair in given.items() if pair[1] for word in pair), *program]


def start(line: Sequence[str]) -> int:
    """Runs it to its end: its exit code, or 128 + signal; 75 where its ranks have saved, Ctrl-C: 130."""
    if shutil.which("srun") is None or "SLURM_JOB_ID" not in os.environ:
        fix = "start it with salloc, or see 'hvd-train submit'"
        raise ConfigError("this is no allocation of Slurm", where=WHERE, fix=fix)
    # srun keeps a first SIGINT to itself, and at SIGTERM it ends the ranks before they have saved.
    code, received, _ = run(line, os.environ, sent=dict.fromkeys(SIGNALS, signal.SIGUSR1))
    saved = code == 75 and received[:1] != [signal.SIGINT]
    return 128 + received[0] if received and code and not saved else code

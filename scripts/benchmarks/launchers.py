"""Seconds from the command to the end of the first step, on 2, 4 and 8 ranks, which may share cores."""

from __future__ import annotations

import shutil
import subprocess

from one_rank import FRAMEWORKS
from start import started

RANKS = 2, 4, 8
TITLE = "the seconds of start, on more ranks"


def measure() -> list[dict]:
    from hvd_train.launch.start import command

    slurm = shutil.which("srun") and subprocess.run(["sinfo"], capture_output=True, check=False).returncode == 0
    tools = ["mpirun", "horovodrun", *(["srun"] if slurm else [])]
    cases = []
    for framework in FRAMEWORKS:
        for ranks in RANKS:
            for tool in tools:
                before = ["srun", "-n", str(ranks)] if tool == "srun" else command(ranks, tool, [], program=["-"])[:-1]
                cases.append((framework, ranks, before, []))
    return started(cases)

"""A launcher of a few lines: its processes know nothing but their numbers, and connect at hvd_train's rendezvous."""

from __future__ import annotations

import os
import subprocess
import sys

from hvd_train.launch.launchers.base import Launcher
from hvd_train.launch.rendezvous.job_step import JobStep


class Toy(Launcher):
    name = "toy"
    place_variables = ("TOY_RANK", "TOY_SIZE", "TOY_RANK", "TOY_SIZE")
    starts_ranks = True
    help = "plain processes"
    tool = sys.executable
    library = "gloo"

    def command(self, layout, program):
        return [sys.executable, "-m", __name__, str(layout.num_proc), *program]

    def joins_ranks(self, environ):
        return False

    def step(self, environ):
        return JobStep(f"toy {environ['TOY_STEP']}", self.name, "here", "here", 1, lambda node: "127.0.0.1")


if __name__ == "__main__":
    size, *program = sys.argv[1:]
    common = os.environ | {"TOY_SIZE": size, "TOY_STEP": str(os.getpid())}
    ranks = [subprocess.Popen(program, env=common | {"TOY_RANK": str(rank)}) for rank in range(int(size))]
    sys.exit(max(rank.wait() for rank in ranks))

"""A script on the ranks of a launched world."""

from __future__ import annotations

from pathlib import Path

from hvd_train.launch.start import environment
from tests.ranks.conftest import run_world, world_command

ROOT = Path(__file__).parents[2]


SECONDS = 3600  # of a whole world, on a busy machine; a case has its own limit, which ends a hang


def launch(size: int, launcher: str, program: list[str], folder: Path, seconds: float = SECONDS):
    env = environment() | {"PYTHONPATH": str(ROOT)}
    line = world_command(size, launcher, program)
    return run_world(size, line, cwd=folder, env=env, timeout=seconds)

"""The programs that start ranks, and what Horovod was built with."""

from __future__ import annotations

import functools
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from hvd_train.errors import ConfigError


def find_tool(name: str) -> str | None:
    """Return the path of a program, from this Python's folder or else PATH."""
    # A virtual environment that is not activated is not on PATH.
    in_environment = Path(sys.executable).parent / name
    return str(in_environment) if in_environment.exists() else shutil.which(name)


@functools.cache
def other_mpi(tool: str) -> str:
    """Return whose ``mpirun`` this is if it takes other options than Open MPI's, else ""."""
    try:
        done = subprocess.run([tool, "--version"], capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    names = {"Intel": "Intel MPI", "HYDRA": "MPICH", "MVAPICH": "MVAPICH"}
    return next((name for word, name in names.items() if word in done.stdout + done.stderr), "")


def search_path() -> str:
    """Return PATH, with this Python's folder first if it is not there: ``python`` is then one that has hvd_train."""
    own, path = str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)
    return path if own in path.split(os.pathsep) else os.pathsep.join([own, path])


def find_program(program: Sequence[str]) -> list[str]:
    """Return a command with the path of its program. Raises ConfigError if there is none on ``search_path``."""
    found = shutil.which(program[0], path=search_path())
    if found is None:
        raise ConfigError(
            f"there is no program {program[0]!r}", where=f"host {platform.node()}", fix="give its path, or set PATH"
        )
    return [found, *program[1:]]


def python(module: str) -> list[str]:
    """Return the command ``python -m MODULE``, which imports nothing from the current folder."""
    # Without -P, Python imports from the current folder first, which others may be able to write to.
    return [sys.executable, "-P", "-m", module]


def mpi_built() -> bool:
    """Return whether Horovod speaks MPI."""
    from importlib.util import find_spec

    from hvd_train.engine.library import built, missing_fix, use_stock

    if not use_stock():
        return any(name != "gloo" for name in built())

    # From the linked libraries, because importing Horovod imports a framework, which takes seconds.
    spec = find_spec("horovod")
    if spec is None or spec.origin is None:
        raise ConfigError("Horovod is not installed", fix=missing_fix())
    for library in Path(spec.origin).parent.glob("*/mpi_lib*.so"):
        linked = subprocess.run(["ldd", str(library)], capture_output=True, text=True, check=False).stdout
        return "libmpi" in linked
    return False

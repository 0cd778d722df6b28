"""The programs that start ranks, and what Horovod was built with."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from hvd_train.errors import ConfigError


def find_tool(name: str) -> str | None:
    """Return the path of a program: in the folder of this Python, else on PATH."""
    # A virtual environment need not be active, and then its programs are not on PATH.
    in_environment = Path(sys.executable).parent / name
    return str(in_environment) if in_environment.exists() else shutil.which(name)


def python(module: str) -> list[str]:
    """Return the command ``python -m MODULE``, with the modules of the environment alone."""
    # Without -P, Python takes any module first from the current folder, which others may be able to write to.
    return [sys.executable, "-P", "-m", module]


def mpi_built() -> bool:
    """Return whether Horovod speaks MPI."""
    from importlib.util import find_spec

    # The linked libraries show it. Loading Horovod would load a framework, which takes seconds.
    spec = find_spec("horovod")
    if spec is None or spec.origin is None:
        raise ConfigError("Horovod is not installed", fix="run scripts/setup")
    for library in Path(spec.origin).parent.glob("*/mpi_lib*.so"):
        linked = subprocess.run(["ldd", str(library)], capture_output=True, text=True, check=False).stdout
        return "libmpi" in linked
    return False

"""The programs that start ranks, and what Horovod was built with."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from hvd_train.errors import ConfigError


def find_tool(name: str) -> str | None:
    """Return the path of a program, from this Python's folder or else PATH."""
    # A virtual environment that is not activated is not on PATH.
    in_environment = Path(sys.executable).parent / name
    return str(in_environment) if in_environment.exists() else shutil.which(name)


def python(module: str) -> list[str]:
    """Return the command ``python -m MODULE``, which imports nothing from the current folder."""
    # Without -P, Python imports from the current folder first, which others may be able to write to.
    return [sys.executable, "-P", "-m", module]


def mpi_built() -> bool:
    """Return whether Horovod speaks MPI."""
    from importlib.util import find_spec

    from hvd_train.engine.library import built, use_stock

    if not use_stock():
        return any(name != "gloo" for name in built())

    # From the linked libraries, because importing Horovod imports a framework, which takes seconds.
    spec = find_spec("horovod")
    if spec is None or spec.origin is None:
        raise ConfigError("Horovod is not installed", fix="run scripts/setup")
    for library in Path(spec.origin).parent.glob("*/mpi_lib*.so"):
        linked = subprocess.run(["ldd", str(library)], capture_output=True, text=True, check=False).stdout
        return "libmpi" in linked
    return False

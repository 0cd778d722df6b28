#!/usr/bin/env python3
"""Compiles the engine: python hvd_train/engine/build.py [--mpi MPICC,MPICC,none] [--zig TARGET] [--archive FILE]

Fetches Horovod's pinned source, applies our patch, and compiles ``native`` with it into ``lib``: a file for the MPI of
each mpicc (default: the one on PATH), with ``none`` one for Gloo alone, and TensorFlow's operations, which need neither
TensorFlow nor its headers. What was compiled before lies in the user's cache. ``--zig``: compile for other hosts, here
x86-64 with glibc 2.28 or newer: ``x86_64-linux-gnu.2.28``; needs the package ziglang. ``--archive``: take Horovod's
source from this file, without a network. The C++ compiler is ``CXX`` or c++.

Needs cmake, ninja and patch_ng, but not hvd_train.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
NATIVE, LIB = HERE / "native", HERE / "lib"
MADE_OF = LIB / "sources"  # a digest of what the libraries there were compiled from
VERSION = "0.28.1"
SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"
PATCH = HERE.parents[1] / "scripts" / f"horovod-{VERSION}.patch"
FLAGS = ["-DCMAKE_BUILD_TYPE=Release", "-DCMAKE_POLICY_VERSION_MINIMUM=3.5"]  # of cmake
CXX = shlex.split(os.environ.get("CXX", "")) or ["c++"]
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hvd_train"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mpi", default=shutil.which("mpicc"), metavar="MPICC,...")
    parser.add_argument("--zig", default="", metavar="TARGET")
    parser.add_argument("--source", type=Path, metavar="FOLDER", help="only put the patched source there")
    parser.add_argument("--archive", type=Path, metavar="FILE", help=f"horovod-{VERSION}.tar.gz, already fetched")
    parser.add_argument("--add", action="store_true", help="keep what was compiled for other MPIs")
    missing = "compile what is missing, or was made of other sources, for the mpicc on PATH and for Gloo"
    parser.add_argument("--missing", action="store_true", help=missing)
    options = parser.parse_args()
    if options.source:
        fetch(options.source, options.archive)
        return
    if not shutil.which(CXX[0]):
        what = f"there is no C++ compiler: {CXX[0]} is not on PATH"
        sys.exit(f"error: {what}; install g++ or set CXX, or make a wheel on another host: scripts/wheel -o dist")
    if options.missing:
        if not MADE_OF.is_file() or MADE_OF.read_text() != sources():
            shutil.rmtree(LIB, ignore_errors=True)
        there = {path.stem for path in LIB.glob("*.so")}
        wanted = [] if there & {"openmpi", "mpich"} else [options.mpi or ""]
        wanted += [] if "gloo" in there else ["none"]
        if not wanted:
            return
        options.add, options.mpi = True, ",".join(filter(None, wanted))
    if not options.mpi:
        sys.exit("error: Could NOT find MPI: no mpicc is on PATH")
    mpiccs = ["" if mpicc == "none" else mpicc for mpicc in options.mpi.split(",")]
    folders = [compiled(mpicc, options.zig, options.archive) for mpicc in mpiccs]
    if not options.add:
        shutil.rmtree(LIB, ignore_errors=True)
    LIB.mkdir(exist_ok=True)
    for folder in folders:
        for built in folder.glob("*.so"):
            shutil.copy(built, LIB)
    MADE_OF.write_text(sources())


def compiled(mpicc: str, zig: str, archive: Path | None = None) -> Path:
    """The folder with the library of an MPI, compiled now or before."""
    folder = CACHE / "engine" / key(mpicc, zig)
    if (folder / "done").exists():
        return folder
    with tempfile.TemporaryDirectory(prefix="hvd_train-") as temporary:
        work = Path(temporary)
        source = fetch(work, archive)
        cmake: list[Any] = ["cmake", "-G", "Ninja", "-S", NATIVE, "-B", work / "build", f"-DHOROVOD={source}"]
        cmake += FLAGS
        cmake += ["-DWITH_MPI=ON", f"-DMPI_C_COMPILER={mpicc}"] if mpicc else ["-DWITH_MPI=OFF"]
        cmake += zig_compilers(work, zig) if zig else []
        subprocess.run(cmake, check=True)
        subprocess.run(["ninja", "-C", work / "build", f"-j{jobs()}"], check=True)
        folder.mkdir(parents=True, exist_ok=True)
        for built in (work / "build").glob("engine-*.so"):
            shutil.copy(built, folder / built.name.removeprefix("engine-"))
        compile_operations(folder)
        (folder / "done").touch()
    return folder


def zig_compilers(work: Path, target: str) -> list[str]:
    """Write scripts that call zig as a compiler, as CMake wants one word; return CMake's options for them."""
    options = []
    for language, name in (("C", "cc"), ("CXX", "c++")):
        wrapper = work / name
        wrapper.write_text(f'#!/bin/sh\nexec {sys.executable} -P -m ziglang {name} -target {target} "$@"\n')
        wrapper.chmod(0o755)
        options.append(f"-DCMAKE_{language}_COMPILER={wrapper}")
    return options


def key(mpicc: str, zig: str) -> str:
    """A digest of all that the library depends on."""
    shown = subprocess.run([mpicc, "-show"], capture_output=True, text=True, check=False).stdout if mpicc else ""
    shown = shown.replace(str(Path(mpicc).parent.parent), "")  # another clone's is the same
    compiler = subprocess.run([*CXX, "-dumpversion"], capture_output=True, text=True, check=False).stdout
    system = [platform.machine(), compiler.split(".")[0].strip(), os.confstr("CS_GNU_LIBC_VERSION"), zig]
    return hashlib.sha256(json.dumps([shown, system, sources()]).encode()).hexdigest()[:16]


def sources() -> str:
    """A digest of the sources, the same on any host."""
    texts = [path.read_text() for path in (PATCH, *sorted(NATIVE.iterdir()))]
    return hashlib.sha256(json.dumps([texts, FLAGS, SHA256]).encode()).hexdigest()


def jobs() -> int:
    """How many calls of the compiler run at once: a core and 1.5 GB each."""
    memory_gb = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    fit = max(1, min(len(os.sched_getaffinity(0)), int(memory_gb / 1.5)))
    return int(os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL") or fit)


def fetch(work: Path, given: Path | None = None) -> Path:
    """Horovod's source, unpacked in ``work`` and patched; from the archive ``given``, if any."""
    import patch_ng

    archive = given or CACHE / f"horovod-{VERSION}.tar.gz"
    if not archive.is_file() or hashlib.sha256(archive.read_bytes()).hexdigest() != SHA256:
        if given:
            sys.exit(f"error: {given} is not horovod-{VERSION}.tar.gz with sha256 {SHA256}; fetch that file")
        work.mkdir(parents=True, exist_ok=True)
        (work / "horovod.txt").write_text(f"horovod=={VERSION} --hash=sha256:{SHA256}\n")
        take = ["--no-deps", "--no-binary", "horovod", "--no-build-isolation", "--require-hashes"]
        pip: list[Any] = [sys.executable, "-P", "-m", "pip", "download", "-d", CACHE, *take, "-r", work / "horovod.txt"]
        # Within pip's own build, these variables would tell it to take hvd_train's backend for Horovod.
        env = {name: x for name, x in os.environ.items() if not name.startswith("_PYPROJECT_HOOKS")}
        subprocess.run(pip, check=True, env=env)
    shutil.unpack_archive(archive, work)
    source = work / f"horovod-{VERSION}"
    if not patch_ng.fromfile(str(PATCH)).apply(strip=1, root=str(source)):
        sys.exit(f"error: {PATCH.name} does not fit")
    return source


def compile_operations(into: Path) -> None:
    """Compile TensorFlow's operations, never with zig: they copy a std::function that TensorFlow compiled with GCC."""
    line: list[Any] = [*CXX, "-std=c++17", "-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-s"]
    subprocess.run([*line, NATIVE / "tensorflow_op.cc", "-o", into / "tensorflow.so"], check=True)


if __name__ == "__main__":
    try:
        main()
    except subprocess.CalledProcessError as error:
        sys.exit(error.returncode)

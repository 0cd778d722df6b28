"""Find and load the compiled engine: one library with Open MPI, one with MPICH and one with Gloo alone."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import struct
import sys
from collections.abc import Mapping
from contextlib import suppress
from importlib import metadata
from pathlib import Path

from hvd_train.installation import install_fix

VERSION, MISSING = "0.28.1", "missing"
BINDINGS = (
    "HVD_TRAIN_BINDINGS"  # stock or engine; for scripts that import horovod.torch or horovod.tensorflow themselves
)
FOLDER, CPUINFO = Path(__file__).parent / "lib", Path("/proc/cpuinfo")
TENSORFLOW_OP = FOLDER / "tensorflow.so"
# {library: the file name of the MPI that it was compiled for}; Gloo is in each.
MPI = {"openmpi": "libmpi.so.40", "mpich": "libmpi.so.12", "gloo": ""}


class EngineCall(ctypes.Structure):
    """The struct of this name in native/engine.h."""

    _fields_ = (
        ("collective", ctypes.c_int),
        ("count", ctypes.c_int),
        ("names", ctypes.POINTER(ctypes.c_char_p)),
        ("inputs", ctypes.POINTER(ctypes.c_void_p)),
        ("outputs", ctypes.POINTER(ctypes.c_void_p)),
        ("dims", ctypes.POINTER(ctypes.c_int)),
        ("shapes", ctypes.POINTER(ctypes.c_int64)),
        ("dtype", ctypes.c_int),
        ("reduce_op", ctypes.c_int),
        ("root", ctypes.c_int),
        ("prescale", ctypes.c_double),
        ("postscale", ctypes.c_double),
        ("process_set", ctypes.c_int),
        ("splits", ctypes.POINTER(ctypes.c_int32)),
        ("split_count", ctypes.c_int),
        ("allocate", ctypes.c_void_p),
        ("done", ctypes.c_void_p),
        ("argument", ctypes.c_void_p),
    )


def built() -> list[str]:
    """Return the names of the compiled libraries, those with MPI first."""
    return [name for name in MPI if file_of(name).exists()]


def use_stock(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether Horovod's own bindings are to be used: where the engine is not built, or BINDINGS says so."""
    return environ.get(BINDINGS, "") == "stock" or not built()


def horovod() -> str:
    """Return Horovod's version and bindings, or MISSING."""
    if not use_stock():
        return f"{VERSION}, engine with {', '.join(built())}"
    try:
        return f"{metadata.version('horovod')}, its own bindings"
    except metadata.PackageNotFoundError:
        return MISSING


def missing_fix() -> str:
    """Return what to do if Horovod, or the bindings that the user asks for, are missing."""
    if built() and os.environ.get(BINDINGS) == "stock":
        return f"unset {BINDINGS}, which takes the engine; scripts/setup --bindings both builds Horovod's own bindings"
    return install_fix()


def load(name: str) -> ctypes.CDLL:
    """Load the library ``name`` of ``MPI`` and declare its functions.

    Raises OSError if it or its MPI cannot be loaded.
    """
    if MPI[name]:
        _load_mpi(MPI[name])
    library = ctypes.CDLL(str(file_of(name)))
    library.engine_start.argtypes = [ctypes.POINTER(EngineCall)]
    library.engine_start.restype = ctypes.c_void_p
    library.engine_ended.argtypes = library.engine_free.argtypes = [ctypes.c_void_p]
    library.engine_free.restype = None
    library.engine_wait.argtypes = [ctypes.c_void_p, ctypes.c_double]
    library.engine_output.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int]
    library.engine_error.restype = library.horovod_stall.restype = ctypes.c_char_p
    library.horovod_init.restype = library.horovod_mpi_enabled.restype = ctypes.c_bool
    library.horovod_shutdown.restype = None
    if MPI[name]:
        library.horovod_init_multi_comm.restype = ctypes.c_bool
    return library


HEADER = struct.Struct("<4sB13xH20xQ10xHH")  # of a 64-bit ELF file: magic, bits, machine, sections' offset, size, count


def damage(file: Path) -> str:
    """Return what is wrong with a library's file: loading one that is cut off would kill the process; "" if nothing."""
    try:
        with open(file, "rb") as stream, open(sys.executable, "rb") as python:
            header, own = stream.read(HEADER.size), python.read(HEADER.size)
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    if len(header) < HEADER.size or not header.startswith(b"\x7fELF"):
        return "is damaged: it is no library"
    _, bits, machine, offset, size, count = HEADER.unpack(header)
    if own.startswith(b"\x7fELF") and len(own) == HEADER.size and (bits, machine) != HEADER.unpack(own)[1:3]:
        return "is for another machine"
    return "is damaged: its end is missing" if file.stat().st_size < offset + size * count else ""


def file_of(name: str) -> Path:
    return FOLDER / f"{name}.so"


def _load_mpi(file_name: str) -> None:
    """Load the MPI library that this process has loaded (mpi4py), or that lies beside mpirun, or that the loader finds.

    Global, because Open MPI's plugins look for its functions there.
    """
    with suppress(OSError):
        ctypes.CDLL(file_name, mode=ctypes.RTLD_GLOBAL | os.RTLD_NOLOAD)
        return
    tool = shutil.which("mpirun") or shutil.which("mpiexec")
    homes = [Path(os.path.realpath(tool)).parent.parent] if tool else []
    for home in (*homes, Path(sys.prefix)):  # a package from PyPI puts MPI into the environment
        for part in ("lib", "lib64"):
            if (home / part / file_name).exists():
                # Open MPI from PyPI lies elsewhere than it was built for, and without mpirun does not know where.
                os.environ.setdefault("OPAL_PREFIX", str(home))
                ctypes.CDLL(str(home / part / file_name), mode=ctypes.RTLD_GLOBAL)
                return
    ctypes.CDLL(file_name, mode=ctypes.RTLD_GLOBAL)


def lacking() -> str:
    """Return what the engine needs and this processor lacks, or ""."""
    try:
        found = re.search(r"^flags\s*:(.*)$", CPUINFO.read_text(), re.MULTILINE)
    except OSError:
        return ""
    return ", ".join(one for one in ("avx", "f16c", "fma") if found and one not in found[1].split())


def chosen(environ: Mapping[str, str] = os.environ) -> str:
    """Return the library for this process: that of the MPI which started it, else any, as all have Gloo."""
    names = built()
    hydra = "PMI_RANK" in environ and "OMPI_COMM_WORLD_RANK" not in environ
    wanted = ["mpich", "openmpi"] if hydra else ["openmpi", "mpich"]
    if environ.get("HOROVOD_CONTROLLER") == "gloo":
        wanted = ["gloo", *wanted]
    return next(name for name in (*wanted, "gloo") if name in names)

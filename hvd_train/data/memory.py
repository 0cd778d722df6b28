"""Check free memory before a large allocation."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from hvd_train.errors import DataError

CGROUP = Path("/sys/fs/cgroup")  # the limit of a container or job
SMALL = 64 << 20  # bytes; smaller sizes are not checked


def free() -> int:
    """Return the bytes that this process can still allocate on the host and within its cgroup (container, Slurm)."""
    import psutil

    available = psutil.virtual_memory().available
    with suppress(OSError, ValueError, StopIteration):
        group = next(line.split("::")[1] for line in Path("/proc/self/cgroup").read_text().splitlines() if "::" in line)
        for folder in (CGROUP / group.strip("/"), CGROUP):
            with suppress(OSError, ValueError):  # "max" is not a number
                left = int((folder / "memory.max").read_text()) - int((folder / "memory.current").read_text())
                available = min(available, left + _cached(folder))
    return available


def _cached(folder: Path) -> int:
    """Return the bytes of the page cache that the kernel frees when memory runs short."""
    rows = (line.split() for line in (folder / "memory.stat").read_text().splitlines())
    return sum(int(row[1]) for row in rows if row[0] == "inactive_file")


def check_free(size: int, what: str, where: str, fix: str) -> None:
    """Raise DataError if less than ``size`` bytes, needed for ``what``, are free."""
    if size > SMALL and size > (left := free()):
        raise DataError(f"{what} takes {in_units(size)} of memory, and {in_units(left)} are free", where=where, fix=fix)


def in_units(size: int) -> str:
    return f"{size / 1e9:,.1f} GB" if size >= 1e9 else f"{size / 1e6:,.0f} MB"

"""The energy of this host, as its counters count it: processors and memory (RAPL), NVIDIA GPUs (NVML).

The counters are of the whole host, whoever uses it. RAPL's unit and overflow: Linux, Documentation/power/powercap.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path

POWERCAP = Path("/sys/class/powercap")
NVML = "libnvidia-ml.so.1"
READ_SECONDS = 5.0  # between readings; RAPL overflows after a minute at the earliest
Counters = Mapping[str, Callable[[], int]]  # name: reads microjoules


class Energy:
    """Joules of this host since ``begin``, by source; {} if there is no counter."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._sources: list[_Source] = []
        self._at: float | None = None

    def begin(self) -> None:
        """Begin to count, if it has not begun."""
        if self._at is None:
            self._at = self._clock()
            self._sources = [one for one in (rapl(), nvml()) if one]

    def read(self, last: bool = False) -> dict[str, float]:
        """Return the joules of each source, of a short time ago unless they are the ``last`` ones."""
        if self._at is not None and (last or self._clock() >= self._at + READ_SECONDS):
            self._at = self._clock()
            self._sources = [one for one in self._sources if one.count()]
        return {one.name: round(one.joules, 3) for one in self._sources}


class _Source:
    """Counters of one kind. ``ranges``: of counters that begin again at 0, after so many microjoules."""

    def __init__(self, name: str, counters: Counters, ranges: Mapping[str, int]) -> None:
        self.name, self.joules = name, 0.0
        self._counters, self._ranges = counters, ranges
        self._last = {key: read() for key, read in counters.items()}

    def count(self) -> bool:
        """Add the energy since the last reading. Returns False if it is not known: a counter cannot be read, or has
        begun anew."""
        try:
            now = {key: read() for key, read in self._counters.items()}
        except (OSError, ValueError):
            return False
        used = [
            value - self._last[key] + self._ranges.get(key, 0) * (value < self._last[key]) for key, value in now.items()
        ]
        self._last = now
        self.joules += sum(used) / 1e6
        return min(used) >= 0


def rapl() -> _Source | None:
    """Return the counters of the processors and their memory; None if there are none, or they may not be read."""
    counters, ranges = {}, {}
    with suppress(OSError, ValueError):
        for zone in sorted(POWERCAP.glob("intel-rapl:*")):  # AMD's, too
            name = (zone / "name").read_text().strip()
            if name.startswith("package") or name == "dram":  # others are parts of a package, or hold all packages
                counters[zone.name] = _reader(zone / "energy_uj")
                ranges[zone.name] = int((zone / "max_energy_range_uj").read_text())
        return _Source("RAPL", counters, ranges) if counters else None
    return None


def _reader(file: Path) -> Callable[[], int]:
    return lambda: int(file.read_text())


def nvml() -> _Source | None:
    """Return the energy counters of all NVIDIA GPUs; None if there are none. GPUs before Volta have no counter."""
    try:
        library = ctypes.CDLL(NVML)
    except OSError:
        return None
    count, counters = ctypes.c_uint(), {}
    with suppress(OSError, AttributeError):
        _check(library.nvmlInit_v2())
        _check(library.nvmlDeviceGetCount_v2(ctypes.byref(count)))
        for index in range(count.value):
            device = ctypes.c_void_p()
            _check(library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device)))
            counters[str(index)] = _gpu_reader(library, device)
        return _Source("NVML", counters, {}) if counters else None
    return None


def _gpu_reader(library: ctypes.CDLL, device: ctypes.c_void_p) -> Callable[[], int]:
    def read() -> int:
        millijoules = ctypes.c_ulonglong()
        _check(library.nvmlDeviceGetTotalEnergyConsumption(device, ctypes.byref(millijoules)))
        return 1000 * millijoules.value

    return read


def _check(code: int) -> None:
    if code:
        raise OSError(code, "NVML")


def of_hosts(hosts: Iterable[str], energies: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return the joules of all hosts by source, from those of each rank; only sources that every host has."""
    first: dict[str, Mapping[str, float]] = {}
    for host, energy in zip(hosts, energies, strict=True):
        first.setdefault(host, energy)
    common = set.intersection(*map(set, first.values())) if first else set()
    return {name: sum(one[name] for one in first.values()) for name in sorted(common)}

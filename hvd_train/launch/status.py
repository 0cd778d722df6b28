"""The status of the ranks of a host: the phase and step of each one, and how it ended.

The table is in memory of the process that started the ranks, which open it through /proc. So no file is left after a
kill, and a report costs one write to memory. Each rank has a slot: [pid, step, phase, bytes of the record, number of
reports, descriptor of its stack], then the record, JSON. On the signal ``ASK`` a rank writes its stack into a memory
file of its own. After the slots comes one for news to all ranks (``launch/heartbeat.py``).
"""

from __future__ import annotations

import faulthandler
import fcntl
import json
import mmap
import os
import platform
import signal
import struct
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VARIABLE = "HVD_TRAIN_BOARD"  # the path, set for the ranks
# Set by -np over hosts: the path of a table without ranks, only for news, and the host that it is on.
VERDICT = "HVD_TRAIN_VERDICT"
SLOT_BYTES = 16 << 10
HEAD = struct.Struct("<qqqqqq")
ASK = signal.SIGUSR2
PHASES = ("starting", "training", "evaluation", "saving", "script", "exchange")
SCRIPT, EXCHANGE = PHASES[4:]  # of a user's script: computing, or in a collective, which waits for all ranks


def supported() -> bool:
    """Return whether this kernel has pidfds (Linux 5.3)."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):
        return False
    return True


def host_key() -> str:
    """Return a key of this host's namespaces: ranks with the same key share process ids and ports."""
    with suppress(OSError):
        spaces = [os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "net")]
        return " ".join([Path("/proc/sys/kernel/random/boot_id").read_text().strip(), *spaces])
    return f"{platform.node()} {os.getpid()}"


def verdict_path() -> str:
    """Return the path of the news for the process that started the ranks, "" if it is on another host."""
    path, _, host = os.environ.get(VERDICT, "").partition(" ")
    return path if host == host_key() else ""


def announce_met() -> None:
    """Tell the process that started the ranks that all have connected. Called by rank 0."""
    path = verdict_path()
    if path:
        with suppress(OSError):
            StatusTable(0, path).publish({"met": True})


@dataclass(frozen=True)
class RankStatus:
    """The status of one rank. ``record`` is {} until the rank ends by itself. ``stack`` is the file that holds its
    stack after a request, "" if none can be requested."""

    pid: int
    step: int
    phase: str
    record: dict[str, Any]
    beats: int
    stack: str

    @property
    def place(self) -> str:
        return f"in {self.phase}, step {self.step}" if self.phase != PHASES[0] else "while it started"


class StatusTable:
    """The status of all ranks of a host, created by the process that started them; ``path`` opens an existing one."""

    def __init__(self, ranks: int, path: str = "") -> None:
        self._descriptor = (
            os.open(path, os.O_RDWR | os.O_CLOEXEC)
            if path
            else os.memfd_create("hvd-train-status", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        )
        if not path:
            os.ftruncate(self._descriptor, (ranks + 1) * SLOT_BYTES)
        self._memory = mmap.mmap(self._descriptor, (ranks + 1) * SLOT_BYTES)
        self.path, self.ranks = path or f"/proc/{os.getpid()}/fd/{self._descriptor}", ranks
        self.open: dict[int, int] = {}  # {rank: its pidfd}, which unlike a pid is never reused
        self.gone: set[int] = set()

    def __enter__(self) -> StatusTable:
        return self

    def __exit__(self, *error: object) -> None:
        for descriptor in self.open.values():
            os.close(descriptor)
        self._memory.close()
        os.close(self._descriptor)

    def read(self, rank: int) -> RankStatus:
        pid, step, phase, length, beats, stack = HEAD.unpack_from(self._memory, rank * SLOT_BYTES)
        start = rank * SLOT_BYTES + HEAD.size
        record: dict[str, Any] = {}
        with suppress(ValueError):  # the rank was killed while it wrote
            record = json.loads(self._memory[start : start + length]) if length else {}
        return RankStatus(pid, step, PHASES[phase], record, beats, f"/proc/{pid}/fd/{stack}" if stack >= 0 else "")

    def refresh(self) -> None:
        """Open new ranks, and collect those that started and ended since the last call."""
        for rank in range(self.ranks):
            pid = self.read(rank).pid
            if pid and rank not in self.open and rank not in self.gone:
                try:
                    self.open[rank] = os.pidfd_open(pid)
                except ProcessLookupError:
                    self.gone.add(rank)

    def publish(self, news: dict[str, Any]) -> None:
        """Publish news to all readers. Only one process of a host may call this."""
        content, start = json.dumps(news).encode()[: SLOT_BYTES - 8], self.ranks * SLOT_BYTES
        # A reader may see a partial write: JSON that does not parse counts as no news.
        self._memory[start : start + 8 + len(content)] = struct.pack("<q", len(content)) + content

    def news(self) -> dict[str, Any]:
        """Return the last published news; {} during a write."""
        start = self.ranks * SLOT_BYTES
        (length,) = struct.unpack_from("<q", self._memory, start)
        with suppress(ValueError):
            news = json.loads(self._memory[start + 8 : start + 8 + length]) if length else {}
            return news if isinstance(news, dict) else {}
        return {}

    def claim(self) -> bool:
        """Return True only to the first caller of all processes."""
        # A memory file can be sealed only once, so the seal is a lock that leaves no file behind.
        try:
            fcntl.fcntl(self._descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL)
        except PermissionError:
            return False
        return True

    def claimed(self) -> bool:
        return bool(fcntl.fcntl(self._descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SEAL)

    def signal(self, number: int) -> None:
        for descriptor in self.open.values():
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(descriptor, number)

    def request_stacks(self) -> None:
        """Request the stacks of all ranks that have reported and can answer."""
        self.refresh()
        for rank, descriptor in self.open.items():
            if self.read(rank).stack:
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(descriptor, ASK)


class StatusSlot:
    """The slot of the table into which one rank writes its status."""

    def __init__(self, path: str, rank: int) -> None:
        self.owner = int(path.split("/")[2])
        with open(path, "r+b") as stream:
            self._memory = mmap.mmap(stream.fileno(), 0)
        self._start = rank * SLOT_BYTES
        self._pid, self._place, self._beats = os.getpid(), (0, 0), 0
        self._inside, self._lock = 0, threading.Lock()
        self._stack = -1
        # A user's script may handle this signal itself. Then this rank's stacks cannot be requested.
        if signal.getsignal(ASK) is signal.SIG_DFL:
            self._stack = os.memfd_create("hvd-train-stack")
            # faulthandler writes from C within the signal handler, so it works while Python is blocked.
            faulthandler.register(ASK, file=self._stack, all_threads=True)
        self._write(0)

    @classmethod
    def of(cls, rank: int) -> StatusSlot | None:
        """Return the slot of this rank, or None if no process reads it."""
        # Removed, because children of this process are not ranks.
        path = os.environ.pop(VARIABLE, "")
        try:
            return cls(path, rank) if path else None
        except OSError:  # a kernel that isolates processes
            return None

    def _write(self, length: int) -> None:
        self._beats += 1
        HEAD.pack_into(self._memory, self._start, self._pid, *self._place, length, self._beats, self._stack)

    def at(self, phase: str, step: int) -> None:
        self._place = step, PHASES.index(phase)
        self._write(0)

    def __enter__(self) -> StatusSlot:
        """Report that a script enters a collective, perhaps within another."""
        with self._lock:
            self._inside += 1
            if self._inside == 1:
                self.at(EXCHANGE, 0)
        return self

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                self.at(SCRIPT, 0)

    def report_end(self, record: dict[str, Any]) -> None:
        """Write the last record, with the time of a clock that all processes of this host share."""
        content = json.dumps({"time": time.monotonic(), **record}).encode()[: SLOT_BYTES - HEAD.size]
        start = self._start + HEAD.size
        # Record first, then length, so that a reader in between sees no record.
        self._memory[start : start + len(content)] = content
        self._write(len(content))

"""What the ranks of ``-np`` tell the process that started them: where each one is, and what it ended with.

A piece of memory of that process, which ranks of this host open through /proc: no file is left whoever is killed, and
telling costs a write to memory. Each rank has a page: [pid, step, phase, bytes of the record, how often it has told,
descriptor of its stack], then the record, JSON. Asked with ``ASK`` it writes its stack into memory of its own. Behind
the pages is one for news to all ranks (``launch/heartbeat.py``).
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
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VARIABLE = "HVD_TRAIN_BOARD"  # the path, set for the ranks
# Set by -np over hosts: the path of a status without ranks, for news alone, and the host on which it is one.
VERDICT = "HVD_TRAIN_VERDICT"
PAGE = 16 << 10
HEAD = struct.Struct("<qqqqqq")
ASK = signal.SIGUSR2
PHASES = ("starting", "training", "evaluation", "saving", "script", "exchange")
SCRIPT, EXCHANGE = PHASES[4:]  # of a script of the user's own: by itself, or in what ends when all ranks come


def supported() -> bool:
    """Whether this kernel hands out descriptors of processes (Linux 5.3)."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):
        return False
    return True


def host_key() -> str:
    """Within which a pid means one process, and a port one listener."""
    with suppress(OSError):
        spaces = [os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "net")]
        return " ".join([Path("/proc/sys/kernel/random/boot_id").read_text().strip(), *spaces])
    return f"{platform.node()} {os.getpid()}"


def verdict_path(environ: Mapping[str, str] = os.environ) -> str:
    """Where the process that started the ranks, if that is on this host, looks for news."""
    path, _, host = environ.get(VERDICT, "").partition(" ")
    return path if host == host_key() else ""


def announce_met() -> None:
    """Rank 0 lets the process that started the ranks know that they have met."""
    path = verdict_path()
    if path:
        with suppress(OSError):
            Board(0, path).publish({"met": True})


@dataclass(frozen=True)
class Told:
    """A rank's page. ``record``: {} until it ends by itself; ``stack``: the file that holds it once it was asked, "" of
    one that cannot be asked."""

    pid: int
    step: int
    phase: str
    record: dict[str, Any]
    beats: int
    stack: str

    @property
    def place(self) -> str:
        return f"in {self.phase}, step {self.step}" if self.phase != PHASES[0] else "while it started"


class Board:
    """The owner's side: ``with Board(ranks) as board``; with ``path`` that of another reader."""

    def __init__(self, ranks: int, path: str = "") -> None:
        self._descriptor = (
            os.open(path, os.O_RDWR | os.O_CLOEXEC)
            if path
            else os.memfd_create("hvd-train-board", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        )
        if not path:
            os.ftruncate(self._descriptor, (ranks + 1) * PAGE)
        self._memory = mmap.mmap(self._descriptor, (ranks + 1) * PAGE)
        self.path, self.ranks = path or f"/proc/{os.getpid()}/fd/{self._descriptor}", ranks
        self.open: dict[int, int] = {}  # rank: a descriptor of its process, which no other process can take over
        self.gone: set[int] = set()

    def __enter__(self) -> Board:
        return self

    def __exit__(self, *error: object) -> None:
        for descriptor in self.open.values():
            os.close(descriptor)
        self._memory.close()
        os.close(self._descriptor)

    def read(self, rank: int) -> Told:
        pid, step, phase, length, beats, stack = HEAD.unpack_from(self._memory, rank * PAGE)
        start = rank * PAGE + HEAD.size
        record: dict[str, Any] = {}
        with suppress(ValueError):  # the process was killed while it wrote
            record = json.loads(self._memory[start : start + length]) if length else {}
        return Told(pid, step, PHASES[phase], record, beats, f"/proc/{pid}/fd/{stack}" if stack >= 0 else "")

    def look(self) -> None:
        """Takes note of ranks that are new, and of those that came and went between two looks."""
        for rank in range(self.ranks):
            pid = self.read(rank).pid
            if pid and rank not in self.open and rank not in self.gone:
                try:
                    self.open[rank] = os.pidfd_open(pid)
                except ProcessLookupError:
                    self.gone.add(rank)

    def publish(self, news: dict[str, Any]) -> None:
        """Let all readers know: from one process of a host."""
        content, start = json.dumps(news).encode()[: PAGE - 8], self.ranks * PAGE
        self._memory[start : start + 8 + len(content)] = struct.pack("<q", len(content)) + content

    def news(self) -> dict[str, Any]:
        """What was published last; {} while it is being written."""
        start = self.ranks * PAGE
        (length,) = struct.unpack_from("<q", self._memory, start)
        with suppress(ValueError):
            news = json.loads(self._memory[start + 8 : start + 8 + length]) if length else {}
            return news if isinstance(news, dict) else {}
        return {}

    def claim(self) -> bool:
        """True once, for the first of all its readers."""
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

    def ask(self) -> None:
        """For the stacks of all ranks that have told where they are, and can answer."""
        self.look()
        for rank, descriptor in self.open.items():
            if self.read(rank).stack:
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(descriptor, ASK)


class Page:
    """A rank's side; ``Page.of(rank)`` is None where nobody reads."""

    def __init__(self, path: str, rank: int) -> None:
        self.owner = int(path.split("/")[2])
        with open(path, "r+b") as stream:
            self._memory = mmap.mmap(stream.fileno(), 0)
        self._start = rank * PAGE
        self._pid, self._place, self._beats = os.getpid(), (0, 0), 0
        self._inside, self._lock = 0, threading.Lock()
        self._stack = -1
        if signal.getsignal(ASK) is signal.SIG_DFL:  # a script may have put something there
            self._stack = os.memfd_create("hvd-train-stack")
            faulthandler.register(ASK, file=self._stack, all_threads=True)  # in C, whatever Python does
        self._write(0)

    @classmethod
    def of(cls, rank: int) -> Page | None:
        path = os.environ.pop(VARIABLE, "")  # what this process starts is no rank
        try:
            return cls(path, rank) if path else None
        except OSError:  # a kernel that keeps processes apart
            return None

    def _write(self, length: int) -> None:
        self._beats += 1
        HEAD.pack_into(self._memory, self._start, self._pid, *self._place, length, self._beats, self._stack)

    def at(self, phase: str, step: int) -> None:
        self._place = step, PHASES.index(phase)
        self._write(0)

    def __enter__(self) -> Page:
        """A script begins an exchange, perhaps within another."""
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

    def end(self, record: dict[str, Any]) -> None:
        """The last word, with the time on a clock that all processes of this host share."""
        content = json.dumps({"time": time.monotonic(), **record}).encode()[: PAGE - HEAD.size]
        start = self._start + HEAD.size
        self._memory[start : start + len(content)] = content
        self._write(len(content))

"""The lock of a run folder, so that only one process writes to it.

The lock is a file that names its holder, created by a hard link, which is atomic on NFS as well. A dead holder's lock
is taken over: on the same host at once, from another host (or after a reboot) once it has not been touched for
``OLD_SECONDS`` by the file system's clock. A holder that was only suspended notices (``check``) before it saves again.
"""

from __future__ import annotations

import errno
import os
import platform
import secrets
import signal
import threading
import time
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hvd_train import files
from hvd_train.errors import CheckpointError

NAME, MAX_BYTES = "lock", 1 << 16
BEAT_SECONDS, OLD_SECONDS = 30.0, 600.0
NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
Text = Annotated[str, Field(max_length=200)]


class Holder(BaseModel):
    """The process that holds a lock.

    ``place``: boot id and pid namespace, within which a pid is unique. ``ticks``: start time of the process since boot,
    immune to clock changes. ``job``: Slurm's job id and restart count.
    """

    model_config = ConfigDict(strict=True, frozen=True)
    token: Annotated[str, Field(pattern="^[0-9a-f]{16}$")] = "0" * 16
    host: Text = "an unknown host"
    place: Text = ""
    pid: Annotated[int, Field(ge=0, le=1 << 31)] = 0
    ticks: Annotated[int, Field(ge=0, le=1 << 62)] = 0
    since: Text = "an unknown time"
    job: Text = ""

    def __str__(self) -> str:
        text = f"process {self.pid} on {self.host}, since {self.since}"
        return "".join(c if c.isprintable() else "?" for c in text)


def _place() -> str:
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    return platform.node()


def _job() -> str:
    number, restarts = os.environ.get("SLURM_JOB_ID"), os.environ.get("SLURM_RESTART_COUNT", "0")
    return f"{number} {restarts}" if number else ""


def ticks(pid: int) -> int | None:
    """Return the start time of a process, or None. The bracketed name may hold any character (proc(5))."""
    try:
        state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (OSError, ValueError):
        return None
    return None if state in "ZX" else int(rest[18])


class Lock:
    """``with Lock(run_dir):`` takes it, or raises an error that names the holder. ``fix``: what to do then.

    Removes the folders that it created if nothing else was written there.
    """

    def __init__(self, run_dir: Path, fix: str = "wait for its end, or take another --run-dir") -> None:
        self.path, self._fix = run_dir / NAME, fix
        since = datetime.now().astimezone().isoformat(" ", "seconds")
        token, pid = secrets.token_hex(8), os.getpid()
        place = {"host": platform.node(), "place": _place()}
        self._holder = Holder(token=token, pid=pid, ticks=ticks(pid) or 0, since=since, job=_job(), **place)
        self._made: list[Path] = []  # folders
        self._ended = threading.Event()
        self._before: Any = None

    def __enter__(self) -> Lock:
        run_dir = self.path.parent
        try:
            self._made = [p for p in (run_dir, *run_dir.parents) if not p.exists()]
            run_dir.mkdir(parents=True, exist_ok=True)
            ticket = self._ticket()
            try:
                other = self._take(self.path, ticket)
            finally:
                ticket.unlink(missing_ok=True)
        except OSError as error:
            self._leave_no_folder()
            raise CheckpointError(f"the run folder cannot be written: {error.strerror}", where=str(run_dir)) from error
        if other is not None:
            raise _in_use(self.path, other, self._fix)
        threading.Thread(target=self._beat, name="lock", daemon=True).start()
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            self._before = signal.signal(signal.SIGTERM, self._terminated)  # a scheduler may restart us elsewhere
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)

    def check(self) -> None:
        """Raise if another process has taken over the lock, or it was removed."""
        try:
            holder = _read(self.path)
        except OSError:  # too many open files, or a network file system that does not answer: no sign of another holder
            return
        if holder is None:
            name, gone = "the run folder's lock", self.path
            if not self.path.parent.exists():
                name, gone = "the run folder", self.path.parent
            what = f"{name} was removed while the run wrote to it"
            raise CheckpointError(what, where=str(gone), fix="nothing more was written; start the run again")
        if holder.token != self._holder.token:
            what = f"the run folder was taken over by {holder}: this process made no progress for a long time"
            raise CheckpointError(what, where=str(self.path.parent), fix="nothing more was written; end one of the two")

    def _ticket(self) -> Path:
        """Write the lock's content to a unique name. Its time is the file system's."""
        ticket = self.path.with_name(f"{NAME}.{self._holder.token}")
        files.write(ticket, [self._holder.model_dump_json().encode()])
        return ticket

    def _take(self, path: Path, ticket: Path) -> Holder | None:
        """Take the lock ``path``. Returns None, or its current holder.

        A dead lock may be replaced only by the holder of its gate, a second lock, so that one of two takers wins. The
        gate's holder may have died, too.
        """
        while True:
            if self._made_by_us(path, ticket):
                return None
            holder = _read(path)
            if holder is None:  # released just now
                continue
            if not _dead(holder, path, ticket):
                return holder
            gate = path.with_name(f"{NAME}.after-{holder.token}")
            other = self._take(gate, ticket)
            if other is not None:
                return other
            try:
                current = _read(path)  # the gate's previous holder may have replaced the lock
                if current is not None and current.token == holder.token:
                    files.put(path, self._holder.model_dump_json().encode())
            finally:
                gate.unlink(missing_ok=True)

    def _made_by_us(self, path: Path, ticket: Path) -> bool:
        try:
            os.link(ticket, path)
            return True
        except OSError as error:
            if error.errno in NO_LINKS:  # without hard links: exclusive creation; the content follows a moment later
                with suppress(FileExistsError), open(path, "x", encoding="utf-8") as stream:
                    stream.write(self._holder.model_dump_json())
                    return True
            elif error.errno != errno.EEXIST:
                raise
        holder = _read(path)  # over NFS the link may exist although the reply was lost
        return holder is not None and holder.token == self._holder.token

    def _beat(self) -> None:
        while not self._ended.wait(BEAT_SECONDS):
            with suppress(OSError):
                holder = _read(self.path)
                # Its age shows other hosts that this process is alive.
                if holder is not None and holder.token == self._holder.token:
                    os.utime(self.path)

    def release(self) -> None:
        """Release the lock for a process that ends within the ``with`` block. Waits a few seconds at most."""
        self._ended.set()
        files.within(self._release, files.ANSWER_SECONDS)  # otherwise the error line might not be printed

    def _release(self) -> None:
        with suppress(OSError):
            holder = _read(self.path)
            # Another process may have taken over the lock meanwhile.
            if holder is not None and holder.token == self._holder.token:
                self.path.unlink()
        self._leave_no_folder()

    def _leave_no_folder(self) -> None:
        for folder in self._made:
            with suppress(OSError):
                folder.rmdir()

    def _terminated(self, number: int, frame: object) -> None:
        self.release()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


def _read(path: Path) -> Holder | None:
    """Read a lock. Returns None if there is none, an unknown holder if it cannot be parsed. Raises OSError."""
    try:
        return Holder.model_validate_json(files.content(path, MAX_BYTES))
    except FileNotFoundError:
        return None
    except ValidationError:
        return Holder()


def _dead(holder: Holder, path: Path, ticket: Path) -> bool:
    if holder.place == _place():  # same host and boot, so the process table tells
        return ticks(holder.pid) != holder.ticks
    if holder.job and holder.job != _job() and holder.job.split()[0] == _job().partition(" ")[0]:
        return True  # Slurm restarted this job, perhaps on other hosts: its earlier processes have ended
    try:
        # Both times come from the file system, because the clocks of two hosts may differ.
        os.utime(ticket)
        return ticket.stat().st_mtime - path.stat().st_mtime > OLD_SECONDS
    except FileNotFoundError:
        return False


def state(run_dir: Path) -> str:
    """Return whether a run folder is ``free``, ``held``, or its holder ``dead``. Writes nothing.

    A holder on another host counts as dead when it has not touched its lock for ``OLD_SECONDS``.
    """
    path = run_dir / NAME
    try:
        holder = _read(path)
        if holder is None:
            return "free"
        if holder.place == _place():
            return "held" if ticks(holder.pid) == holder.ticks else "dead"
        # The clocks of two hosts may differ by minutes.
        return "held" if time.time() - path.stat().st_mtime < 2 * OLD_SECONDS else "dead"
    except FileNotFoundError:
        return "free"
    except OSError:  # a network file system that does not answer
        return "held"


def _in_use(path: Path, holder: Holder, fix: str) -> CheckpointError:
    minutes = round(OLD_SECONDS / 60)
    if holder.place != _place():  # its process is not visible from here
        fix += f"; if it is gone: remove {path}, or try again {minutes} minutes after its end"
    return CheckpointError(f"the run folder is in use by {holder}", where=str(path.parent), fix=fix)

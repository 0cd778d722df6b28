"""The lock of a run folder: one process writes in it at a time.

The lock is a file with the writer's name: made whole by a hard link, which is atomic on NFS as well. A dead writer's
lock is taken over: at once where its process was on this host and is gone; of another host (or a host that was started
anew) when nobody has touched it for ``OLD_SECONDS``, measured by the file system's own clock. A writer that was only
suspended finds out (``check``) before it saves again.
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

    ``place``: boot and process namespace, within which a pid means one process; ``ticks``: when that process began,
    counted from boot, which no change of the clock moves; ``job``: Slurm's, and how often it was started again.
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
    """Return the start time of a process, or None without one. proc(5): the name in brackets may hold anything."""
    try:
        state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (OSError, ValueError):
        return None
    return None if state in "ZX" else int(rest[18])


class Lock:
    """``with Lock(run_dir):`` takes it, or raises an error that names the holder.

    It leaves no trace where nothing else was written.
    """

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / NAME
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
            raise _in_use(self.path, other)
        threading.Thread(target=self._beat, name="lock", daemon=True).start()
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            self._before = signal.signal(signal.SIGTERM, self._terminated)  # a scheduler may start us elsewhere at once
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)

    def check(self) -> None:
        """Raise where another process has taken the lock over, or somebody removed it."""
        try:
            holder = _read(self.path)
        except OSError:  # too many open files, a network file system that does not answer: nobody else has shown up
            return
        if holder is None:
            name, gone = "the run folder's lock", self.path
            if not self.path.parent.exists():
                name, gone = "the run folder", self.path.parent
            what = f"{name} was removed while the run wrote to it"
            raise CheckpointError(what, where=str(gone), fix="nothing more was written; start the run again")
        if holder.token != self._holder.token:
            what = f"the run folder was taken over by {holder}: this process did not move for long"
            raise CheckpointError(what, where=str(self.path.parent), fix="nothing more was written; end one of the two")

    def _ticket(self) -> Path:
        """Write the lock's content under a name that nobody else uses; its time is the file system's."""
        ticket = self.path.with_name(f"{NAME}.{self._holder.token}")
        files.write(ticket, [self._holder.model_dump_json().encode()])
        return ticket

    def _take(self, path: Path, ticket: Path) -> Holder | None:
        """Take ``path``; return None, or the one who has it.

        Only who holds the gate named after a dead lock may replace that lock, so that of two takers one wins. A gate
        is a lock as well, whose taker may have died.
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
                current = _read(path)  # the gate was another's until now, who may have replaced the lock
                if current is not None and current.token == holder.token:
                    files.put(path, self._holder.model_dump_json().encode())
            finally:
                gate.unlink(missing_ok=True)

    def _made_by_us(self, path: Path, ticket: Path) -> bool:
        try:
            os.link(ticket, path)
            return True
        except OSError as error:
            if error.errno in NO_LINKS:  # then an exclusive creation, whose content comes a moment later
                with suppress(FileExistsError), open(path, "x", encoding="utf-8") as stream:
                    stream.write(self._holder.model_dump_json())
                    return True
            elif error.errno != errno.EEXIST:
                raise
        holder = _read(path)  # over NFS a link may be there although its answer was lost
        return holder is not None and holder.token == self._holder.token

    def _beat(self) -> None:
        while not self._ended.wait(BEAT_SECONDS):
            with suppress(OSError):
                holder = _read(self.path)
                # Its age tells other hosts that this process lives.
                if holder is not None and holder.token == self._holder.token:
                    os.utime(self.path)

    def release(self) -> None:
        """Release the lock, for a process that ends before its ``with``. Waits for seconds at most."""
        self._ended.set()
        files.within(self._release, files.ANSWER_SECONDS)  # else the line that says why a run ends might not be printed

    def _release(self) -> None:
        with suppress(OSError):
            holder = _read(self.path)
            # Another process may have taken it over meanwhile.
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
    """Read a lock; None: there is none. One that cannot be parsed has an unknown holder; raises OSError."""
    try:
        return Holder.model_validate_json(files.content(path, MAX_BYTES))
    except FileNotFoundError:
        return None
    except ValidationError:
        return Holder()


def _dead(holder: Holder, path: Path, ticket: Path) -> bool:
    if holder.place == _place():  # the same boot of the same host: its table of processes knows
        return ticks(holder.pid) != holder.ticks
    if holder.job and holder.job != _job() and holder.job.split()[0] == _job().partition(" ")[0]:
        return True  # Slurm started this job again, perhaps on other hosts: what it ran before has ended
    try:
        # Both times are of the file system: the clocks of two hosts may differ.
        os.utime(ticket)
        return ticket.stat().st_mtime - path.stat().st_mtime > OLD_SECONDS
    except FileNotFoundError:
        return False


def state(run_dir: Path) -> str:
    """Return whether a run folder is ``free``, ``held``, or its holder ``dead``; nothing is written.

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


def _in_use(path: Path, holder: Holder) -> CheckpointError:
    minutes = round(OLD_SECONDS / 60)
    fix = "wait for its end, or take another --run-dir"
    if holder.place != _place():  # whether it lives cannot be seen from here
        fix += f"; if it is gone: remove {path}, or try again {minutes} minutes after its end"
    return CheckpointError(f"the run folder is in use by {holder}", where=str(path.parent), fix=fix)

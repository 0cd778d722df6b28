"""Write files that are complete or absent, also after a kill or a power cut: under a temporary name, then renamed."""

from __future__ import annotations

import errno
import io
import os
import secrets
import stat
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Self

LEFT = ".tmp"  # suffix of an unfinished file, which a killed process leaves behind
ANSWER_SECONDS = 5.0  # for a file server, when a process must exit
PART_BYTES = 256 << 20  # between two flushes to the disk

_late: list[threading.Thread] = []


class Patience:
    """A timeout in seconds (0: none) without progress."""

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._last = self._looked = time.monotonic()

    def moved(self) -> None:
        self._last = time.monotonic()

    def over(self) -> bool:
        """Return whether there was no progress for longer than the limit. Call it several times within the limit."""
        now, before = time.monotonic(), self._looked
        self._looked = now
        if now - before > self._limit / 2:  # this process itself was stopped, with all its threads
            self.moved()
        return bool(self._limit) and now - self._last > self._limit


def within(work: Callable[[], object], seconds: float) -> bool:
    """Do work that may wait for a file server forever; return whether it finished in time."""
    thread = threading.Thread(target=work, name="within", daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        _late.append(thread)
    return not thread.is_alive()


def hanging() -> bool:
    """Return whether work that ``within`` has given up is still waiting."""
    return any(thread.is_alive() for thread in _late)


class AtomicFile:
    """A file that is written in any order under a temporary name, and renamed to ``path`` by ``close``.

    If that fails, or with ``discard``, nothing is left of it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}{LEFT}")
        self.stream = open(self._temporary, "xb")  # noqa: SIM115

    def close(self) -> None:
        try:
            # In this order: otherwise the rename may reach the disk first, and a power cut leaves an empty file.
            self.stream.flush()
            os.fsync(self.stream.fileno())
            self.stream.close()
            os.replace(self._temporary, self.path)
            sync(self.path.parent)
        except BaseException:
            self.discard()
            raise

    def discard(self) -> None:
        with suppress(OSError):  # a full disk rejects what is still buffered
            self.stream.close()
        self._temporary.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *rest: object) -> None:
        self.discard() if kind else self.close()


def put(path: Path, content: bytes) -> None:
    """Replace ``path`` by a file with this content. If it raises OSError, the old file is unchanged."""
    with AtomicFile(path) as file:
        file.stream.write(content)


def write(path: Path, pieces: Iterable[bytes | memoryview]) -> None:
    """Write a new file, which is on the disk when this returns. If it raises OSError, nothing is left of it.

    It is flushed part by part. Otherwise the kernel would buffer a whole file, and whoever watches the pieces being
    consumed could not see that a disk no longer responds.
    """
    waiting = 0
    stream = open(path, "xb")  # noqa: SIM115
    try:
        with stream:
            for piece in pieces:
                waiting += stream.write(piece)
                if waiting >= PART_BYTES:
                    stream.flush()
                    os.fdatasync(stream.fileno())
                    waiting = 0
            stream.flush()
            os.fsync(stream.fileno())
    except BaseException:
        with suppress(OSError):
            path.unlink()
        raise


def opened(path: Path, most: int | None = None) -> io.BufferedReader:
    """Open a regular file of at most ``most`` bytes for reading. Raises OSError for anything else.

    Another user's folder must not be trusted: opening a pipe would block forever, and a device has no end.
    """
    # Check twice: opening a device may have effects, and the path may be another file by then.
    _check_plain(path, os.stat(path), most)
    stream = open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC), "rb")  # noqa: SIM115
    try:
        _check_plain(path, os.fstat(stream.fileno()), most)
    except OSError:
        stream.close()
        raise
    return stream


def content(path: Path, most: int | None = None) -> bytes:
    """Return the bytes of a regular file, opened by ``opened``."""
    with opened(path, most) as stream:
        return stream.read()


def _check_plain(path: Path, status: os.stat_result, most: int | None) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "it is no plain file", str(path))
    if most is not None and status.st_size > most:
        raise OSError(errno.EFBIG, f"it has {status.st_size:,} bytes; {most:,} are the most", str(path))


def appended(path: Path) -> io.FileIO:
    """Open a file for appending, unbuffered; create it if missing. Raises OSError for a link, or a pipe without a
    reader."""
    if path.is_symlink():
        raise OSError(errno.ELOOP, f"{path.name} is a symbolic link", str(path))
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    return open(os.open(path, flags, 0o666), "ab", buffering=0)


def ours_alone(paths: Iterable[Path]) -> bool:
    """Return whether all of these belong to this user and only the user can write them; never true for links."""
    try:
        statuses = [path.lstat() for path in paths]
    except OSError:
        return False
    user = os.geteuid()
    return all(not stat.S_ISLNK(x.st_mode) and x.st_uid == user and not x.st_mode & 0o022 for x in statuses)


def sync(folder: Path) -> None:
    """Flush a folder to the disk, with the renames in it."""
    # A rename changes the folder. Without this a power cut may lose it, although the file's content is safe.
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

"""Files that are whole or not there, also after a kill or a power cut: written aside, then renamed."""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Self

LEFT = ".tmp"  # how the name of a file ends that is not finished: a killed process leaves it
PART_BYTES = 256 << 20


class Aside:
    """A file that is written in any order, beside ``path``, and takes its place with ``close``; where that fails, or
    with ``forget``, nothing of it is left."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}{LEFT}")
        self.stream = open(self._temporary, "xb")  # noqa: SIM115

    def close(self) -> None:
        try:
            self.stream.flush()
            os.fsync(self.stream.fileno())
            self.stream.close()
            os.replace(self._temporary, self.path)
            sync(self.path.parent)
        except BaseException:
            self.forget()
            raise

    def forget(self) -> None:
        with suppress(OSError):  # a full disk refuses what is still in memory
            self.stream.close()
        self._temporary.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *rest: object) -> None:
        self.forget() if kind else self.close()


def put(path: Path, content: bytes) -> None:
    """``path`` with this content, in place of what was there. Raises OSError, and then leaves nothing behind."""
    with Aside(path) as file:
        file.stream.write(content)


def write(path: Path, pieces: Iterable[bytes | memoryview]) -> None:
    """A new file, which is on the disk when this returns, and part by part before: each piece asked for tells that the
    disk answers, however much memory the kernel would take first."""
    waiting = 0
    with open(path, "xb") as stream:
        for piece in pieces:
            waiting += stream.write(piece)
            if waiting >= PART_BYTES:
                stream.flush()
                os.fdatasync(stream.fileno())
                waiting = 0
        stream.flush()
        os.fsync(stream.fileno())


def ours_alone(paths: Iterable[Path]) -> bool:
    """Return whether all of these belong to this user and nobody else can write them. A link counts as foreign."""
    try:
        found = [path.lstat() for path in paths]
    except OSError:
        return False
    user = os.geteuid()
    return all(not stat.S_ISLNK(x.st_mode) and x.st_uid == user and not x.st_mode & 0o022 for x in found)


def sync(folder: Path) -> None:
    """Flush a folder to the disk, with the renames in it."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

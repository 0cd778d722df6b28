"""Files that are whole or not there, also after a kill or a power cut: written aside, then renamed."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable
from pathlib import Path

PART_BYTES = 256 << 20


def put(path: Path, content: bytes) -> None:
    """``path`` with this content, in place of what was there. Raises OSError, and then leaves nothing behind."""
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        write(temporary, [content])
        os.replace(temporary, path)
        sync(path.parent)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


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


def sync(folder: Path) -> None:
    """What was renamed in it is on the disk when this returns."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

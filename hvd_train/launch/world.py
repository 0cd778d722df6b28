"""The rank of a process and the size of its job."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class World:
    """The rank of this process and the sizes of its job. ``launcher`` is empty for a process that was started alone."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    launcher: str = ""

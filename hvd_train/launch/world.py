"""The place of a process among the ranks of a job."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class World:
    """The place of this process among the ranks. ``launcher`` is empty for a process that was started alone."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    launcher: str = ""

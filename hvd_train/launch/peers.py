"""Ranks of one host that watch one another, where no ``-np`` does: under a launcher alone, and in own scripts.

The first few look at all from a thread of their own, without Horovod, whose own look waits for a rank that is stopped.
"""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from hvd_train.launch.board import Board, Page, supported
from hvd_train.launch.watchdog import ANSWER_SECONDS, Watchdog

if TYPE_CHECKING:
    from hvd_train.protocol import Communicator

LOOK_SECONDS, LOOKERS = 0.5, 4


def watch(communicator: Communicator, limit: float, goes_on: str = "") -> Page | None:
    """To be called on all ranks: from here on they end with code 5 where one of them is stuck for ``limit`` seconds (0:
    never). What this rank tells of its place goes to the page; None: nobody on this host reads it. ``goes_on``: how the
    job does after that."""
    hosts = communicator.allgather_bytes(_host().encode(), "hosts")
    company = [rank for rank, host in enumerate(hosts) if host == hosts[communicator.rank]]
    alone = len(company) == 1 or not limit or not supported()
    first = company[0] == communicator.rank
    board = Board(len(company)) if first and not alone else None
    paths = communicator.allgather_bytes((board.path if board else "").encode(), "boards")
    path = paths[company[0]].decode()
    if alone or not path:
        return None
    try:
        page = Page(path, company.index(communicator.rank))
        board = board or Board(len(company), path)
    except OSError:  # a kernel that keeps processes apart
        return None
    _companies.append((board, company))
    if company.index(communicator.rank) < LOOKERS:
        given = [board, company, limit, goes_on]
        threading.Thread(target=_look, args=given, name="watchdog", daemon=True).start()
    return page


_companies: list[tuple[Board, list[int]]] = []  # the ranks of each


def told() -> bool:
    """Whether a rank of this host has told which one is stuck, and ends all with that."""
    return any(board.claimed() for board, _ in _companies)


def left() -> list[int]:
    """Ranks of this host that have come to the end of their script by themselves."""
    ended = [(rank, board.read(place).record) for board, ranks in _companies for place, rank in enumerate(ranks)]
    return [rank for rank, record in ended if record.get("code") == 0]


def _look(board: Board, company: list[int], limit: float, goes_on: str) -> None:
    watchdog = Watchdog(board, limit)
    while not watchdog.look():
        time.sleep(LOOK_SECONDS)
    stuck = {company[place]: told for place, told in watchdog.stuck.items()}
    culprit = min(stuck)
    what, stack = stuck[culprit]
    where = f"; {board.read(company.index(culprit)).place}; {goes_on}" if goes_on else ""
    if board.claim():
        with suppress(OSError):
            os.write(2, "\n".join([f"error[rank {culprit}]: {what}{where}", *stack.splitlines(), ""]).encode())
    else:
        time.sleep(ANSWER_SECONDS)  # a launcher ends all with the first, and another is writing
    os._exit(5)


def _host() -> str:
    """Within which a pid means one process."""
    with suppress(OSError):
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    return f"{os.getpid()}"

"""Inject faults, for tests and ``scripts/torture``: ``HVD_TRAIN_FAULT=POINT:RANK:NTH:ACTION``, separated by commas.

``save:0:2:kill`` kills rank 0 when it reaches the point ``save`` for the second time. ``step:1:40:delay`` slows rank 1
down from its 40th step on. Without the variable, a point only iterates over an empty list.
"""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Callable
from typing import NoReturn

from hvd_train.errors import ConfigError

VARIABLE = "HVD_TRAIN_FAULT"
# start: before the first step; step: after each; evaluation: between two batches. When saving: before it, before the
# lock is read, before each file, before the manifest, before the rename that commits it, after that. remove: before a
# checkpoint is removed.
POINTS = ("start", "step", "evaluation", "save", "check", "write", "manifest", "rename", "commit", "remove")

DELAY_SECONDS = 0.05
_planned: list[tuple[str, int, Callable[[], None]]] = []  # (point, remaining visits, action)


def _fail(number: int) -> NoReturn:
    raise OSError(number, os.strerror(number))


def _raise() -> NoReturn:
    raise RuntimeError(f"a fault on purpose ({VARIABLE})")


def _hang() -> NoReturn:
    while True:
        time.sleep(0.1)


def _delay() -> None:
    time.sleep(DELAY_SECONDS)


ACTIONS: dict[str, Callable[[], None]] = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "leave": lambda: os._exit(0),
    "raise": _raise,
    "hang": _hang,
    "delay": _delay,
    "enospc": lambda: _fail(errno.ENOSPC),
    "eio": lambda: _fail(errno.EIO),
}


def arm(rank: int) -> None:
    """Read the faults of this rank. The variable is removed, so that child processes have none."""
    _planned.clear()
    for text in filter(None, os.environ.pop(VARIABLE, "").split(",")):
        point, _, rest = text.partition(":")
        whom, nth, action = [*rest.split(":"), "", "", ""][:3]
        if point not in POINTS or action not in ACTIONS or not (whom.isdecimal() and nth.isdecimal()):
            fix = f"POINT:RANK:NTH:ACTION of {', '.join(POINTS)} and {', '.join(ACTIONS)}"
            raise ConfigError(f"{text!r} is no fault", where=VARIABLE, fix=fix)
        if int(whom) == rank:
            _planned.append((point, int(nth), ACTIONS[action]))


def at(point: str) -> None:
    """Reach a point: run the actions that are due there."""
    # The counts go down to 1 at the n-th time, and below for a delay, which lasts.
    for k, (planned, times, action) in enumerate(_planned):
        if planned == point:
            _planned[k] = planned, times - 1, action
            if times == 1 or (times < 1 and action is _delay):  # a slow rank stays slow
                action()

"""What ``hvd_train.torch`` and ``hvd_train.keras`` share: a script of the user's own as one rank of a world."""

from __future__ import annotations

import atexit
import functools
import importlib
import os
import sys
from types import TracebackType

from hvd_train.errors import ConfigError, TrainError
from hvd_train.frontends.serial import Serial
from hvd_train.launch import leave
from hvd_train.launch.environment import rank_settings, threads, world
from hvd_train.protocol import Communicator

COMMUNICATORS = {"pytorch": "hvd_train.frontends.pt", "tensorflow": "hvd_train.frontends.tf"}


@functools.cache
def open_world(framework: str) -> Communicator:
    """The world that a launcher started, opened once a process; a script started alone is a world of one.

    From here on a rank whose script ends with an exception ends at once, so that no other rank waits for it, and the
    user's own mistakes are told in a line.
    """
    if _opened:  # Horovod is opened once a process, by one framework
        what = f"this process trains with {_opened[0]} already"
        raise ConfigError(what, where=f"hvd_train: {framework}", fix="use one framework in a script")
    here = world()
    count = threads("auto", here)
    for name, value in rank_settings(here, framework, count, verbose=True).items():
        os.environ.setdefault(name, value)
    sys.excepthook = _end
    module = importlib.import_module(COMMUNICATORS[framework])
    communicator = module.horovod(here.size) if here.size > 1 else Serial()
    communicator.open()
    atexit.register(communicator.close)  # no barrier: a rank that leaves early must not wait for the others
    _opened.append(framework)
    return communicator


_opened: list[str] = []


def _end(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if not world().launcher and not isinstance(error, TrainError):
        sys.__excepthook__(kind, error, trace)
        return
    if isinstance(error, KeyboardInterrupt):
        leave.leave(130)
    leave.leave_with(error)

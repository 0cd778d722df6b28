"""What ``hvd_train.torch`` and ``hvd_train.keras`` share: a script of the user's own as one rank of a world."""

from __future__ import annotations

import atexit
import functools
import json
import os
import re
import sys
from contextlib import suppress
from types import TracebackType
from typing import Any, cast

from hvd_train.config import load_config
from hvd_train.config.keys import ExchangeConfig
from hvd_train.errors import ConfigError, EndedRankError, LostRankError, TrainError
from hvd_train.frontends.horovod import HorovodCommunicator
from hvd_train.frontends.rank import settle
from hvd_train.launch import peers
from hvd_train.launch.board import SCRIPT
from hvd_train.launch.environment import STALL, world
from hvd_train.launch.exit import exit_rank, exit_with_error, rank_tag
from hvd_train.launch.launchers.base import World
from hvd_train.launch.watchdog import VARIABLE
from hvd_train.protocol import Communicator, Handle, Tensor


def place() -> World:
    """This process' place, as its launcher says it, before the world is opened. A mistake is told in a line."""
    sys.excepthook = _end
    return world()


@functools.cache
def open_world(framework: str) -> Communicator:
    """The world that a launcher started, opened once a process; a script started alone is a world of one.

    From here on a rank whose script ends with an exception ends at once, so that no other rank waits for it, and the
    user's own mistakes are told in a line.
    """
    if _opened:  # Horovod is opened once a process, by one framework
        what = f"this process trains with {_opened[0][0]} already"
        raise ConfigError(what, where=f"hvd_train: {framework}", fix="use one framework in a script")
    sys.excepthook = _end
    communicator = settle(framework, verbose=True).communicator()
    communicator.open()
    if communicator.size > 1:
        page = peers.watch(communicator, _watchdog_s())
        if page:
            page.at(SCRIPT, 0)
            opened = cast(HorovodCommunicator, communicator)
            opened.page, opened.left = page, peers.left
    _opened.append((framework, communicator))
    atexit.register(_close)
    return communicator


def _watchdog_s() -> float:
    given = os.environ.get(VARIABLE) or os.environ.get(STALL, "600")  # who lets Horovod wait for longer means it
    with suppress(ValueError):
        return float(given)
    raise ConfigError(f"{given!r} is no number of seconds", where=VARIABLE)


_opened: list[tuple[str, Communicator]] = []


def _close() -> None:
    """No barrier: a rank that leaves early must not wait for the others. A script that caught the loss of a rank has
    not trained to its end, whatever it says."""
    ((_, communicator),) = _opened
    failure = communicator.failure()
    if failure is not None:
        exit_with_error(failure)
    page = getattr(communicator, "page", None)
    if page:
        page.end({"code": 0})  # others may wait for this rank
    communicator.close()


def exchange_options(where: str, compression: str, options: dict[str, Any], overlap: bool | str = "auto") -> Any:
    """The configuration's section ``exchange``, checked as the command line checks it."""
    unknown = [name for name in options if name not in ("ratio", "exact", "threshold", "rank")]
    if unknown or compression == "auto":
        fit_only = "compression='auto'" if not unknown else ", ".join(unknown)
        known = not unknown or all(name in ExchangeConfig.model_fields for name in unknown)
        what = f"{fit_only}: for hvd-train fit alone" if known else f"unknown option {fit_only}"
        fix = "of exchange, it takes compression with ratio, exact, threshold or rank, and overlap"
        raise ConfigError(what, where=where, fix=fix)
    given = {"compression": compression, "overlap": overlap, **options}
    try:
        return load_config(None, [f"exchange.{name}={json.dumps(value)}" for name, value in given.items()]).exchange
    except ConfigError as error:
        raise ConfigError(re.sub(r"--set \S+: exchange\.", "", error.what), where=where) from error


def _end(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if not rank_tag() and not isinstance(error, TrainError):
        sys.__excepthook__(kind, error, trace)
        return
    if isinstance(error, KeyboardInterrupt):
        exit_rank(130)
    told = isinstance(error, EndedRankError | LostRankError)  # which say what this rank did
    exit_with_error(error if told or not _opened else _opened[0][1].failure(error) or error)


class Named:
    """The world under names of one model's own, so that the transfers of two models never meet."""

    def __init__(self, communicator: Communicator, number: int) -> None:
        self._communicator, self._number = communicator, number
        self.synchronize = communicator.synchronize

    def allreduce_async(self, x: Tensor, name: str, op: str = "sum") -> Handle:
        return self._communicator.allreduce_async(x, f"model{self._number}.{name}", op)

    def allgather_async(self, x: Tensor, name: str) -> Handle:
        return self._communicator.allgather_async(x, f"model{self._number}.{name}")

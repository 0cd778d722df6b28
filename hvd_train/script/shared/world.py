"""A user's script as one rank: its session, and the handling of errors that end it."""

from __future__ import annotations

import atexit
import json
import os
import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, cast

from hvd_train.compression.table import COMPRESSORS
from hvd_train.config import ExchangeConfig, load_config
from hvd_train.config.modes import ALLREDUCE, MODES
from hvd_train.config.names import did_you_mean
from hvd_train.errors import CommunicationError, ConfigError, EndedRankError, LostRankError, TrainError
from hvd_train.frontends.horovod import HorovodCommunicator
from hvd_train.launch import peers
from hvd_train.launch.environment import STALL, world
from hvd_train.launch.failed_rank import exit_rank, exit_with_error, rank_tag
from hvd_train.launch.status import SCRIPT
from hvd_train.launch.watchdog import VARIABLE
from hvd_train.launch.world import World
from hvd_train.protocol import Communicator, Handle, Tensor
from hvd_train.script.shared import weight_check
from hvd_train.session import Session

_sessions: list[Session] = []  # at most one
COMPRESSOR_OPTIONS = tuple(option for one in COMPRESSORS.values() for option in one.options)
# The modes for scripts, and the keys of ``exchange`` for each.
MODE_OPTIONS = {mode: one.scripts for mode, one in MODES.items() if one.scripts is not None}


def launched_world() -> World:
    """Return rank and size from the launcher's environment, without opening the session; errors become single lines."""
    sys.excepthook = _end
    return world()


def open_session(framework: str, session: Session | None = None, stages: int = 1) -> Session:
    """Open the session of this process, once; a script without a launcher is a world of one.

    From here on an uncaught exception ends the rank at once, so that no other rank waits for it, and user errors are
    printed as a single line. ``session``: a prepared session to open. ``stages``: of a pipeline.
    """
    if not _sessions:
        sys.excepthook = _end
        session = session or Session.prepare(framework, verbose=True, user_process=True)
        communicator = session.open(stages=stages)
        # A single process cannot hang in a transfer.
        slot = session.watch(_watchdog_s()) if communicator.size > 1 else None
        if slot:
            slot.at(SCRIPT, 0)
            horovod = cast(HorovodCommunicator, communicator)
            horovod.slot, horovod.left = slot, peers.left
        _sessions.append(session)
        atexit.register(_close)
    if _sessions[0].framework != framework:  # Horovod can be opened once per process, by one framework
        what = f"this process trains with {_sessions[0].framework} already"
        raise ConfigError(what, where=f"hvd_train: {framework}", fix="use one framework in a script")
    links = _sessions[0].links
    if (links.size if links else 1) != stages:
        what = "the ranks of this process are connected already, for another number of stages"
        raise ConfigError(what, where=f"parallel.pipeline: {stages}", fix="use one number of stages in a script")
    return _sessions[0]


def _watchdog_s() -> float:
    seconds = os.environ.get(VARIABLE) or os.environ.get(STALL, "600")  # a longer Horovod timeout applies here, too
    with suppress(ValueError):
        return float(seconds)
    raise ConfigError(f"{seconds!r} is not a number of seconds", where=VARIABLE)


def _close() -> None:
    """Close the session without a barrier: a rank that ends early must not wait for the others.

    A script that caught the loss of a rank still ends with that error.
    """
    communicator = _sessions[0].communicator
    failure = communicator.failure()
    if failure is not None:
        exit_with_error(failure)
    slot = getattr(communicator, "slot", None)
    if slot:
        weights = weight_check.at_exit()
        slot.report_end({"code": 0, "weights": weights})  # other ranks may wait for this one
        try:
            weight_check.compare_at_exit(weights, {k: x.get("weights", {}) for k, x in peers.ended().items()})
        except CommunicationError as error:
            exit_with_error(error)
    communicator.close()


def exchange_options(
    where: str, compression: str, options: dict[str, Any], overlap: bool | str = "auto", mode: str = ALLREDUCE
) -> Any:
    """Build the configuration's section ``exchange``, with the same checks as on the command line."""
    if mode not in MODE_OPTIONS:
        known = mode in MODES
        what = f"mode={mode!r} works only with hvd-train fit" if known else f"mode: {did_you_mean(mode, MODE_OPTIONS)}"
        raise ConfigError(what, where=where, fix=f"a script takes one of {', '.join(MODE_OPTIONS)}")
    unknown = [name for name in options if name not in (*COMPRESSOR_OPTIONS, *MODE_OPTIONS[mode])]
    if unknown or compression == "auto":
        fit_only = "compression='auto'" if not unknown else ", ".join(unknown)
        known = not unknown or all(name in ExchangeConfig.model_fields for name in unknown)
        what = f"{fit_only}: only with hvd-train fit" if known else f"unknown option {fit_only}"
        *first, last = COMPRESSOR_OPTIONS
        modes = [f"mode={one!r} with {', '.join(names)}" for one, names in MODE_OPTIONS.items() if names]
        fix = f"a script takes compression with {', '.join(first)} or {last}, overlap, and {', '.join(modes)}"
        raise ConfigError(what, where=where, fix=fix)
    values = {"compression": compression, "overlap": overlap, "mode": mode, **options}
    try:
        # load_config has the types, ranges and messages of these keys.
        return load_config(None, [f"exchange.{name}={json.dumps(value)}" for name, value in values.items()]).exchange
    except ConfigError as error:
        raise ConfigError(re.sub(r"--set \S+: exchange\.", "", error.what), where=where) from error


def _end(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if not rank_tag() and not isinstance(error, TrainError):
        sys.__excepthook__(kind, error, trace)
        return
    if isinstance(error, KeyboardInterrupt):
        exit_rank(130)
    # The communicator knows whether a Horovod error means that another rank was lost.
    known = isinstance(error, EndedRankError | LostRankError)  # these already say what happened
    exit_with_error(error if known or not _sessions else _sessions[0].communicator.failure(error) or error)


class NamedTransfers:
    """A communicator for one model: it prefixes the names of transfers with the model's number."""

    def __init__(self, communicator: Communicator, number: int) -> None:
        self._communicator, self._number, self.size = communicator, number, communicator.size
        self.synchronize = communicator.synchronize

    def allreduce_async(self, x: Tensor, name: str, op: str = "sum") -> Handle:
        return self._communicator.allreduce_async(x, f"model{self._number}.{name}", op)

    def allgather_async(self, x: Tensor, name: str) -> Handle:
        return self._communicator.allgather_async(x, f"model{self._number}.{name}")

    def alltoall_async(self, x: Tensor, sizes: Sequence[int], name: str) -> Handle:
        return self._communicator.alltoall_async(x, sizes, f"model{self._number}.{name}")

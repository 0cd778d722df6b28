"""Requests to stop (a signal, the end of a batch job), and the sync at which all ranks agree on them, at one step."""

from __future__ import annotations

import json
import math
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # a rank listens before it loads anything
    from hvd_train.protocol import Communicator

SECONDS, MOST_SECONDS = 0.25, 2.5  # between two syncs; horovodrun leaves 5 seconds between a signal and the end
MPI_SECONDS = 1.0  # at most, where mpirun leaves one
SHARE = 0.0025  # of the time, which syncs may take: one costs 0.3 ms, in TensorFlow 1.5 over MPI and 5 over Gloo
REPORT_BYTES = 256  # at least: Horovod knows a transfer of the same length again, and asks no rank about it


class StopSource:
    """A source of requests to stop. This one never asks; ``launch.signals`` has one that listens to signals."""

    asked = 0  # the number of the first signal; 0: none
    job_end: float | None = None  # seconds since 1970, when the time of the batch job is over
    begun = False  # there is something to save
    ended = False  # training is over, and no signal matters any more

    def at(self, phase: str, step: int) -> None:
        """Report what this rank does now. No-op here."""


class ControlSync:
    """Decides after which turns of a loop (steps, batches) the ranks exchange reports, the same turns on all ranks.

    Two syncs are about ``SECONDS`` apart by the clock of rank 0: the first after one turn, then after at most twice as
    many turns each time. While something else travels, which a sync would have to wait for, it is put off: until
    ``MOST_SECONDS`` have passed.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._turns = self._left = 1
        self._more = 0  # turns for which a sync may be put off
        self._cost = 0.0  # seconds of the fastest sync so far: the slower ones waited for a rank
        self._since = time.monotonic()

    def begin(self) -> None:
        """Begin the loop, or go on after something else: the clock leaves out what was between."""
        self._turns, self._since = self._left, time.monotonic()

    def due(self, in_flight: bool = False) -> bool:
        """Return whether the ranks sync now. Called after each turn, on all ranks.

        ``in_flight``: whether something else travels, the same on all ranks.
        """
        self._left -= 1
        return self._left <= (-self._more if in_flight else 0)

    def sync(self, report: Any) -> list[Any]:
        """Exchange what every rank reports, in rank order. Called on all ranks where it is ``due``, or sooner."""
        turns = self._turns - self._left
        began = time.monotonic()
        seconds = (began - self._since) / max(turns, 1)  # of a turn
        text = json.dumps([seconds, self._cost, report]).ljust(REPORT_BYTES)
        parts = self._communicator.allgather_bytes(text.encode(), "meeting")
        self._cost = min(self._cost or math.inf, time.monotonic() - began)
        rows = [json.loads(part) for part in parts]
        if turns:
            # Rank 0's times, not this rank's: the number of turns must be the same everywhere, or the ranks hang.
            seconds, cost, _ = rows[0]
            most = min(MOST_SECONDS, MPI_SECONDS) if self._communicator.mpi else MOST_SECONDS
            span = min(max(SECONDS, cost / SHARE), most)
            self._turns = self._left = max(1, min(2 * self._turns, round(span / max(seconds, 1e-9))))
            self._more = max(0, int(most / max(seconds, 1e-9)) - self._turns)
            self._since = time.monotonic()
        return [report for *_, report in rows]

"""Requests to stop (a signal, the end of a batch job), and the sync at which all ranks agree on them at the same
step."""

from __future__ import annotations

import json
import math
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # imported before anything else by a rank that listens to signals
    from hvd_train.protocol import Communicator

SECONDS, MOST_SECONDS = 0.25, 2.5  # between syncs; horovodrun kills ranks 5 seconds after a signal
MPI_SECONDS = 1.0  # at most; mpirun kills ranks after one
SHARE = 0.0025  # share of the time for syncs: one costs 0.3 ms, in TensorFlow 1.5 over MPI and 5 over Gloo
REPORT_BYTES = 768  # minimum size: Horovod caches transfers of the same length, and skips the negotiation


class StopSource:
    """A source of requests to stop. This one never requests; ``launch.signals`` has one for signals."""

    asked = 0  # the number of the first signal; 0: none
    job_end: float | None = None  # end of the batch job's time, in seconds since 1970
    begun = False  # there is something to save
    ended = False  # training is over, and signals are ignored

    def at(self, phase: str, step: int) -> None:
        """Report this rank's phase and step. No-op here."""


class ControlSync:
    """Decides after which iterations of a loop (steps, batches) all ranks exchange reports.

    Syncs are about ``SECONDS`` apart by rank 0's clock. The first comes after one iteration, and each interval at most
    doubles. A sync that would have to wait for a transfer in flight is postponed, up to ``MOST_SECONDS``.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._turns = self._left = 1  # iterations of an interval; those of it that are left
        self._timed = 0  # iterations since ``_since``
        self._more = 0  # iterations by which a sync may be postponed
        self._cost = 0.0  # seconds of the fastest sync so far: the slower ones waited for a rank
        self._since = time.monotonic()

    @property
    def fastest(self) -> float:
        """Return the seconds of the fastest sync so far on this rank: what a transfer of few bytes takes."""
        return self._cost

    def begin(self) -> None:
        """Begin the loop, or continue it after an interruption whose time does not count."""
        self._timed, self._since = 0, time.monotonic()

    def due(self, in_flight: bool = False) -> bool:
        """Return whether the ranks sync now. Called after each iteration, on all ranks.

        ``in_flight``: whether another transfer is in flight, the same on all ranks.
        """
        self._left -= 1
        self._timed += 1
        return self._left <= (-self._more if in_flight else 0)

    def sync(self, report: Any) -> list[Any]:
        """Exchange the reports of all ranks, in rank order. Called on all ranks when ``due``, or earlier.

        The interval goes on if it is not over: at a log line after each step it would never end.
        """
        began = time.monotonic()
        seconds = (began - self._since) / max(self._timed, 1)  # of an iteration
        text = json.dumps([seconds, self._cost, report]).ljust(REPORT_BYTES)
        parts = self._communicator.allgather_bytes(text.encode(), "sync")
        self._cost = min(self._cost or math.inf, time.monotonic() - began)
        rows = [json.loads(part) for part in parts]
        if self._left <= 0:
            # Rank 0's times, not this rank's: the interval must be the same on all ranks, or they hang.
            seconds, cost, _ = rows[0]
            most = min(MOST_SECONDS, MPI_SECONDS) if self._communicator.mpi else MOST_SECONDS
            span = min(max(SECONDS, cost / SHARE), most)
            self._turns = self._left = max(1, min(2 * self._turns, round(span / max(seconds, 1e-9))))
            self._more = max(0, int(most / max(seconds, 1e-9)) - self._turns)
            self.begin()
        return [report for *_, report in rows]

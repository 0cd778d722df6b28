"""Calls to trackers. A tracker that raises or hangs is disabled, and never blocks a step."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Mapping
from typing import Any

from hvd_train.config.trackers import TrackerSpec
from hvd_train.run_folder.trackers.tracker import TrackedRun, Tracker

WAITING = 10_000  # queued calls for a tracker that hangs
END_SECONDS, ABANDON_SECONDS = 120.0, 3.0  # at the end of a finished run, and of one that stopped


class Calls:
    """Synchronous calls to one tracker. ``failure``: why it is disabled, "" if it is not."""

    def __init__(self, name: str, row: TrackerSpec, run: TrackedRun) -> None:
        self.name, self.failure = name, ""
        self._row, self._run, self._tracker = row, run, Tracker(run)
        self._do("__init__")

    def call(self, method: str, *args: Any) -> None:
        if not self.failure:
            self._do(method, *args)

    def wait(self, until: float) -> None:
        """Wait for the calls to finish, at most until the time ``until``."""

    def _do(self, method: str, *args: Any) -> None:
        try:
            if method == "__init__":
                self._tracker = self._row.tracker_class(self._run)
            else:
                getattr(self._tracker, method)(*args)
        except (Exception, SystemExit) as error:  # a library may call sys.exit() on its own failure
            self.failure = f"{type(error).__name__}: {error}".splitlines()[0]


class CallsInThread(Calls):
    """Calls in a thread, because a server that does not answer can block a call for minutes."""

    def __init__(self, name: str, row: TrackerSpec, run: TrackedRun) -> None:
        self.name, self.failure = name, ""
        self._row, self._run, self._tracker = row, run, Tracker(run)
        self._calls: queue.Queue[tuple[Any, ...]] = queue.Queue(WAITING)
        self._thread = threading.Thread(target=self._work, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        self._do("__init__")
        method = ""
        while not self.failure and method != "close":
            method, *args = self._calls.get()
            self._do(method, *args)

    def call(self, method: str, *args: Any) -> None:
        try:
            if not self.failure:
                self._calls.put_nowait((method, *args))
        except queue.Full:
            self.failure = f"it has not processed the last {WAITING:,} lines"

    def wait(self, until: float) -> None:
        self._thread.join(max(until - time.monotonic(), 0))
        if self._thread.is_alive() and not self.failure:
            self.failure = "it does not finish"


class Trackers:
    """All trackers of a run. Nothing is opened before ``begin``."""

    def __init__(self, rows: Mapping[str, TrackerSpec], run: TrackedRun) -> None:
        self._rows, self._run = rows, run
        self._calls: list[Calls] = []
        self._ended = False

    def begin(self) -> None:
        kinds = {name: CallsInThread if row.thread else Calls for name, row in self._rows.items()}
        self._calls = [kinds[name](name, row, self._run) for name, row in self._rows.items()]

    def row(self, row: Mapping[str, Any]) -> None:
        for one in self._calls:
            one.call("row", row)

    def scalars(self, epoch: int, step: int, values: Mapping[str, float]) -> None:
        for one in self._calls:
            one.call("scalars", epoch, step, dict(values))

    def end(self, finished: bool, summary: Mapping[str, Any]) -> None:
        """Close all trackers. A second call does nothing."""
        if self._ended:
            return
        self._ended = True
        for one in self._calls:
            one.call("close", finished, dict(summary))
        until = time.monotonic() + (END_SECONDS if finished else ABANDON_SECONDS)
        for one in self._calls:
            one.wait(until)

    def failures(self) -> list[str]:
        """Return a line for each tracker that failed, and was disabled, since the last call."""
        failed = [one for one in self._calls if one.failure]
        self._calls = [one for one in self._calls if not one.failure]
        ending = "training goes on without it, and metrics.jsonl has all numbers"
        return [f"{one.name} is disabled: {one.failure}; loggers: {one.name}; {ending}" for one in failed]

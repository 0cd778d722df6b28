"""Run a launcher: start it, forward signals, watch its ranks, and end all its processes.

The launcher leads its own session (``start_new_session``). A Ctrl-C in the terminal then reaches only this process,
which decides where to forward it, and all that is left of the session can be found and ended.
"""

from __future__ import annotations

import ctypes
import io
import math
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import IO, TYPE_CHECKING, Any

from hvd_train.errors import TrainError
from hvd_train.launch.launchers import NONE
from hvd_train.launch.launchers.base import Launcher
from hvd_train.launch.status import StatusTable
from hvd_train.launch.watchdog import Watchdog

if TYPE_CHECKING:
    import psutil


GRACE_SECONDS = 8.0  # for a launcher to end its ranks after SIGTERM; horovodrun gives them 5
PATIENCE = 5.0  # for a launcher to end all ranks after one is gone; mpirun takes 1 or 2, a rank with an error 3
REPORTED_SECONDS = 20.0  # for a rank to end after it has reported its failure: it may wait 15 s for another's line
SAVED = (0, 75, 130)  # exit codes of ranks that may wait for MPI's shutdown
# A rank without a report for this long after its end was killed. The others know no better cause, so they are killed at
# once; mpirun would take a second or more.
SILENCE = 0.25
LOOK_MS, CLOSE_MS = 100, 20  # between polls: in normal operation, and after a rank has ended
PR_SET_PDEATHSIG = 1


def run(
    line: Sequence[str],
    env: Mapping[str, str],
    launcher: Launcher = NONE,
    table: StatusTable | None = None,
    watchdog: Watchdog | None = None,
    look: Callable[[StatusTable], None] | None = None,
    wait: Callable[[subprocess.Popen], object] = subprocess.Popen.wait,
) -> tuple[int, list[int], dict[int, float]]:
    """Start the launcher with the command ``line``, and wait until it and all its processes have ended.

    Returns the exit code (128 + N if signal N killed it, -1 if it had to be killed), the signals received meanwhile,
    and when each rank ended.

    Without a ``table`` signals are forwarded to the launcher. With one they are forwarded to the ranks. When a rank
    fails, the others have ``PATIENCE`` seconds to end; when the ``watchdog`` finds one stuck, all are ended. Without a
    table ``wait`` waits for the launcher.
    """
    forwarding = _Forwarding(launcher, table)
    child: subprocess.Popen | None = None
    ended: dict[int, float] = {}
    hung, failures = False, list[TrainError]()
    forwarding.begin()
    try:
        out, err = (None if os.isatty(number) else subprocess.PIPE for number in (1, 2))
        child = subprocess.Popen(
            line, env=env, start_new_session=True, preexec_fn=end_with_parent, stdout=out, stderr=err
        )
        pumps = _pumps(child, failures)
        forwarding.attach(child)
        if table:
            ended = _watch(child, launcher, table, watchdog, look)
            hung = child.poll() is None
        else:
            wait(child)
    finally:
        forwarding.end()
        if child is not None:
            _end(child, table)
    code = child.wait()
    for pump in pumps:
        pump.join(GRACE_SECONDS)
    if failures and not code:
        raise failures[0]
    return -1 if hung else code if code >= 0 else 128 - code, forwarding.received, ended


class _Forwarding:
    """Forwards signals from this process to the launcher, or to the ranks of ``table``."""

    def __init__(self, launcher: Launcher, table: StatusTable | None) -> None:
        self._launcher, self._table = launcher, table
        self._child: subprocess.Popen | None = None
        self._previous: dict[int, Any] = {}
        self.received: list[int] = []

    def begin(self) -> None:
        """Install the signal handlers, before the child starts: a signal in between must not end this process alone."""
        if threading.current_thread() is not threading.main_thread():
            return
        closed = () if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (signal.SIGHUP,)  # nohup
        signals = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, *closed)
        self._previous = {number: signal.signal(number, self._forward) for number in signals}
        self._previous[signal.SIGTSTP] = signal.signal(signal.SIGTSTP, self._suspend)

    def attach(self, child: subprocess.Popen) -> None:
        """Forward signals to the launcher ``child`` from now on, and the one that came before it started."""
        self._child = child
        if self.received:
            child.terminate() if self._table else self._send(child, self.received[0])

    def end(self) -> None:
        """Restore the previous signal handlers."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _forward(self, number: int, frame: object) -> None:
        self.received.append(number)
        if self._child is None or self._child.poll() is not None:
            return
        if self._table is None:
            self._send(self._child, number)
            return
        self._table.refresh()
        self._table.signal(number)
        if len(self.received) > 1 or len(self._table.open) < self._table.ranks:  # the first step is far away
            self._child.terminate()

    def _suspend(self, number: int, frame: object) -> None:
        """Suspend the ranks and this process (Ctrl-Z), and resume the ranks when it resumes (``fg``, ``bg``)."""
        self._pass_on(signal.SIGTSTP)
        stop_as_asked(self._suspend)
        self._pass_on(signal.SIGCONT)

    def _pass_on(self, number: int) -> None:
        """Suspend or resume all ranks, but not the launcher's own processes, which must receive the signal to resume on
        other hosts."""
        if self._child is None or self._child.poll() is not None or self._launcher.in_allocation:
            return  # of an allocation: its scheduler suspends jobs
        if self._launcher.forwards_stops:
            self._child.send_signal(number)
        else:
            for process in (self._child, *_session_of(self._child)):
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(process.pid, signal.SIGSTOP if number == signal.SIGTSTP else number)
        if self._table:  # ranks forked from a spare are not the launcher's children
            self._table.refresh()
            self._table.signal(signal.SIGSTOP if number == signal.SIGTSTP else number)

    def _send(self, child: subprocess.Popen, number: int) -> None:
        """Send the launcher a signal that it understands. None handles SIGHUP."""
        meant = signal.SIGTERM if number == signal.SIGHUP else number
        child.send_signal(self._launcher.forwarded_signals.get(number, meant))


def stop_as_asked(handler: Callable[[int, Any], None]) -> None:
    """Suspend this process within ``handler`` of SIGTSTP. Returns when it resumes."""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY))
    except OSError:
        os.kill(os.getpid(), signal.SIGSTOP)  # the starter, outside a terminal, can resume it
        return
    # Like the kernel, do not suspend without a shell that can resume.
    signal.signal(signal.SIGTSTP, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGTSTP)
    signal.signal(signal.SIGTSTP, handler)


def _pumps(child: subprocess.Popen, failures: list[TrainError]) -> list[threading.Thread]:
    """Start threads that copy the launcher's piped output. Errors are added to ``failures``.

    If the reader closes the pipe (``| head``), mpirun ends all ranks; a user script's rank ends itself.
    """
    streams = [(stream, number) for number, stream in ((1, child.stdout), (2, child.stderr)) if stream]
    pumps = [threading.Thread(target=_pump, args=(*pair, failures), daemon=True) for pair in streams]
    for pump in pumps:
        pump.start()
    return pumps


def _pump(source: IO[bytes], target: int, failures: list[TrainError]) -> None:
    buffer = getattr((sys.stdout, sys.stderr)[target - 1], "buffer", None)
    raw = getattr(buffer, "raw", buffer)  # the command line's stdout, which decides whether a lost line is an error
    write = raw.write if isinstance(raw, io.FileIO) else partial(os.write, target)
    while part := os.read(source.fileno(), 1 << 16):
        try:
            while part:
                part = part[write(part) or 0 :]
        except TrainError as error:
            failures.append(error)
        except OSError:  # nobody reads it
            pass


def _watch(
    child: subprocess.Popen,
    launcher: Launcher,
    table: StatusTable,
    watchdog: Watchdog | None,
    look: Callable[[StatusTable], None] | None,
) -> dict[int, float]:
    """Wait until the launcher ends, is late after a rank ended, or a rank is stuck. Returns {rank: time of its end}."""
    ended: dict[int, float] = {}
    poll, ranks, first = select.poll(), {}, math.inf
    launcher_end, slow = os.pidfd_open(child.pid), launcher.slow_to_end
    poll.register(launcher_end, select.POLLIN)
    while child.poll() is None and time.monotonic() < first + PATIENCE:
        table.refresh()
        if watchdog and watchdog.look():
            break
        silent = ended and not any(table.read(rank).record for rank in ended)
        if slow and silent and time.monotonic() > first + SILENCE:  # see SILENCE
            table.signal(signal.SIGKILL)
        if look:
            look(table)
        for rank, descriptor in list(table.open.items()):  # a copy: a signal handler may change it meanwhile
            if descriptor not in ranks:
                ranks[descriptor] = rank
                poll.register(descriptor, select.POLLIN)
        gone = list(table.gone - ended.keys())
        if slow and len(ended) == table.ranks:
            # Wakes the launcher: between two signals to its ranks it sleeps for a second.
            child.send_signal(signal.SIGCHLD)
        for descriptor, _ in poll.poll(0 if gone else CLOSE_MS if ended else LOOK_MS):
            if descriptor in ranks:
                poll.unregister(descriptor)
                gone.append(ranks[descriptor])
        for rank in gone:
            ended[rank] = time.monotonic()
            if table.read(rank).record.get("code") != 0:
                first = min(first, ended[rank])
        first = min(first, _stuck_in_end(table, ended))
    os.close(launcher_end)
    table.refresh()
    took = {ranks[descriptor] for descriptor, _ in poll.poll(0) if descriptor in ranks} | table.gone - ended.keys()
    return ended | dict.fromkeys(took, time.monotonic())  # those that ended together with the launcher


def _stuck_in_end(table: StatusTable, ended: Mapping[int, float]) -> float:
    """Return when a rank counts as ended that has reported its failure but still runs, as on a hanging file server."""
    records = [table.read(rank).record for rank in table.open if rank not in ended]
    return min((r["time"] + REPORTED_SECONDS for r in records if r.get("code") not in (None, *SAVED)), default=math.inf)


def end_with_parent() -> None:
    """Make the calling child die with its parent, so that no job outlives its owner (Linux: prctl(2))."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _end(child: subprocess.Popen, table: StatusTable | None) -> None:
    """Kill all that still runs of the launcher's session, and every rank."""
    import psutil

    if table:
        table.signal(signal.SIGKILL)  # this damages no checkpoint: they are renamed once they are complete
    if child.poll() is None:
        child.terminate()
        with suppress(subprocess.TimeoutExpired):
            child.wait(GRACE_SECONDS)
    left, stop = list(filter(_lives, _session_of(child))), time.monotonic() + GRACE_SECONDS
    for process in left:
        with suppress(psutil.NoSuchProcess):
            process.terminate()
    while (left := list(filter(_lives, left))) and time.monotonic() < stop:
        time.sleep(0.01)
    for process in left:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    if child.poll() is None:
        child.kill()


def _session_of(child: subprocess.Popen) -> list[psutil.Process]:
    """Return the processes of the launcher's session, except the launcher."""
    import psutil

    return [p for p in psutil.process_iter() if p.pid != child.pid and _in_session(p, child.pid)]


def _lives(process: psutil.Process) -> bool:
    """Return whether a process still runs. A zombie waits for init to collect it and does not count."""
    import psutil

    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _in_session(process: object, session: int) -> bool:
    try:
        return os.getsid(process.pid) == session  # type: ignore[attr-defined]
    except (ProcessLookupError, PermissionError):
        return False

"""Signals to a rank, and the end of the process that started it.

Python runs signal handlers in the main thread between bytecodes, but that thread may hang in Horovod's C++. So the
handlers do nothing. Python's C code writes the number into a pipe (``signal.set_wakeup_fd``), which a thread reads:

1. The first signal requests to save and stop; all ranks agree on the step (``core.control_sync``).
2. Before the first step, with nothing to save, or at the second signal, this process ends at once.
3. The same thread watches the launcher through pidfds. An orphan ends at once.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from hvd_train.core.control_sync import StopSource
from hvd_train.errors import nothing_saved, stopped_code
from hvd_train.launch.environment import world
from hvd_train.launch.launchers import named
from hvd_train.launch.status import StatusSlot, supported
from hvd_train.launch.world import World

LEAVE_SECONDS = 60.0  # for MPI's shutdown after all is written
JOB_END = "HVD_TRAIN_JOB_END"  # set by the script of 'submit --requeue'
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)


def ignored(number: int) -> bool:
    """Return whether this process ignores SIGHUP, as under nohup."""
    return number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN


class SignalListener(StopSource):
    """Handles signals, and reports this rank's phase and end to the process that watches it. Must be created in the
    main thread."""

    def __init__(self) -> None:
        here = world()
        self._prints = here.rank == 0
        self._slot = StatusSlot.of(here.rank)
        self.reset()
        # Non-blocking: a handler must never wait for the thread to read.
        self._signal_pipe, write_end = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._launchers = _processes(here, self._slot)
        for number in SIGNALS:
            if not ignored(number):
                signal.signal(number, lambda number, frame: None)  # the thread reads the signal number from the pipe
        signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        threading.Thread(target=self._listen, name="signals", daemon=True).start()

    def reset(self) -> None:
        """Reset the state for the next command of this process."""
        self.asked, self.begun, self.ended = 0, False, False
        end = os.environ.get(JOB_END, "")
        self.job_end = float(end) if end.isdigit() else None
        self.last_calls: list[Callable[[], None]] = []  # called even before a sudden exit
        self.run_dir: Path | None = None  # run folder for tracebacks, once it is known
        self.peer_slot: StatusSlot | None = None  # read by the ranks of this host, if no other process watches them
        self._code: int | None = None

    def at(self, phase: str, step: int) -> None:
        """Report this rank's phase and step to the processes that watch it."""
        for slot in filter(None, (self._slot, self.peer_slot)):
            slot.at(phase, step)

    @property
    def is_watched(self) -> bool:
        """Return whether the process that started the ranks reads this rank's status."""
        return self._slot is not None

    def report_end(self, code: int, **record: Any) -> None:
        """Report that this rank is about to exit with ``code``. Only the first report counts."""
        if self._code is not None:
            return
        self._code = code
        for slot in filter(None, (self._slot, self.peer_slot)):
            slot.report_end({"code": code, **record})

    def finish(self, code: int) -> None:
        """Exit with ``code`` within ``LEAVE_SECONDS``, after all is written: MPI's shutdown waits for ever for a
        stopped launcher."""
        self.ended = True
        if world().launcher:
            limit = threading.Timer(LEAVE_SECONDS, self._end_late, args=[code])
            limit.daemon = True
            limit.start()

    def call_last(self) -> None:
        """Run the last callbacks before a sudden exit."""
        for call in self.last_calls:
            with suppress(OSError):
                call()

    def _end_late(self, code: int) -> NoReturn:
        self.call_last()
        self.report_end(code=code)
        what = f"the launcher has not answered for {LEAVE_SECONDS:g} s; all is written, and this rank ends without it"
        with suppress(OSError):
            os.write(2, f"{what}\n".encode())
        os._exit(code)

    def _listen(self) -> None:
        poll = select.poll()
        for descriptor in (self._signal_pipe, *self._launchers):
            poll.register(descriptor, select.POLLIN)
        while True:
            for descriptor, _ in poll.poll():
                if descriptor != self._signal_pipe:
                    why = "the launcher has ended; --resume auto goes on from the last checkpoint"
                    named(world().launcher).remove_left()
                    self._end_now(5, why, lost=True)
                for number in os.read(descriptor, 64):
                    if number in SIGNALS:
                        self._receive(number)

    def _receive(self, number: int) -> None:
        if self.ended:
            return
        if self._code is not None:
            os._exit(self._code)
        name = signal.Signals(number).name
        if self.asked:
            self._end_now(128 + number, f"ended at once by a second signal, {name}")
        if not self.begun:
            # After one rank fails, a launcher ends the others with the same signal. Only the watching process knows
            # whether the signal was meant for the job.
            stops_job = self.is_watched or world().size == 1
            self._end_now(stopped_code(number), nothing_saved(number, None if stops_job else world().rank))
        self.asked = number

    def _end_now(self, code: int, why: str, lost: bool = False) -> NoReturn:
        self.call_last()
        # Report first: output may be lost while the launcher ends. The watching process prints the line.
        self.report_end(code=code, line=why, lost=lost, unsaid=self.is_watched and not lost)
        if self._prints and not (self.is_watched and not lost):
            with suppress(OSError):
                os.write(2, f"{why}\n".encode())
        os._exit(code)


def _processes(here: World, slot: StatusSlot | None) -> list[int]:
    """Return pidfds of the processes without which this rank is an orphan: its parent, the launcher (if a shell is in
    between), and the ``-np`` process."""
    pids = {os.getppid()} if here.launcher else set()
    if named(here.launcher).leads_session:
        pids.add(os.getsid(0))
    if slot:
        pids.add(slot.owner)
    descriptors = []
    for pid in (pids if supported() else set()) - {0, os.getpid()}:
        try:
            descriptors.append(os.pidfd_open(pid))
        except ProcessLookupError:
            sys.exit(5)  # it has already ended
    return descriptors


_listener: SignalListener | None = None  # this process's listener, once it exists


def current_listener() -> SignalListener | None:
    """Return this process's listener, or None."""
    return _listener


def listen() -> SignalListener:
    """Start to listen to signals."""
    global _listener
    _listener = _listener or SignalListener()
    return _listener


def stop_listening() -> None:
    """Restore the default signal handlers, for a process that becomes a launcher."""
    global _listener
    if _listener:
        signal.set_wakeup_fd(-1)
        _listener.ended, _listener = True, None
        for number in SIGNALS:
            if not ignored(number):
                signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)

"""Signals to a rank, and the end of whoever started it.

Python runs signal handlers in the main thread between two bytecodes, and that thread may be in Horovod's C++ for ever.
So the handlers do nothing. Python's C code writes the number into a pipe (``signal.set_wakeup_fd``), which a thread
reads:

1. The first signal is a request to save and stop, on which all ranks agree at a step (``core.control_sync``).
2. Before the first step, when there is nothing to save, this process ends at once, and at the second signal, too.
3. The same thread waits for the end of the launcher, through pidfds. An orphan ends at once.
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

LEAVE_SECONDS = 60.0  # for MPI to finish after all is written
JOB_END = "HVD_TRAIN_JOB_END"  # set by the script of 'submit --requeue'
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)


def ignored(number: int) -> bool:
    """Return whether the user lets this process outlive its terminal (nohup)."""
    return number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN


class SignalListener(StopSource):
    """A listener to signals, which also reports this rank's phase and end to whoever watches it. Must be made in the
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
                signal.signal(number, lambda number, frame: None)  # the thread reads the number from the pipe
        signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        threading.Thread(target=self._listen, name="signals", daemon=True).start()

    def reset(self) -> None:
        """Begin anew, for the next command of this process."""
        self.asked, self.begun, self.ended = 0, False, False
        end = os.environ.get(JOB_END, "")
        self.job_end = float(end) if end.isdigit() else None
        self.last_calls: list[Callable[[], None]] = []  # also before a sudden end
        self.run_dir: Path | None = None  # of failures, once it is known
        self.peer_slot: StatusSlot | None = None  # read by the ranks of this host, if nobody else watches them
        self._code: int | None = None

    def at(self, phase: str, step: int) -> None:
        """Report where this rank is, to who started it and to the ranks that watch it."""
        for slot in filter(None, (self._slot, self.peer_slot)):
            slot.at(phase, step)

    @property
    def is_watched(self) -> bool:
        """Return whether the process that started the ranks reads what this one reports."""
        return self._slot is not None

    def report_end(self, code: int, **record: Any) -> None:
        """Report that this rank is about to end with ``code``. The first report stands."""
        if self._code is not None:
            return
        self._code = code
        for slot in filter(None, (self._slot, self.peer_slot)):
            slot.report_end({"code": code, **record})

    def finish(self, code: int) -> None:
        """Note that training is over and all is written. This process ends with ``code`` within ``LEAVE_SECONDS``: MPI
        waits for its launcher at the end, for ever if that is stopped."""
        self.ended = True
        if world().launcher:
            limit = threading.Timer(LEAVE_SECONDS, self._end_late, args=[code])
            limit.daemon = True
            limit.start()

    def call_last(self) -> None:
        """Do what is left to do before a sudden end."""
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
            # Where one rank has failed, a launcher ends the others by the same signal: it stopped this rank, perhaps
            # not the job. Who watches the ranks knows.
            stops_job = self.is_watched or world().size == 1
            self._end_now(stopped_code(number), nothing_saved(number, None if stops_job else world().rank))
        self.asked = number

    def _end_now(self, code: int, why: str, lost: bool = False) -> NoReturn:
        self.call_last()
        # Reported first: what a rank prints while its launcher ends may be lost. Who watches the ranks prints the line.
        self.report_end(code=code, line=why, lost=lost, unsaid=self.is_watched and not lost)
        if self._prints and not (self.is_watched and not lost):
            with suppress(OSError):
                os.write(2, f"{why}\n".encode())
        os._exit(code)


def _processes(here: World, slot: StatusSlot | None) -> list[int]:
    """Return descriptors of the processes without which this rank is an orphan: its parent under a launcher, the
    launcher itself beyond a shell in between, and the one that ``-np`` made of the command."""
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
            sys.exit(5)  # it is gone already
    return descriptors


_listener: SignalListener | None = None  # of this process, once it listens


def current_listener() -> SignalListener | None:
    """Return this process' listener, or None if it does not listen."""
    return _listener


def listen() -> SignalListener:
    """Listen to signals from now on."""
    global _listener
    _listener = _listener or SignalListener()
    return _listener


def stop_listening() -> None:
    """Give signals back the meaning that they have in every program, for a process that becomes a launcher."""
    global _listener
    if _listener:
        signal.set_wakeup_fd(-1)
        _listener.ended, _listener = True, None
        for number in SIGNALS:
            if not ignored(number):
                signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)

"""A rank's ears: signals, and the end of whoever started it. A thread listens, for the main one may compute or wait.

The first signal is a wish, on which all ranks agree (``core.meeting``); before the first step, where there is nothing
to save, and at the second signal, this process ends at once. So it does when its launcher is gone.
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

from hvd_train.core.meeting import Outside
from hvd_train.errors import nothing_saved, stopped_code
from hvd_train.launch.board import Page, supported
from hvd_train.launch.environment import world
from hvd_train.launch.launchers import named
from hvd_train.launch.launchers.base import World

LEAVE_SECONDS = 60.0
JOB_END = "HVD_TRAIN_JOB_END"  # set by the script of 'submit --requeue'
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)


def ignored(number: int) -> bool:
    """Return whether the user lets this process outlive its terminal (nohup)."""
    return number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN


class Ears(Outside):
    """``leaving``: what a sudden end still does; ``run_dir``: where a failure is kept, once it is known. To be made in
    the main thread."""

    def __init__(self) -> None:
        here = world()
        self._speaks = here.rank == 0
        self._page = Page.of(here.rank)
        self.anew()
        self._heard, ear = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._watched = _processes(here, self._page)
        for number in SIGNALS:
            if not ignored(number):
                signal.signal(number, lambda number, frame: None)  # the thread hears it, whatever the main one does
        signal.set_wakeup_fd(ear, warn_on_full_buffer=False)
        threading.Thread(target=self._listen, name="ears", daemon=True).start()

    def anew(self) -> None:
        """For the next command of this process."""
        self.asked, self.begun, self.ended = 0, False, False
        end = os.environ.get(JOB_END, "")
        self.job_end = float(end) if end.isdigit() else None
        self.leaving: list[Callable[[], None]] = []
        self.run_dir: Path | None = None
        self.seen: Page | None = None  # which the ranks of this host read, where nobody else does
        self._code: int | None = None

    def at(self, phase: str, step: int) -> None:
        for page in filter(None, (self._page, self.seen)):
            page.at(phase, step)

    @property
    def told(self) -> bool:
        """Whether somebody reads what this rank tells."""
        return self._page is not None

    def end(self, code: int, **record: Any) -> None:
        """This rank's last word to who started it: it is about to end with ``code``. The first one stands."""
        if self._code is not None:
            return
        self._code = code
        for page in filter(None, (self._page, self.seen)):
            page.end({"code": code, **record})

    def leave(self, code: int) -> None:
        """Training is over, and all is written: this process ends with ``code`` within ``LEAVE_SECONDS``. MPI waits for
        its launcher at the end, for ever where that is stopped."""
        self.ended = True
        if world().launcher:
            limit = threading.Timer(LEAVE_SECONDS, self._end_late, args=[code])
            limit.daemon = True
            limit.start()

    def _end_late(self, code: int) -> NoReturn:
        for call in self.leaving:
            with suppress(OSError):
                call()
        self.end(code=code)
        what = f"the launcher has not answered for {LEAVE_SECONDS:g} s; all is written, and this rank ends without it"
        with suppress(OSError):
            os.write(2, f"{what}\n".encode())
        os._exit(code)

    def _listen(self) -> None:
        poll = select.poll()
        for descriptor in (self._heard, *self._watched):
            poll.register(descriptor, select.POLLIN)
        while True:
            for descriptor, _ in poll.poll():
                if descriptor != self._heard:
                    why = "the launcher has ended; --resume auto goes on from the last checkpoint"
                    self._end_now(5, why, lost=True)
                for number in os.read(descriptor, 64):
                    if number in SIGNALS:
                        self._signalled(number)

    def _signalled(self, number: int) -> None:
        if self.ended:
            return
        if self._code is not None:
            os._exit(self._code)
        name = signal.Signals(number).name
        if self.asked:
            self._end_now(128 + number, f"ended at once by a second signal, {name}")
        if not self.begun:
            self._end_now(stopped_code(number), nothing_saved(number))
        self.asked = number

    def _end_now(self, code: int, why: str, lost: bool = False) -> NoReturn:
        for call in self.leaving:
            with suppress(OSError):
                call()
        # What a rank writes while its launcher ends may be lost.
        self.end(code=code, line=why, lost=lost, unsaid=self.told and not lost)
        if self._speaks and not (self.told and not lost):
            with suppress(OSError):
                os.write(2, f"{why}\n".encode())
        os._exit(code)


def _processes(here: World, page: Page | None) -> list[int]:
    """Return descriptors of the processes without which this rank is an orphan: its parent under a launcher, the
    launcher itself beyond a shell in between, and the one that ``-np`` made of the command."""
    pids = {os.getppid()} if here.launcher else set()
    if named(here.launcher).leads_session:
        pids.add(os.getsid(0))
    if page:
        pids.add(page.owner)
    found = []
    for pid in (pids if supported() else set()) - {0, os.getpid()}:
        try:
            found.append(os.pidfd_open(pid))
        except ProcessLookupError:
            sys.exit(5)  # it is gone already
    return found


EARS: list[Ears] = []  # of this process, once it listens


def listen() -> Ears:
    """For the command that begins."""
    if not EARS:
        EARS.append(Ears())
    return EARS[0]


def forget() -> None:
    """For a process that becomes a launcher: signals do again what they do in every program."""
    if EARS:
        signal.set_wakeup_fd(-1)
        EARS.pop().ended = True
        for number in SIGNALS:
            if not ignored(number):
                signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)

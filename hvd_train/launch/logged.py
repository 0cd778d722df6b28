"""Run a command with its output in a file, for commands that train many times."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from hvd_train.errors import CheckpointError
from hvd_train.launch.process import end_with_parent, stop_as_asked
from hvd_train.launch.watchdog import state

STOP_SECONDS = 3.0  # for a command to stop its ranks and itself
STOPPED = (75, 130, 143)  # exit codes after a signal
TOO_LONG = 124  # exit code of a command that was ended because its time was over


def run(line: Sequence[str], env: Mapping[str, str], log: Path, seconds: float | None = None) -> int:
    """Run a command and return its exit code. A signal to this process is forwarded; the code is then in STOPPED.

    ``seconds``: after which the command is ended; the code is then TOO_LONG. Raises CheckpointError if the log cannot
    be written.
    """
    try:
        stream = open(log, "w")  # noqa: SIM115
    except OSError as error:
        raise CheckpointError(f"the log cannot be written: {error.strerror}", where=str(log)) from error
    with stream as output:
        child: subprocess.Popen | None = None
        received: list[int] = []

        def forward(number: int, frame: object) -> None:
            received.append(number)
            if child is not None:
                child.send_signal(number)

        def suspend(number: int, frame: object) -> None:
            if child is None:
                return
            with suppress(ProcessLookupError):  # it has ended
                os.kill(child.pid, signal.SIGTSTP)
                stop = time.monotonic() + STOP_SECONDS
                while state(child.pid) not in "TZX?" and time.monotonic() < stop:
                    time.sleep(0.05)
                os.killpg(child.pid, signal.SIGSTOP)  # a training started without a terminal ignores SIGTSTP
            stop_as_asked(suspend)
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGCONT)

        previous = {number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM)}
        previous[signal.SIGTSTP] = signal.signal(signal.SIGTSTP, suspend)
        try:
            # In a new session, so that Ctrl-C reaches the command once, from here.
            child = subprocess.Popen(
                line, stdout=output, stderr=output, env=env, start_new_session=True, preexec_fn=end_with_parent
            )
            if received:
                child.send_signal(received[0])
            code = _wait(child, seconds)
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
    code = code if code >= 0 else 128 - code
    return (code if code in STOPPED else 128 + received[0]) if received else code


def _wait(child: subprocess.Popen, seconds: float | None) -> int:
    try:
        return child.wait(seconds)
    except subprocess.TimeoutExpired:
        child.terminate()
    try:
        child.wait(2 * STOP_SECONDS)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
    return TOO_LONG


def reason(log: Path, code: int) -> str:
    """Return the first error line in the log of a command."""
    text = log.read_text(errors="replace") if log.exists() else ""
    errors = re.findall(r"^error[^:]*: (.*)$", text, re.MULTILINE)
    return errors[0][:300] if errors else f"ended with code {code}; see {log}"

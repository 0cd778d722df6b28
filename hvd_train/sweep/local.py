"""Run trials one after the other on this host, each as a separate command."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

from hvd_train.launch.process import end_with_parent
from hvd_train.launch.start import environment
from hvd_train.sweep.folder import CONFIG, LOG, Sweep, begin, fail, state
from hvd_train.sweep.halving import turn
from hvd_train.sweep.plan import Trial
from hvd_train.sweep.results import report
from hvd_train.sweep.table import live

STOPPED = (75, 130, 143)


def train_trials(sweep: Sweep, num_proc: int | None, launcher: str, resume: bool) -> int:
    """Train the trials of a sweep, and print its results; return the exit code."""
    begin(sweep, resume)
    with live(sweep):
        code = run(sweep, num_proc, launcher)
    return report(sweep, code)


def run(sweep: Sweep, num_proc: int | None, launcher: str) -> int:
    """Run the trials that have not ended. Return 0, or the exit code of the signal that stopped the sweep."""
    while True:
        trials, until = turn(sweep)
        if not trials:
            return 0
        for trial in trials:
            before = state(sweep, trial).rung
            code = _run(trial, until, num_proc, launcher)
            if code in STOPPED:
                return code
            if state(sweep, trial).rung == before:
                fail(trial, reason(Path(trial.config.run_dir) / LOG, code), code)


def _run(trial: Trial, until: int | None, num_proc: int | None, launcher: str) -> int:
    run_dir = Path(trial.config.run_dir)
    line = [sys.executable, "-m", "hvd_train", "fit", "-c", str(run_dir / CONFIG), "--resume", "auto"]
    line += ["--until-epoch", str(until)] if until else []
    line += ["-np", str(num_proc), "--launcher", launcher] if num_proc else []
    env = environment() | {"HVD_TRAIN_TERMINAL": "0"}  # its output goes to a file
    with open(run_dir / LOG, "w") as log:
        child: subprocess.Popen | None = None
        received: list[int] = []

        def forward(number: int, frame: object) -> None:
            received.append(number)
            if child is not None:
                child.send_signal(number)

        previous = {number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            # In a new session, so that Ctrl-C reaches the trial once, from here.
            child = subprocess.Popen(
                line, stdout=log, stderr=log, env=env, start_new_session=True, preexec_fn=end_with_parent
            )
            if received:
                child.send_signal(received[0])
            code = child.wait()
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
    code = code if code >= 0 else 128 - code
    return (code if code in STOPPED else 128 + received[0]) if received else code


def reason(log: Path, code: int) -> str:
    """Return the first error line in the log of a trial."""
    text = log.read_text(errors="replace") if log.exists() else ""
    errors = re.findall(r"^error[^:]*: (.*)$", text, re.MULTILINE)
    return errors[0][:300] if errors else f"ended with code {code}; see {log}"

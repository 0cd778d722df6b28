"""Run trials one after the other on this host, each as a separate command."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hvd_train.launch import logged
from hvd_train.launch.launchers.installed import python
from hvd_train.launch.start import environment
from hvd_train.sweep.folder import CONFIG, LOG, Sweep, begin, fail, state
from hvd_train.sweep.halving import turn
from hvd_train.sweep.progress import live
from hvd_train.sweep.results import report
from hvd_train.sweep.trials import Trial


def train_trials(sweep: Sweep, num_proc: int | None, launcher: str, resume: bool) -> int:
    """Run a sweep on this host and print its results; return the exit code."""
    begin(sweep, resume)
    with live(sweep):
        code = run(sweep, num_proc, launcher)
    return report(sweep, code)


def run(sweep: Sweep, num_proc: int | None, launcher: str) -> int:
    """Run the remaining trials. Return 0, or the exit code of the signal that stopped the sweep."""
    while True:
        trials, until = turn(sweep)
        if not trials:
            return 0
        for trial in trials:
            before = state(sweep, trial).rung
            code = _run(trial, until, num_proc, launcher)
            if code in logged.STOPPED:
                return code
            if state(sweep, trial).rung == before:
                fail(trial, logged.reason(Path(trial.config.run_dir) / LOG, code), code)


def _run(trial: Trial, until: int | None, num_proc: int | None, launcher: str) -> int:
    words = ["--resume", "auto", *(["--until-epoch", str(until)] if until else [])]
    return fit(trial, [*words, *(["-np", str(num_proc), "--launcher", launcher] if num_proc else [])])


def fit(trial: Trial, words: Sequence[str]) -> int:
    """Run ``hvd-train fit WORDS`` for a trial, with its output in the trial's folder. Returns the exit code."""
    run_dir = Path(trial.config.run_dir)
    line = [*python("hvd_train"), "fit", "-c", str(run_dir / CONFIG), *words]
    env = environment() | {"HVD_TRAIN_TERMINAL": "0"}  # its output goes to a file
    return logged.run(line, env, run_dir / LOG)

"""Trials one after the other on this host, each a command of its own."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from hvd_train.config import resolved_yaml
from hvd_train.core.files import put
from hvd_train.launch.local import _end_with_parent, environment
from hvd_train.sweep.folder import LOG, fail, state
from hvd_train.sweep.plan import Trial

STOPPED = (75, 130, 143)


def run(trials: Sequence[Trial], num_proc: int | None, launcher: str) -> int:
    """Runs what is not done; 0, or the code of what stopped the sweep."""
    for trial in trials:
        if state(trial).word == "done":
            continue
        code = _run(trial, num_proc, launcher)
        if code in STOPPED:
            return code
        if state(trial).word != "done":
            fail(trial, _reason(Path(trial.config.run_dir) / LOG, code), code)
    return 0


def _run(trial: Trial, num_proc: int | None, launcher: str) -> int:
    run_dir = Path(trial.config.run_dir)
    run_dir.mkdir(parents=True, exist_ok=True)
    put(run_dir / "trial.yaml", resolved_yaml(trial.config).encode())
    line = [sys.executable, "-m", "hvd_train", "fit", "-c", str(run_dir / "trial.yaml"), "--resume", "auto"]
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
            # A session of its own: Ctrl-C reaches it once, from here.
            child = subprocess.Popen(
                line, stdout=log, stderr=log, env=env, start_new_session=True, preexec_fn=_end_with_parent
            )
            if received:
                child.send_signal(received[0])
            code = child.wait()
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
    code = code if code >= 0 else 128 - code
    return (code if code in STOPPED else 128 + received[0]) if received else code


def _reason(log: Path, code: int) -> str:
    """The first error that the command told."""
    found = re.findall(r"^error[^:]*: (.*)$", log.read_text(errors="replace"), re.MULTILINE)
    return found[0][:300] if found else f"ended with code {code}; see {log}"

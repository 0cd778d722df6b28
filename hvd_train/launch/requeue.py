"""The end of the batch script of ``hvd-train submit --requeue``, after its ranks have ended.

A job is requeued if its ranks saved and left (time limit or preemption), or if a rank was lost.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path

from hvd_train import files
from hvd_train.checkpoint import store
from hvd_train.errors import CheckpointError, CommunicationError, Interrupted
from hvd_train.launch.launchers.base import FATAL
from hvd_train.run_folder import safe_reading
from hvd_train.run_folder.layout import REQUEUED
from hvd_train.run_folder.terminal import say

SAVED = Interrupted.exit_code  # exit codes of ranks
# srun returns 128 + signal for a rank killed by a signal.
AGAIN = {SAVED, CommunicationError.exit_code, *FATAL}
END_SECONDS = 60.0  # for Slurm to end this script


def requeue(code: int, times: int, run_dir: Path | None) -> int:
    """Requeue the job, at most ``times`` times, if srun's exit ``code`` allows it.

    Returns the job's exit code, unless Slurm requeues the job and ends this script. Without a run folder (a user's
    script) only the number of times is limited.
    """
    if code not in AGAIN:
        return code
    checkpoints = store.find(run_dir / "checkpoints") if run_dir is not None else []
    saved = code == SAVED and bool(checkpoints)  # ranks also exit with this code before there is anything to save
    count = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
    if count >= times:
        return _stay(code, saved, f"it was started again {count} times, and --requeue allows {times}")
    job = os.environ["SLURM_JOB_ID"]
    if run_dir is not None:
        step = checkpoints[-1][0] if checkpoints else 0
        # A job that made no progress since last time would make none next time.
        if count and step <= _before(run_dir / REQUEUED, job):
            fix = "give it more --time" if code == SAVED else "look at what ended its ranks"
            return _stay(code, saved, f"it came no further than step {step} since it was started again; {fix}")
        try:
            if checkpoints:
                files.put(run_dir / REQUEUED, json.dumps({"job": job, "step": step}).encode())
        except OSError as error:
            return _stay(code, saved, f"{run_dir / REQUEUED} cannot be written: {error.strerror}")
    done = subprocess.run(["scontrol", "requeue", job], capture_output=True, text=True, check=False)
    if done.returncode:
        return _stay(code, saved, " ".join(done.stderr.split()))
    time.sleep(END_SECONDS)
    return code


def _before(path: Path, job: str) -> int:
    """Return the step from which the job was requeued last time; 0 if none was saved then."""
    try:
        last = safe_reading.json_object(path)
        return int(last["step"]) if last["job"] == job else 0
    except (OSError, CheckpointError, ValueError, KeyError, TypeError):
        return 0


def _stay(code: int, saved: bool, why: str) -> int:
    state = "saved, but not started again" if saved else "not started again"
    say(f"the job is {state}: {why}", err=True)
    return code

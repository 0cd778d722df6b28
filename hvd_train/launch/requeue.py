"""``hvd-train submit --requeue``: what the batch script does when its ranks have ended.

A job takes its place in the queue again where its ranks saved and left, because its time was over or others need its
hosts, and where a rank was lost.
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
from hvd_train.run_folder import reading
from hvd_train.run_folder.layout import REQUEUED
from hvd_train.run_folder.terminal import say

SAVED = Interrupted.exit_code  # of the ranks
# srun returns the code of a rank that a signal ended as 128 + signal.
AGAIN = {SAVED, CommunicationError.exit_code, *FATAL}
END_SECONDS = 60.0  # for Slurm to end this script


def requeue(code: int, times: int, run_dir: Path | None) -> int:
    """Put the job into the queue again, at most ``times`` times, if srun ended with a ``code`` that allows it.

    Returns the job's exit code, unless Slurm takes the job back and ends this script. Without a run folder (a script of
    the user) only the times are counted.
    """
    if code not in AGAIN:
        return code
    checkpoints = store.find(run_dir / "checkpoints") if run_dir is not None else []
    saved = code == SAVED and bool(checkpoints)  # with that code ranks also leave before there is anything to save
    count = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
    if count >= times:
        return _stay(code, saved, f"it was started again {count} times, and --requeue allows {times}")
    job = os.environ["SLURM_JOB_ID"]
    if run_dir is not None:
        step = checkpoints[-1][0] if checkpoints else 0
        # A job that came no further than last time would do the same next time.
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
    """Return the step at which the job was started again last time; 0 if none was saved then."""
    try:
        last = reading.json_object(path)
        return int(last["step"]) if last["job"] == job else 0
    except (OSError, CheckpointError, ValueError, KeyError, TypeError):
        return 0


def _stay(code: int, saved: bool, why: str) -> int:
    state = "saved, but not started again" if saved else "not started again"
    say(f"the job is {state}: {why}", err=True)
    return code

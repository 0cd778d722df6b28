"""Shared by the benchmarks on one rank: data, optimizer, settings, and a process for each measurement."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hvd_train.core.hooks import Hook
    from hvd_train.core.loop import Trainer

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".venv" / "bin" / "python"
FASHION = Path("/usr/share/datasets/fashion-mnist")
DATA = {"name": "idx", "path": str(FASHION)} if FASHION.exists() else {"name": "digits", "image_size": 28}
BATCH = 64
FRAMEWORKS = ("pytorch", "tensorflow")
SGD = {"lr": 0.005, "momentum": 0.9, "weight_decay": 1e-5}
# Training steps only, and nothing written.
STEPS_ALONE: dict = {
    "check_val_every_n_epoch": 1000,
    "limit_val_batches": 1,
    "checkpoint": {"every_n_epochs": 0, "save_last": False, "save_top_k": 0},
}


def cnn_trainer(framework: str, settings: dict, hook: Hook) -> Trainer:
    """Return the product's loop for the CNN on one rank, with ``settings`` on top of the usual ones."""
    from hvd_train.config import Config
    from hvd_train.core.loop import Trainer
    from hvd_train.data.catalog import open_data
    from hvd_train.frameworks import FRAMEWORKS as RECORDS
    from hvd_train.jobs.connect import connect
    from hvd_train.jobs.job import build_job
    from hvd_train.run_folder.log import NullLog
    from hvd_train.session import Session

    usual = {"framework": framework, "model": {"name": "cnn"}, "data": DATA, "batch_size": BATCH, "optim": SGD}
    config = Config.model_validate(usual | STEPS_ALONE | settings)
    job = build_job(config, Session(RECORDS[framework].load()), open_data(config.data))
    update, _ = connect(job, "none")
    return Trainer(config, job.frontend, update, job.data.train, job.data.val, Path(), NullLog(), hooks=[hook])


def alone(program: str, *words: str) -> dict:
    """Run ``program WORDS`` in its own process; return the JSON object in its last line."""
    from hvd_train.frameworks import KERNELS

    env = {
        **os.environ,
        **KERNELS,
        "OMP_NUM_THREADS": str(os.cpu_count()),
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "PYTHONPATH": str(ROOT),
    }
    line = [sys.executable, program, *words]
    done = subprocess.run(line, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])

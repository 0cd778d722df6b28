"""Runs of a study as trainings leave them, made up from known times."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from hvd_train.core.shares import SHOWN

STEPS, EPOCH_STEPS = 100, 200


def write_run(trial, compute=10.0, exchange=0.0, ranks=None, cores=64, per_host=64, threads=1, slow_start=1.0):
    """Write 100 steps in ten windows. Times are in milliseconds; those of the first 20 steps ``slow_start`` times."""
    run, ranks = Path(trial.config.run_dir), ranks or trial.values["ranks"]
    rows, spent = [{"time": 0.0, "event": "start", "began": 0.0, "step": 0}], np.zeros(2)
    for window in range(10):
        factor = slow_start if window < 2 else 1.0
        cells = [[0, int(1000 * compute * factor), int(1000 * exchange * factor), 0] * 10] * ranks
        spent = spent + np.array([compute, exchange]) * factor * 10 / 1000
        seconds = {name: [0.0] * ranks for name in SHOWN}
        seconds |= {"compute": [spent[0]] * ranks, "exchange": [spent[1]] * ranks, "start": [5.0] * ranks}
        row = {"time": 1.0 + window, "event": "steps", "step": 10 * (window + 1), "steps": 10, "epoch": 1}
        rows.append(row | {"counted": float(spent.sum()), "seconds": seconds, "cell_steps": 1, "cells": cells})
    write_lines(run / "steps.jsonl", rows)
    batch = trial.config.global_batch_size
    write_summary(run, {"steps": STEPS, "train_samples": STEPS * batch, "steps_per_epoch": EPOCH_STEPS})
    environment = {"ranks": ranks, "ranks_on_this_host": min(ranks, per_host), "cores": cores, "threads": threads}
    (run / "environment.json").write_text(json.dumps(environment))


def write_training(trial, accuracies, seconds_each, samples=100):
    """Write a whole training that was evaluated after each epoch."""
    start = [{"time": 0.0, "event": "start", "began": 0.0, "step": 0}, {"time": 0.0, "event": "ranks", "step": 1}]
    run, rows, times = Path(trial.config.run_dir), [], start
    for k, accuracy in enumerate(accuracies, 1):
        rows.append({"event": "train", "epoch": k, "step": 10 * k, "loss": 1.0, "samples": samples})
        rows.append({"event": "val", "epoch": k, "step": 10 * k, "loss": 1.0, "accuracy": accuracy, "samples": 5})
        times.append({"time": float(k), "event": "steps", "step": 10 * k, "counted": seconds_each * k})
    write_lines(run / "metrics.jsonl", rows)
    write_lines(run / "steps.jsonl", times)
    write_summary(
        run, {"steps": 10 * len(accuracies), "train_samples": samples * len(accuracies), "steps_per_epoch": 10}
    )


def write_lines(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_summary(run, values):
    run.mkdir(parents=True, exist_ok=True)
    (run / "summary.json").write_text(json.dumps(values))

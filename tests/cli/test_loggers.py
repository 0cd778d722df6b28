"""Trackers, ``watch`` and ``--quiet`` through the command line."""

from __future__ import annotations

import csv
import importlib.util
import json

import pytest

from tests.cli.running import run

TINY = ("--set", "data.name=digits", "--set", "model.name=mlp", "--set", "model.hidden=[8]", "--set", "max_epochs=2")


def test_a_quiet_run_with_trackers(tmp_path):
    sets = (*TINY, "--set", "loggers=[tensorboard, csv]", "--set", "tensorboard=false")
    done = run("fit", "-np", "2", "-q", *sets, "--run-dir", "run", cwd=tmp_path)
    assert done.stdout.startswith("done: ") and done.stdout.count("\n") == 1 and not done.stderr
    with open(tmp_path / "run" / "metrics.csv", newline="") as stream:
        rows = [row for row in csv.DictReader(stream) if row["event"] == "val"]
    assert [row["epoch"] for row in rows] == ["1", "2"] and list((tmp_path / "run" / "tensorboard").iterdir())
    shown = run("watch", "run", "--once", cwd=tmp_path).stdout
    assert shown.startswith("run: pytorch, mlp\n") and "loss: train" in shown and "\ndone: val loss" in shown
    events = [json.loads(line)["event"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    lines = len(events) - events.count("straggler")  # which is no number of the training
    for words in (f"{lines} lines sent to tensorboard (boards/run)", f"tensorboard (boards/run) has all {lines} lines"):
        assert words in run("sync", "run", "--to", "tensorboard", "--uri", "boards", cwd=tmp_path).stdout
    failed = run("sync", ".", "--to", "csv", cwd=tmp_path, code=2)
    assert failed.stderr == "error: holds no run: it has no metrics.jsonl; .; give the folders of its runs: ./*\n"
    lines = run("watch", "run", cwd=tmp_path).stdout.splitlines()  # follows to the end, which is there
    assert len(lines) == 4 and lines[1].startswith("epoch 1, step ") and lines[3].startswith("done: val loss")


@pytest.mark.skipif(importlib.util.find_spec("mlflow") is not None, reason="MLflow is installed")
@pytest.mark.parametrize("how", [("-np", "2"), ("--check",)], ids=" ".join)
def test_a_tracker_that_is_not_installed(tmp_path, how):
    done = run("fit", *how, *TINY, "--set", "loggers=[csv, mlflow]", "--run-dir", "run", cwd=tmp_path, code=2)
    assert "mlflow is not installed; loggers: mlflow; pip install mlflow on the host of rank 0" in done.stderr
    assert done.stderr.count("\n") == 1 and not (tmp_path / "run").exists()

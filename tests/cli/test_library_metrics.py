"""A metric object of a library through the command line, as the page own-loss describes it."""

from __future__ import annotations

import json

import pytest

from tests.cli.running import run


def test_two_ranks_give_the_number_of_one(tmp_path):
    """They train on two, whose validation has parts of unequal size, and one evaluates."""
    pytest.importorskip("torchmetrics")
    line = 'kappa = torchmetrics.CohenKappa(task="multiclass", num_classes=10)\n'
    (tmp_path / "mine.py").write_text(f"import torchmetrics\n{line}")
    keys = ["model.name=mlp", "task.metrics=[accuracy, 'mine:kappa']", "precision=64", "threads=1", "tensorboard=false"]
    words = [word for key in keys for word in ("--set", key)]
    run("fit", "-np", "2", "--run-dir", "run", *words, cwd=tmp_path)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    one = json.loads(run("eval", "--run-dir", "run", cwd=tmp_path).stdout.splitlines()[-1])
    assert one["samples"] == 359 and summary["val_kappa"] not in (0, summary["val_accuracy"])
    assert one["kappa"] == pytest.approx(summary["val_kappa"], rel=1e-6)

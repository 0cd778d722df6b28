"""``batch_size: auto``: a child of each rank tries sizes, all ranks take the same, and a resumed run keeps it."""

from __future__ import annotations

import json
import re

import pytest
import yaml

from hvd_train.jobs.batch_size import FIRST, knee
from tests.cli.running import commands, run

MODEL = """
import numpy as np
import torch

MOST = {most}


class Net(torch.nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, num_classes))

    def forward(self, x):
        if self.training and len(x) > MOST:
            raise MemoryError("planted: no memory for so many samples")
        return self.body(x)
"""


def job(folder, **settings):
    settings = {"data": {"name": "digits"}, "batch_size": "auto", "tensorboard": False, "max_steps": 4} | settings
    (folder / "job.yaml").write_text(yaml.safe_dump(settings | {"optim": {"lr": 0.01}}))


def test_the_smallest_size_that_is_nearly_as_fast_as_any():
    assert knee({8: 100.0, 16: 180.0, 32: 300.0, 64: 330.0, 128: 331.0}) == 32
    assert knee({8: 100.0, 16: 90.0}) == 8
    assert knee({8: 1.0}) == 8


LONG = pytest.mark.long("PyTorch's ranks try sizes each time")


@pytest.mark.parametrize("framework", ["pytorch", pytest.param("tensorflow", marks=LONG)])
def test_all_ranks_take_one_size_and_a_resumed_run_keeps_it(tmp_path, framework):
    """Each rank tries 8, 16, ... samples alone; the run folder has a number, and nothing is tried again."""
    job(tmp_path, framework=framework, model={"name": "mlp", "hidden": [16]})
    line = ["fit", "-c", "job.yaml", "-np", "2", "--run-dir", "run"]
    told = run(*line, cwd=tmp_path).stdout
    found = re.search(r"^batch_size: auto: (\d+) \(samples/s: 8: [\d,]+, 16: [\d,]+", told, re.MULTILINE)
    assert found, told
    size = int(found[1])
    # At least 10 steps of an epoch of 1,437 samples remain on two ranks.
    assert FIRST <= size <= 64 and size & (size - 1) == 0
    assert yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["batch_size"] == size
    again = run(*line, "--resume", "auto", "--set", "max_steps=6", cwd=tmp_path).stdout
    assert "batch_size: auto" not in again
    assert yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["batch_size"] == size
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] == 6


def test_a_size_without_memory_ends_the_child_alone(tmp_path):
    """What was tried before it counts."""
    (tmp_path / "mine.py").write_text(MODEL.format(most=16))
    job(tmp_path, model={"name": "mine:Net"})
    told = run("fit", "-c", "job.yaml", "--run-dir", "run", cwd=tmp_path).stdout
    tried = re.search(r"^batch_size: auto: (8|16) \(samples/s: 8: [\d,]+, 16: [\d,]+\)$", told, re.MULTILINE)
    assert tried, told


def test_no_size_can_be_tried(tmp_path):
    """The reason is told, and the advised cure works."""
    (tmp_path / "mine.py").write_text(MODEL.format(most=4))
    job(tmp_path, model={"name": "mine:Net"})
    told = run("fit", "-c", "job.yaml", "--run-dir", "run", cwd=tmp_path, code=2).stderr
    assert told.count("\n") == 1 and "batch_size: auto could not try a size: " in told and "planted" in told
    run("fit", "-c", "job.yaml", "--run-dir", "run", "--set", "batch_size=4", cwd=tmp_path)


def test_other_commands_and_stages_want_a_number(tmp_path):
    job(tmp_path)
    number = "batch_size is auto, which 'hvd-train fit' alone replaces by a number; --set batch_size=32, for example"
    lines = {
        ("plan", "-c", "job.yaml"): number,
        ("verify", "-c", "job.yaml", "-np", "2"): number,
        ("scale", "-c", "job.yaml", "--ranks", "1,2"): "batch_size is auto, and a study compares sizes that are known",
        ("fit", "-c", "job.yaml", "--set", "batch_size=many"): "batch_size",
    }
    for told, expected in zip(commands(*lines, cwd=tmp_path), lines.values(), strict=True):
        assert told.code == 2 and expected in told.err, told

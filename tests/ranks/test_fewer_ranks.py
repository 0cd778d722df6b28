"""``fit -np 2`` of a wide model on one host says that one rank is likely faster, and the command that it names runs."""

from __future__ import annotations

import re
from pathlib import Path

from tests.cli.running import run

MODEL = """
import os

from hvd_train.core import control_sync

os.getloadavg = lambda: (0.0, 0.0, 0.0)
control_sync.SECONDS = control_sync.MOST_SECONDS = control_sync.MPI_SECONDS = 0.0


def pytorch(input_shape, num_classes, width):
    import math
    from torch import nn

    layers = [nn.Linear(math.prod(input_shape), width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(nn.Flatten(), *layers, nn.Linear(width, num_classes))
"""


def fit(folder: Path, width: int, *words: str) -> str:
    sets = ["model.name=mine:pytorch", f"model.width={width}", "max_steps=14", "log_every_n_steps=1", "optim.lr=0.001"]
    sets += ["checkpoint.save_last=false", "checkpoint.every_n_epochs=0", "limit_val_batches=1"]
    sets += ["optim.sharded=false"]  # in shared memory hardly anything is exchanged
    keys = [word for one in sets for word in ("--set", one)]
    return run("fit", "--overwrite", "--run-dir", "run", *keys, *words, cwd=folder).stdout


def test_fit_says_that_one_rank_is_likely_faster(tmp_path):
    (tmp_path / "mine.py").write_text(MODEL)
    wide = fit(tmp_path, 2560, "-np", "2", "--set", "batch_size=4")
    (note,) = [line for line in wide.splitlines() if line.startswith("note:")]
    match = re.fullmatch(
        r"note: 2 ranks spend (\d+)% of the time in the exchange of 6.7 million weights; 1 rank with \d+ threads is "
        r"likely to be faster on this host \((-np 1 --set threads=\d+ --set batch_size=8)\)",
        note,
    )
    assert match and int(match[1]) >= 10
    assert "1 rank, global batch 8" in fit(tmp_path, 2560, *match[2].split())
    assert "note:" not in fit(tmp_path, 64, "-np", "2")

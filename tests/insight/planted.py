"""Trainings with a fault that makes them slow, and the same without it: is the fault found, and its gain foretold?

python -m tests.insight.planted [NAME...] prints the figures of each.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import yaml

from hvd_train.insight.explain import case_of
from hvd_train.insight.findings import Case, Finding, findings
from tests.limits import SECONDS

ROOT = Path(__file__).parents[2]
WARM_UP = 10  # steps that are left out
# A user's module. Sleeping stands for slow disks, networks and hosts: it takes no core from anybody.
MODULE = """
import itertools
import os
import time

import numpy as np

import hvd_train

RANK = int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("HOROVOD_RANK", "0")))


def here(rank):
    return rank is None or rank == RANK


calls = itertools.count(1)


def slow(array, rng, seconds, rank=None):
    if here(rank) and next(calls) % 16 == 0:  # not each time, because to wake up takes a busy core some time
        time.sleep(16 * seconds)
    return array


def network(num_classes, seconds=0.0, rank=None, more=0.0, uneven=0.0, evaluate=0.02, width=512):
    import torch

    random = np.random.default_rng(RANK)

    class Slow(torch.nn.Module):
        def __init__(self):
            super().__init__()
            wide = [torch.nn.Linear(64, width), torch.nn.ReLU(), torch.nn.Linear(width, width), torch.nn.ReLU()]
            self.body = torch.nn.Sequential(torch.nn.Flatten(), *wide, torch.nn.Linear(width, num_classes))

        def forward(self, x):
            if self.training:
                time.sleep(seconds + more * here(rank) + uneven * random.integers(2))
            else:
                time.sleep(evaluate)
            return self.body(x)

    return Slow()


class Sleeper(hvd_train.Hook):
    def on_step(self, trainer, info):
        if here(0):
            time.sleep(0.02)


class SlowDisk(hvd_train.Hook):
    def on_start(self, trainer):
        fsync = os.fsync
        os.fsync = lambda file: (time.sleep(0.1), fsync(file))
"""
MODEL = {"name": "planted:network", "seconds": 0.02}
BASE = {
    "data": {"name": "digits"},
    "model": MODEL,
    "batch_size": 16,
    "max_epochs": 5,
    "log_every_n_steps": 20,
    "check_val_every_n_epoch": 5,
    "tensorboard": False,
    "optim": {"lr": 0.01},
}


def sleeping(seconds: float, image_size: int = 8, workers: int = 1, **options: int) -> dict[str, object]:
    transform = {"name": "planted:slow", "options": {"seconds": seconds} | options}
    return {"data": {"name": "digits", "image_size": image_size, "workers": workers, "transforms": [transform]}}


@dataclass(frozen=True)
class Planted:
    """``cause``: what the first finding must be. ``fault``, ``cured``: keys in addition to BASE.

    ``cores``: of all ranks, with the fault. ``busy``: another program runs on this core.
    """

    cause: str
    fault: dict[str, object] = field(default_factory=dict)
    cured: dict[str, object] = field(default_factory=dict)
    ranks: int = 2
    cores: str = ""
    busy: int | None = None


CNN = {"max_epochs": 10, "model": {"name": "cnn"}, "data": {"name": "digits", "image_size": 28}}
KERAS = CNN | {"framework": "tensorflow", "max_epochs": 6}
SLOW_EVALUATION = {"batch_size": 64, "max_epochs": 15, "model": MODEL | {"evaluate": 0.06}}
SLOW_DISK = {"hooks": ["planted:SlowDisk"], "max_epochs": 10}
WIDE = {"model": MODEL | {"width": 1024, "seconds": 0.0}}
MLP = {"model": {"name": "mlp"}, "max_epochs": 10}
FAULTS = {
    "slow loader": Planted("input", sleeping(0.004)),
    "too few workers, Keras": Planted("input", KERAS | sleeping(0.001, 28), KERAS | sleeping(0.001, 28, workers=8)),
    "too few workers": Planted("input", sleeping(0.004), sleeping(0.004, workers=4)),
    "slow loader of a rank": Planted("input of one rank", sleeping(0.004, rank=1)),
    "slow rank": Planted("slow rank", {"model": MODEL | {"more": 0.04, "rank": 1}}),
    "slow hook": Planted("hooks and log", {"hooks": ["planted:Sleeper"]}),
    "many evaluations": Planted(
        "evaluations",
        SLOW_EVALUATION | {"check_val_every_n_epoch": 1},
        SLOW_EVALUATION | {"check_val_every_n_epoch": 5},
    ),
    "slow disk": Planted(
        "checkpoints",
        SLOW_DISK | {"checkpoint": {"every_n_steps": 10}},
        SLOW_DISK | {"checkpoint": {"every_n_steps": 200}},
    ),
    "many checkpoints": Planted(
        "checkpoints", WIDE | {"checkpoint": {"every_n_steps": 1}}, WIDE | {"checkpoint": {"every_n_steps": 20}}
    ),
    "uneven work": Planted("uneven work", {"model": MODEL | {"seconds": 0.0, "uneven": 0.04}}),
    "shared core": Planted("shared cores", CNN, CNN, cores="0"),
    "busy core": Planted("slow rank", CNN, CNN, busy=1),
    "unused core": Planted("unused cores", CNN | {"threads": 1}, CNN | {"threads": 2}, ranks=1),
    "small batches": Planted("small batches", MLP | {"batch_size": 4}, MLP | {"batch_size": 8}),
}


def trained(folder: Path, name: str, settings: dict[str, object], ranks: int, cores: str = "") -> Case:
    (folder / "planted.py").write_text(MODULE)
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(BASE | settings))
    line = ["taskset", "-c", cores] if cores else []
    line += [sys.executable, "-m", "hvd_train", "fit", "-c", f"{name}.yaml", "--run-dir", name]
    line += ["-np", str(ranks)] if ranks > 1 else []
    own = os.environ | {"PYTHONPATH": f"{ROOT}"}
    done = subprocess.run(line, cwd=folder, env=own, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return case_of(folder / name, WARM_UP)


def per_sample(case: Case) -> float:
    """The seconds of a sample, without the start."""
    batch = case.whole("batch_size", 32) * case.recorded.ranks
    return case.seconds / float(case.recorded.weights @ case.recorded.steps) / batch


def tried(folder: Path, one: Planted) -> tuple[Sequence[Finding], float]:
    """What is found with the fault, and how many times as fast the training is without it."""
    with ExitStack() as stack:
        if one.busy is not None:
            line = ["taskset", "-c", str(one.busy), sys.executable, "-c", "while True: pass"]
            other = subprocess.Popen(line)
            stack.callback(other.wait)
            stack.callback(other.kill)
        case = trained(folder, "fault", one.fault, one.ranks, one.cores)
    cured = trained(folder, "cured", one.cured, one.ranks)
    return findings(case), per_sample(case) / per_sample(cured)


def foretold(found: Finding, real: float) -> bool:
    """Return whether the gain of a finding is within 10 % of the real one, or bounds it."""
    difference = (found.gain or math.nan) / real - 1
    return (difference <= 0.1 or found.bound == "at most") and (difference >= -0.1 or found.bound == "at least")


def main(names: Sequence[str]) -> None:
    for name in names or FAULTS:
        one, began = FAULTS[name], time.monotonic()
        with TemporaryDirectory() as folder:
            found, real = tried(Path(folder), one)
        first = found[0] if found else None
        told = first.gain_words if first else "nothing"
        verdict = "ok" if first and first.cause == one.cause and foretold(first, real) else "-"
        print(f"{verdict:2} {name:22} {real:5.2f}, told: {told}  {time.monotonic() - began:4.0f} s", flush=True)
        for finding in found:
            print(f"      {finding.cause}: {finding.gain_words}: {finding.evidence}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])

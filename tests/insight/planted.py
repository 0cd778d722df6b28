"""Trainings with a fault that makes them slow, and the same without it: is the fault found, and its gain foretold?

python -m tests.insight.planted [NAME...] prints the figures of each.
"""

from __future__ import annotations

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
import os
import time

import numpy as np

import hvd_train

RANK = int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("HOROVOD_RANK", "0")))


def here(rank):
    return rank is None or rank == RANK


def slow(array, rng, seconds, rank=None):
    if here(rank):
        time.sleep(seconds)
    return array


def network(num_classes, seconds=0.0, rank=None, more=0.0, uneven=0.0):
    import torch

    random = np.random.default_rng(RANK)

    class Slow(torch.nn.Module):
        def __init__(self):
            super().__init__()
            wide = [torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Linear(512, 512), torch.nn.ReLU()]
            self.body = torch.nn.Sequential(torch.nn.Flatten(), *wide, torch.nn.Linear(512, num_classes))

        def forward(self, x):
            if self.training:
                time.sleep(seconds + more * here(rank) + uneven * random.integers(2))
            elif not self.training:
                time.sleep(0.02)
            return self.body(x)

    return Slow()


class Sleeper(hvd_train.Hook):
    def on_step(self, trainer, info):
        if here(0):
            time.sleep(0.02)
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


def sleeping(seconds: float, **options: int) -> dict[str, object]:
    return {
        "data": {"name": "digits", "transforms": [{"name": "planted:slow", "options": {"seconds": seconds} | options}]}
    }


@dataclass(frozen=True)
class Planted:
    """``cause``: what the first finding must be. ``fault``, ``cured``: keys in addition to BASE.

    ``cores``: of all ranks, with the fault. ``busy``: another program runs on this core. ``bound``: the foretold gain
    is an upper bound.
    """

    cause: str
    fault: dict[str, object] = field(default_factory=dict)
    cured: dict[str, object] = field(default_factory=dict)
    ranks: int = 2
    cores: str = ""
    busy: int | None = None
    bound: bool = False


KERAS = {"framework": "tensorflow", "model": {"name": "mlp"}}
CNN = {"model": {"name": "cnn"}, "data": {"name": "digits", "image_size": 28}}
LARGE = {"batch_size": 64, "max_epochs": 12}
MLP = {"model": {"name": "mlp"}, "max_epochs": 10}
WORKERS = {"transforms": sleeping(0.004)["data"]["transforms"], "workers": 4}
FAULTS = {
    "slow loader": Planted("input", sleeping(0.004)),
    "slow loader, Keras": Planted("input", KERAS | sleeping(0.001), KERAS),
    "too few workers": Planted("input", sleeping(0.004), {"data": {"name": "digits", **WORKERS}}),
    "slow loader of a rank": Planted("input of one rank", sleeping(0.004, rank=1)),
    "slow rank": Planted("slow rank", {"model": MODEL | {"more": 0.04, "rank": 1}}),
    "slow hook": Planted("hooks and log", {"hooks": ["planted:Sleeper"]}),
    "many evaluations": Planted(
        "evaluations", LARGE | {"check_val_every_n_epoch": 1}, LARGE | {"check_val_every_n_epoch": 6}
    ),
    "many checkpoints": Planted(
        "checkpoints", {"checkpoint": {"every_n_steps": 1}}, {"checkpoint": {"every_n_steps": 20}}
    ),
    "uneven work": Planted("uneven work", {"model": MODEL | {"seconds": 0.0, "uneven": 0.04}}),
    "shared core": Planted("shared cores", CNN, CNN, cores="0"),
    "busy core": Planted("slow rank", CNN, CNN, busy=1),
    "unused core": Planted("unused cores", CNN | {"threads": 1}, CNN | {"threads": 2}, ranks=1, bound=True),
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


def main(names: Sequence[str]) -> None:
    for name in names or FAULTS:
        one, began = FAULTS[name], time.monotonic()
        with TemporaryDirectory() as folder:
            found, real = tried(Path(folder), one)
        first = found[0] if found else None
        told = first.gain if first and first.gain else float("nan")
        verdict = "ok" if first and first.cause == one.cause and abs(told / real - 1) <= 0.1 else "-"
        print(
            f"{verdict:2} {name:22} told {told:5.2f}, real {real:5.2f}  {time.monotonic() - began:4.0f} s", flush=True
        )
        for finding in found:
            print(f"      {finding.cause}: {finding.gain_words}: {finding.evidence}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])

"""One bit of one weight flips on one rank of a launched job: the job ends, and says where."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from hvd_train.launch.start import command, environment
from tests.limits import SECONDS

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("framework", "launcher", "size"),
    [("pytorch", "mpirun", 3), ("tensorflow", "horovodrun", 2)],
)
def test_a_flipped_bit_ends_the_job_and_is_named(tmp_path, framework, launcher, size):
    config = ROOT / "scripts" / "configs" / "tiny.yaml"
    sets = [f"framework={framework}", "agreement_every_n_steps=5", "checkpoint.every_n_steps=5", "tensorboard=false"]
    arguments = ["fit", "-c", str(config), "--run-dir", str(tmp_path), *(w for s in sets for w in ("--set", s))]
    line = command(size, launcher, arguments, "tests.ranks.flipped")
    env = environment() | {"PYTHONPATH": str(ROOT)}  # before other packages: one of them brings a "tests" too
    job = subprocess.run(line, cwd=ROOT, env=env, capture_output=True, text=True, timeout=SECONDS, check=False)
    others = "rank 0" if size == 2 else "ranks 0, 1"
    told = (
        f"error[rank {size - 1}]: the weights of rank {size - 1} differ from those of {others}, first in fc2.kernel; "
        "epoch 1, step 10; look for a faulty host"
    )
    assert job.stderr.count(told) == 1 and "Traceback" not in job.stderr, job.stdout + job.stderr
    assert job.returncode == 5, job.stderr
    saved = sorted(p.name for p in (tmp_path / "checkpoints").iterdir())
    assert [name for name in saved if name.startswith("step")] == ["step-00000005"], "none of weights that differ"

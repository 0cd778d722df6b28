"""Hosts have unequal cores: what ranks compute after an exchange has the same bits under any number of threads."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from hvd_train.launch.start import command, environment
from tests.limits import SECONDS

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("framework", ["pytorch", "tensorflow"])
def test_the_bits_after_an_exchange_do_not_depend_on_threads(framework):
    pytest.importorskip({"pytorch": "torch"}.get(framework, framework))
    found = []
    for threads in ("1", "2"):
        line = [sys.executable, "-m", "tests.compression.bits", framework, threads]
        run = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS, check=False)
        assert run.returncode == 0, run.stderr[-2000:]
        found.append(json.loads(run.stdout.splitlines()[-1]))
    assert len(found[0]) == 32
    assert not [key for key in found[0] if len({one[key] for one in found}) > 1]


@pytest.mark.parametrize("framework", ["pytorch", "tensorflow"])
def test_ranks_of_unequal_threads_stay_equal(tmp_path, framework):
    """PowerSGD's basis and LARS' norms, compared after every step."""
    pytest.importorskip({"pytorch": "torch"}.get(framework, framework))
    model = "{name: mlp, hidden: [1024, 1024]}"
    sets = [f"framework={framework}", f"model={model}", "data.name=digits", "batch_size=20", "max_steps=5"]
    sets += ["exchange={compression: powersgd, rank: 32}", "gradient_clip_val=0.5", "agreement_every_n_steps=1"]
    sets += ["optim={name: lars, lr: 1, momentum: 0.9}", "tensorboard=false", "checkpoint.save_last=false"]
    keys = [word for key in [*sets, "checkpoint.save_top_k=0", f"run_dir={tmp_path}"] for word in ("--set", key)]
    own = 'OMP_NUM_THREADS=$((1 + OMPI_COMM_WORLD_RANK)) exec "$@"'
    line = command(2, "mpirun", ["fit", *keys])
    at = line.index(sys.executable)
    line = [*line[:at], "bash", "-c", own, "rank", *line[at:]]
    env = {name: value for name, value in environment().items() if name != "OMP_NUM_THREADS"}
    run = subprocess.run(line, cwd=ROOT, env=env, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert run.returncode == 0, run.stdout[-1000:] + run.stderr[-2000:]

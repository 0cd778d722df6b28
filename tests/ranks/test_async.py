"""Ranks that do not wait for one another, as real processes: slow, stopped, killed, gone on with, refused."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

import pytest

from hvd_train.launch.start import environment
from tests.ranks.job import BIN, ROOT, SECONDS, Job, settings, summary

MODE, EPOCHS, STEPS, SAMPLES = "exchange.mode=async", 25, 29, 1438
LONG = [MODE, "optim.lr=0.05", f"max_epochs={EPOCHS}", "checkpoint.save_top_k=0"]


def ended(folder, epochs=EPOCHS):
    """The run is whole: each step and sample, and the model has learned."""
    whole = summary(folder)
    assert (whole["steps"], whole["train_samples"]) == (epochs * STEPS, epochs * SAMPLES)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for epoch in range(1, epochs + 1):
        taken = [row["samples"] for row in rows if row["event"] == "train" and row["epoch"] == epoch]
        assert sum(taken) == SAMPLES, f"the lines of epoch {epoch}"
    return whole["val_accuracy"] > 0.9


@pytest.mark.parametrize("size", [2, 4])
def test_windows_of_mpi(tmp_path, size):
    line = [BIN / "mpirun", "--oversubscribe", "-np", size, sys.executable, "-m", "tests.ranks.windows", tmp_path]
    found = subprocess.run(
        [*map(str, line)], cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert (found.returncode, found.stdout) == (0, "ok\n"), found.stderr


def test_a_signal_saves_and_the_run_goes_on(tmp_path):
    """On the rank that is slow: all meet where the parts that were taken end."""
    cut, sets = tmp_path / "cut", LONG
    # It takes two parts of an epoch at least, so that it stands before the last one, and holds up its epoch.
    job = Job("-np", tmp_path, *settings(cut, *sets), HVD_TRAIN_FAULT="step:1:20:delay,step:1:30:stop")
    slow = job.stopped(1)
    slow.send_signal(signal.SIGTERM)
    slow.send_signal(signal.SIGCONT)
    code, out, err = job.end()
    assert code == 75 and out.count("stopped by SIG") == 1 and "Traceback" not in err, err
    saved = int(sorted((cut / "checkpoints").glob("step-*"))[-1].name[5:])
    assert saved == json.loads((cut / "metrics.jsonl").read_text().splitlines()[-1])["step"] < EPOCHS * STEPS
    code, out, err = Job("mpirun", tmp_path, *settings(cut, *sets), "--resume", "auto").end()
    assert code == 0 and f"resumed at step {saved}:" in out, err
    assert ended(cut)


def test_a_rank_that_is_killed_is_told_and_the_run_goes_on(tmp_path):
    cut, sets = tmp_path / "cut", ["framework=tensorflow", *LONG, "checkpoint.every_n_steps=10"]
    # 10 steps of 2 ranks have 20 parts, of which it takes 2 to 19: it stands after the third save, before the end.
    job = Job("-np", tmp_path, *settings(cut, *sets), HVD_TRAIN_FAULT="step:1:60:stop")
    job.stopped(1).send_signal(signal.SIGKILL)
    code, _, err = job.end()
    assert code == 5 and err.startswith("error: rank 1 was ended by SIGKILL; in ") and err.count("\n") == 1, err
    code, out, err = Job("-np", tmp_path, *settings(cut, *sets), "--resume", "auto").end()
    assert code == 0 and "resumed at step" in out, err
    assert ended(cut)


def test_gloo_is_refused(tmp_path):
    code, _, err = Job("horovodrun --gloo", tmp_path, *settings(tmp_path / "run", MODE)).end()
    assert code != 0 and err.count("exchange.mode: async does not go with ranks started with Gloo") == 1


def test_an_mpi_without_one_sided_memory_is_refused(tmp_path):
    """As between hosts over TCP, where Open MPI 4.1 gives programs with threads none."""
    sets = settings(tmp_path / "run", MODE)
    code, _, err = Job("-np", tmp_path, *sets, OMPI_MCA_osc="pt2pt").end()
    assert code == 2 and "this MPI gives no memory that other ranks read and change" in err, (code, err)
    assert "Traceback" not in err and not (tmp_path / "run" / "summary.json").exists()


def test_one_rank_needs_no_mpi(tmp_path):
    code, _, err = Job("-np", tmp_path, *settings(tmp_path / "run", MODE, "max_epochs=6"), "-np", "1").end()
    assert code == 0 and ended(tmp_path / "run", 6), err

"""``hvd-train fit``: what it says, what it writes, and what it tries before."""

from __future__ import annotations

import json
import re

import pytest
import yaml

from hvd_train.config import load_config
from hvd_train.core.shares import SHOWN
from tests.cli.running import ROOT, commands, run


def test_a_dry_run_of_one_rank_is_its_configuration(tmp_path):
    (done,) = commands(["fit", "--set", "optim.lr=0.3", "--run-dir", "x", "--dry-run"], cwd=tmp_path)
    head, *text = done.out.splitlines()
    assert head == "# 1 rank, this process. It would train with this configuration:"
    assert load_config(base=yaml.safe_load("\n".join(text))) == load_config(None, ["optim.lr=0.3"], run_dir="x")
    world = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
    told = [run("fit", "--dry-run", cwd=tmp_path, OMPI_COMM_WORLD_RANK=rank, **world).stdout for rank in "01"]
    assert told[0].startswith("# 2 ranks, started by mpirun. ") and not told[1]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "extra", [["--set", "precision=16-mixed"], ["-np", "2", "--set", "framework=tensorflow"]], ids=" ".join
)
def test_a_check_tries_all_and_writes_nothing(tmp_path, extra):
    lines = run("fit", "--check", "--run-dir", "deep/run", *extra, cwd=tmp_path).stdout.splitlines()
    samples = 64 if "-np" in extra else 32
    assert "1,438 training and 359 validation samples" in lines[0]
    assert lines[-2].startswith(f"checked: configuration, data, model; one step of {samples} samples, forward, ")
    assert "; one validation batch (loss 2." in lines[-2]
    assert lines[-1] == "nothing was written; without --check the run folder will be deep/run"
    assert not list(tmp_path.iterdir())


def test_a_check_finds_what_a_training_would(trained, tmp_path):
    """A run folder in use, a checkpoint to go on from, a model that does not take the data, limits that leave samples
    out. Nothing is written, nor by a fit that is refused."""
    own = ["fit", "-c", ROOT / "scripts/configs/tiny.yaml", "--set", "precision=64", "--run-dir", trained[0]]
    line, go_on = [*own, "--check"], ["--resume", "auto"]
    limits = ["--set", "limit_train_batches=2", "--set", "limit_val_batches=1"]
    before = {path: path.stat().st_mtime_ns for path in trained[0].rglob("*")}
    used, resumed, changed, wrong, limited, refused = commands(
        line,
        [*line, *go_on],
        [*line, *go_on, "--set", "model.hidden=[9]"],
        ["fit", "--check", "--set", "model.name=cnn", "--set", "data.name=diabetes"],
        ["fit", "--check", *limits],
        own,
        cwd=tmp_path,
    )
    last = used.out.splitlines()[-1]
    assert last.startswith("nothing was written; a start would be refused: the run folder holds a run already; "), last
    assert "give --resume auto to go on" in last and used.code == resumed.code == limited.code == 0
    assert ", model, checkpoint step-" in resumed.out
    assert changed.code == 2 and "model.hidden: " in changed.err
    assert wrong.code == 3 and wrong.err.startswith("error: ") and wrong.err.count("\n") == 1
    assert limited.out.splitlines()[1] == (
        "1 rank, global batch 32, 2 of 45 steps per epoch, 64 of 1,438 samples (limit_train_batches); "
        "an evaluation takes 32 of 359 samples (limit_val_batches)"
    )
    assert refused.code == 2 and "the run folder holds a run already" in refused.err and "--overwrite" in refused.err
    assert {path: path.stat().st_mtime_ns for path in trained[0].rglob("*")} == before
    assert not list(tmp_path.iterdir())


def test_a_run_tells_what_it_does(trained):
    folder, text = trained
    lines = text.splitlines()
    assert lines[0] == "pytorch, mlp: 2,410 weights; digits: 1,438 training and 359 validation samples"
    assert lines[1] == "1 rank, global batch 50, 29 steps per epoch"
    *_, header, first, second, last = lines
    assert " ".join(header.split()) == "epoch step loss accuracy val loss val accuracy lr samples/s seconds"
    assert first.split()[:2] == ["1/2", "29"] and second.split()[:2] == ["2/2", "58"]
    assert re.fullmatch(
        r"done: validation loss \S+, accuracy \S+, \S+ samples/s; best: val_loss \S+ in epoch 2, checkpoint step-0*58; "
        f"run folder {folder}",
        last,
    )
    names = sorted(path.name for path in folder.iterdir())
    written = "checkpoints config.yaml environment.json metrics.jsonl steps.jsonl summary.json tensorboard"
    assert names == written.split()
    summary = json.loads((folder / "summary.json").read_text())
    keys = "framework model world_size epochs steps train_samples steps_per_epoch val_samples train_loss train_accuracy"
    assert list(summary) == [*keys.split(), "val_loss", "val_accuracy", "samples_per_second", "weights_sha256", "time"]


def test_events_are_read_by_tensorboard(trained):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(trained[0] / "tensorboard"))
    events.Reload()
    assert set(events.Tags()["scalars"]) == {
        "loss/train", "loss/val", "accuracy/train", "accuracy/val", "lr", "samples_per_second", "memory_bytes",
        *(f"time/{name}" for name in SHOWN),
    }  # fmt: skip
    assert [event.step for event in events.Scalars("loss/val")] == [29, 58]


MINE = """
import numpy as np
import torch

def build(input_shape, num_classes):
    return torch.nn.Linear(*input_shape, num_classes)

def pairs():
    x = np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32)
    y = x.argmax(1)
    return (x, y), (x[:10], y[:10])
"""


def test_code_beside_the_configuration_is_found_from_everywhere(tmp_path):
    """By the training on ranks of its own, by its run afterwards, and by nobody who did not say so."""
    jobs, away, folder = tmp_path / "jobs", tmp_path / "away", tmp_path / "run"
    jobs.mkdir()
    away.mkdir()
    (jobs / "mine.py").write_text(MINE)
    file = jobs / "job.yaml"
    named = f"model: {{name: 'mine:build'}}\ndata: {{name: 'mine:pairs'}}\nrun_dir: {folder}\ntensorboard: false\n"
    file.write_text(named)
    run("fit", "-c", "../jobs/job.yaml", "-np", "2", cwd=away)
    assert f"code_dir: {jobs}" in (folder / "config.yaml").read_text()
    assert json.loads(run("eval", "--run-dir", str(folder), cwd=away).stdout)["samples"] == 10
    names = ["--set", "model.name=mine:build", "--set", "data.name=mine:pairs"]
    told = run("eval", "--run-dir", str(folder), *names, cwd=away, code=3).stderr
    assert told == (
        "error: there is no module 'mine'; data.name: mine:pairs; it was looked for in "
        f"{away}; start there where it lies, or set code_dir\n"
    )
    assert run("eval", "--run-dir", str(folder), *names, "--set", f"code_dir={jobs}", cwd=away).stdout
    (jobs / "mine.py").rename(jobs / "other.py")
    told = run("fit", "-c", str(file), "--overwrite", cwd=away, code=3).stderr
    assert f"looked for in {jobs}, then in {away}; " in told and told.count("\n") == 1

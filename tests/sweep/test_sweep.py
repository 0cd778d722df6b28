"""A sweep: its trials are what was asked for, each trains as a run of its own would, and none stops the others."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image

from hvd_train.config import load_config
from hvd_train.errors import ConfigError
from hvd_train.launch.start import environment
from hvd_train.sweep import array, halving, progress, results
from hvd_train.sweep import folder as sweeps
from hvd_train.sweep.rungs import describe, ladder
from hvd_train.sweep.trials import plan
from tests.limits import SECONDS

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
TINY = ROOT / "scripts" / "configs" / "tiny.yaml"
MPIRUN = [str(BIN / "mpirun"), "--bind-to", "none", "--map-by", "slot:oversubscribe", "-np"]


def planned(*params, draws=None, seed=0, folder=Path("s")):
    return plan(TINY, ["max_epochs=1"], params, draws, seed, folder)


def test_grid():
    trials = planned("optim.lr=0.1,1e-2", "model.hidden=[8],[8, 4]")
    assert [(t.config.optim.lr, t.config.model.hidden) for t in trials] == [
        (0.1, [8]), (0.1, [8, 4]), (0.01, [8]), (0.01, [8, 4]),
    ]  # fmt: skip
    assert [t.config.run_dir for t in trials][::3] == ["s/trial-000", "s/trial-003"]
    assert all(t.config.max_epochs == 1 for t in trials)


def test_values_are_read_as_set_reads_them():
    """A text in quotes became a number, and 2:00:00 7,200: other values than --set gives for the same words."""
    trials = planned("""model.options={a: "1e3"},{a: 1e3}""", "optim.lr=1e-1", 'slurm.time=2:00:00,"30"')
    assert [t.values["model.options"] for t in trials[::2]] == [{"a": "1e3"}, {"a": 1000.0}]
    assert [t.config.slurm.time for t in trials[:2]] == ["2:00:00", "30"]
    trials = planned("""data.options.tag="007",'1e3',7,1e3""")
    assert [t.config.data.options["tag"] for t in trials] == ["007", "1e3", 7, 1000.0]


def test_random():
    params = ("optim.lr=log:1e-4..1e-1", "global_batch_size=8..12", "optim.momentum=0..0.9", "framework=pytorch")
    trials, again = planned(*params, draws=200), planned(*params, draws=200)
    assert (
        [t.values for t in trials]
        == [t.values for t in again]
        != [t.values for t in planned(*params, draws=200, seed=1)]
    )
    rates = [t.config.optim.lr for t in trials]
    assert 1e-4 <= min(rates) < 3e-4 and 3e-2 < max(rates) <= 1e-1
    assert 60 < sum(rate < 3.16e-3 for rate in rates) < 140  # half of them below the middle of the logarithms
    assert {t.config.global_batch_size for t in trials} == {8, 9, 10, 11, 12}


@pytest.mark.parametrize(
    ("params", "what"),
    [
        (["optim.lrr=0.1"], "--param optim.lrr=0.1: optim.lrr: unknown key; did you mean 'optim.lr'?"),
        (["optim.rl=0.1,0.01"], "--param optim.rl=0.1: optim.rl: unknown key; did you mean 'optim.lr'?"),
        (["optim.lr=-1,0.1"], "--param optim.lr=-1: optim.lr: must be "),
        (["optim.lr"], "a parameter has the form KEY=VALUE,VALUE; --param optim.lr"),
        (["optim.lr=1e-4..1e-1"], "a range is for --random N"),
        (["optim.lr=[1"], "not valid YAML; --param"),
        (["optim.lr=1", "optim.lr=2"], "stands twice"),
        ([], "no parameter is given"),
        (["task.ignore_index=-100,0"], "val_loss decides which trial is best, and the trials have different losses"),
    ],
)
def test_mistakes(params, what):
    with pytest.raises(ConfigError) as caught:
        planned(*params)
    assert what in str(caught.value) and "\n" not in str(caught.value)


def test_trials_of_different_losses_are_compared_by_a_metric(tmp_path):
    """The smallest of two different losses says nothing: mse of 0.02 is not better than cross_entropy of 0.3."""
    params = ["task.class_weights=null,balanced"]
    assert len(plan(TINY, ["checkpoint.monitor=val_accuracy"], params, None, 0, tmp_path)) == 2


def finished(trial, **summary):
    run_dir = Path(trial.config.run_dir)
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "summary.json").write_text(json.dumps(summary | {"samples_per_second": 1000.0}))


def test_a_sweep_does_not_begin_in_the_folder_of_a_run(tmp_path):
    trials = planned("optim.lr=0.1,0.01", folder=tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"event": "train"}\n')
    with pytest.raises(ConfigError, match="the folder holds a run; .*; give the sweep a folder of its own"):
        sweeps.begin(sweeps.Sweep(tmp_path, trials, ladder(trials, None)), resume=False)
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_results(tmp_path):
    trials = planned("optim.lr=0.1,0.01,0.001", folder=tmp_path)
    sweep = sweeps.Sweep(tmp_path, trials, ladder(trials, None))
    sweeps.begin(sweep, resume=False)
    with pytest.raises(ConfigError, match="holds a sweep already"):
        sweeps.begin(sweep, resume=False)
    with pytest.raises(ConfigError, match="holds another sweep"):
        sweeps.begin(replace(sweep, trials=trials[:2]), resume=True)
    with pytest.raises(ConfigError, match="no sweep to continue"):
        sweeps.begin(replace(sweep, folder=tmp_path / "none"), resume=True)
    assert sweeps.load(tmp_path) == sweep
    with pytest.raises(ConfigError, match="holds no sweep; .*none; give the --run-dir of one"):
        sweeps.load(tmp_path / "none")
    for text in ("[]", "3", "null", "{"):  # not what a run writes: as if it had not ended
        (Path(trials[0].config.run_dir) / "summary.json").write_text(text)
        (Path(trials[0].config.run_dir) / "failed.json").write_text(text)
        assert sweeps.state(sweep, trials[0]).word == "waiting"
    (Path(trials[0].config.run_dir) / "failed.json").unlink()
    finished(trials[0], val_loss=0.5, val_accuracy=0.8)
    finished(trials[1], val_loss=0.25, val_accuracy=0.9)
    sweeps.fail(trials[2], "the training loss is nan; step 3", 6)
    text = results.finish(sweep)
    assert "best: trial-001 (optim.lr=0.01), val_loss 0.2500" in text and "1 of 3 trials failed" in text
    rows = list(csv.DictReader((tmp_path / "results.csv").open()))
    assert [row["val_loss"] for row in rows] == ["0.5", "0.25", ""] and "loss is nan" in rows[2]["state"]
    assert load_config(tmp_path / "best.yaml").optim.lr == 0.01
    with Image.open(tmp_path / "results.png") as picture:
        assert min(picture.size) > 300
    sweeps.begin(sweep, resume=True)
    assert [sweeps.state(sweep, trial).word for trial in trials] == ["done", "done", "waiting"]
    for trial in trials:
        (Path(trial.config.run_dir) / "summary.json").unlink(missing_ok=True)
        sweeps.fail(trial, "no such file", 3)
    with pytest.raises(ConfigError, match="all 3 trials failed, the first with: no such file") as caught:
        results.finish(sweep)
    assert caught.value.exit_code == 3


def test_the_best_trial_has_the_largest_accuracy(tmp_path):
    trials = plan(TINY, ["checkpoint.monitor=val_accuracy"], ["optim.lr=0.1,0.01"], None, 0, tmp_path)
    for trial, accuracy in zip(trials, (0.8, 0.9), strict=True):
        finished(trial, val_loss=1 - accuracy, val_accuracy=accuracy)
    assert [trial.number for trial in halving.best_first(sweeps.Sweep(tmp_path, trials, []), trials)] == [1, 0]


@pytest.mark.parametrize("eta", [None, 2])
def test_trials_without_a_value_win_no_sweep(tmp_path, capsys, eta):
    """As where no label counted in the evaluation: their loss was 0, and the first of them was the best."""
    trials = plan(TINY, ["max_epochs=2"], ["optim.lr=0.1,0.01"], None, 0, tmp_path)
    sweep = sweeps.Sweep(tmp_path, trials, ladder(trials, eta))
    sweeps.begin(sweep, resume=False)
    with progress.live(sweep):
        for trial in trials:
            finished(trial, val_loss=None, **({"paused_at": 1} if eta else {}))
    assert halving.turn(sweep)[0] == []
    text = results.finish(sweep)
    assert text.endswith("best: none, as no trial has a value of val_loss") and not (tmp_path / "best.yaml").exists()
    assert "trial-000 (optim.lr=0.1): " in (shown := capsys.readouterr().out) and "no value of val_loss" in shown


@pytest.mark.parametrize(
    ("sets", "trials", "eta", "what"),
    [
        (["max_epochs=8"], 8, 2, "8 trials to epoch 1, 4 to epoch 2, 2 to epoch 4, 1 to the end"),
        (["max_epochs=4"], 9, 2, "9 trials to epoch 1, 4 to epoch 2, 2 to the end"),
        (["max_epochs=20"], 9, 3, "9 trials to epoch 2, 3 to epoch 6, 1 to the end"),
        (["max_epochs=9", "check_val_every_n_epoch=2"], 5, 2, "5 trials to epoch 2, 2 to epoch 4, 1 to the end"),
    ],
)
def test_rungs(sets, trials, eta, what):
    lengths = ",".join(str(0.1 / (k + 1)) for k in range(trials))
    assert describe(ladder(plan(TINY, sets, [f"optim.lr={lengths}"], None, 0, Path("s")), eta)) == what


@pytest.mark.parametrize(
    ("sets", "param", "what"),
    [
        ([], "max_epochs=4,8", "max_epochs differs between trials, which --halving compares"),
        (["max_epochs=null", "max_steps=9"], "optim.lr=0.1,0.2", "max_epochs is not set; set it"),
        (["checkpoint.monitor=train_loss"], "optim.lr=0.1,0.2", "and checkpoint.monitor is train_loss"),
        (["max_epochs=1"], "optim.lr=1,2", r"too few trials \(2\) or evaluations \(1 a trial\) to continue 1 in"),
    ],
)
def test_halving_mistakes(sets, param, what):
    with pytest.raises(ConfigError, match=what):
        ladder(plan(TINY, sets, [param], None, 0, Path("s")), 2)


def test_the_best_of_a_rung_go_on(tmp_path):
    """Five trials in rungs of 5, 2 and 1; what is decided stays, also when a trial that failed is tried again."""
    trials = plan(TINY, ["max_epochs=4"], ["optim.lr=0.5,0.4,0.3,0.2,0.1"], None, 0, tmp_path)
    sweep = sweeps.Sweep(tmp_path, trials, ladder(trials, 2))
    sweeps.begin(sweep, resume=False)

    def numbers():
        found, until = halving.turn(sweep)
        return [trial.number for trial in found], until

    assert numbers() == ([0, 1, 2, 3, 4], 1)
    for trial, loss in zip(trials[:4], (0.4, float("nan"), 0.2, 0.3), strict=True):
        finished(trial, val_loss=loss, paused_at=1)
    sweeps.fail(trials[4], "no such file", 3)
    assert results.report(sweep) == 5
    assert numbers() == ([2, 3], 2)
    finished(trials[2], val_loss=0.19, paused_at=2)
    sweeps.fail(trials[3], "the training loss is nan", 6)
    sweeps.begin(sweep, resume=True)
    assert numbers() == ([3], 2), "which failed in the open rung; not the one before"
    finished(trials[3], val_loss=0.1, paused_at=2)
    assert numbers() == ([3], None)
    finished(trials[3], val_loss=0.22)
    assert numbers() == ([], None) and results.left(sweep) == 0
    assert sweeps.load(tmp_path) == sweep
    text = results.finish(sweep)
    assert "best: trial-003 (optim.lr=0.2), val_loss 0.2200" in text and "1 of 5 trials failed" in text
    rows = list(csv.DictReader((tmp_path / "results.csv").open()))
    assert [(row["state"].split(":")[0], row["rung"]) for row in rows] == [
        ("stopped", "1"), ("stopped", "1"), ("stopped", "2"), ("done", "3"), ("failed", "0"),
    ]  # fmt: skip


def test_a_rung_in_which_all_have_failed_is_tried_again(tmp_path):
    trials = plan(TINY, ["max_epochs=2"], ["optim.lr=0.5,0.4"], None, 0, tmp_path)
    sweep = sweeps.Sweep(tmp_path, trials, ladder(trials, 2))
    sweeps.begin(sweep, resume=False)
    for trial in trials:
        sweeps.fail(trial, "no such file", 3)
    assert halving.turn(sweep)[0] == []
    sweeps.begin(sweep, resume=True)
    assert halving.turn(sweep) == (trials, 1)


def test_the_last_task_of_an_array_writes_the_results(tmp_path, capsys):
    trials = planned("optim.lr=0.1,0.01,0.001", folder=tmp_path / "s")
    sweep = array.of(tmp_path / "s", trials)
    sweeps.begin(sweep, resume=False)
    places = [Path(trial.config.run_dir) for trial in trials]
    assert array.options(sweep, 2)["array"] == "0-2%2"
    finished(trials[1], val_loss=0.25)
    assert array.options(sweep, None)["array"] == "0,2"
    assert array.ended(places[1], 0) == 0 and sweeps.state(sweep, trials[1]).word == "done"
    (places[0] / "output.log").write_text("error[rank 1]: the training loss is nan; step 3\nsrun: error: a task\n")
    assert array.ended(places[0], 6) == 6
    (places[2] / "output.log").write_text("stopped by SIGUSR1")
    assert array.ended(places[2], 75) == 75, "saved, and neither done nor failed"
    assert capsys.readouterr().out == "" and not (tmp_path / "s" / "results.csv").exists()
    finished(trials[2], val_loss=0.5)
    assert array.ended(places[2], 0) == 0
    assert "best: trial-001 (optim.lr=0.01), val_loss 0.2500" in capsys.readouterr().out
    rows = list(csv.DictReader((tmp_path / "s" / "results.csv").open()))
    assert [row["state"] for row in rows] == ["failed: the training loss is nan; step 3", "done", "done"]


def run(line, cwd, seconds=SECONDS):
    env = environment() | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(line, cwd=cwd, env=env, capture_output=True, text=True, timeout=seconds, check=False)


def weights(run_dir):
    return {path.name: path.read_bytes() for path in sorted(run_dir.glob("checkpoints/*/*.safetensors"))}


@pytest.mark.parametrize(
    "framework",
    ["pytorch", pytest.param("tensorflow", marks=pytest.mark.long("the groups are the same in both frameworks"))],
)
def test_groups_train_as_single_runs(framework, tmp_path):
    """Four ranks, two at a time, and two rungs: one trial diverges, the best half goes on, and a trial that comes to
    the end has the bits of a run of its own, whose learning rates depend on its length."""
    own = ["-c", str(TINY), "--set", f"framework={framework}", "--set", "optim.schedule=cosine"]
    line = [*MPIRUN, "4", str(BIN / "hvd-train"), "sweep", *own, "--param", "optim.lr=1e30,0.1,0.05,0.02"]
    done = run([*line, "--ranks-per-trial", "2", "--halving", "2", "--run-dir", "s"], tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = list(csv.DictReader((tmp_path / "s" / "results.csv").open()))
    assert rows[0]["state"].startswith("failed: the training loss is")
    assert [(row["state"], row["rung"]) for row in rows[1:]] == [("done", "2"), ("done", "2"), ("stopped", "1")]
    assert "rungs: 4 trials to epoch 1, 2 to the end" in done.stdout and "best: trial-001 (" in done.stdout
    single = run(
        [str(BIN / "hvd-train"), "fit", "-np", "2", *own, "--set", "optim.lr=0.05", "--run-dir", "f"], tmp_path
    )
    assert single.returncode == 0, single.stderr
    found, expected = weights(tmp_path / "s" / "trial-002"), weights(tmp_path / "f")
    assert found == expected and found
    assert yaml.safe_load((tmp_path / "s" / "best.yaml").read_text())["optim"]["lr"] == 0.1


@pytest.mark.parametrize(
    ("before", "words", "what"),
    [
        ([*MPIRUN, "3"], ["--ranks-per-trial", "2"], "3 ranks cannot be split into groups of 2; --ranks-per-trial"),
        ([*MPIRUN, "2"], [], "2 ranks, and nothing says how many a trial gets; mpirun; give --ranks-per-trial N"),
        (
            [str(BIN / "horovodrun"), "-np", "2", "--gloo"],
            ["--ranks-per-trial", "1"],
            "horovodrun's ranks cannot connect by mpi4py; horovodrun; start with mpirun",
        ),
    ],
    ids=["not divisible", "not told", "Gloo"],
)
def test_worlds_that_cannot_be_split(before, words, what, tmp_path):
    line = [*before, str(BIN / "hvd-train"), "sweep", "-c", str(TINY), "--param", "optim.lr=0.1,0.2", *words]
    done = run([*line, "--run-dir", "s"], tmp_path)
    assert done.returncode == 2 and done.stderr.count(what) == 1, done.stderr
    assert not (tmp_path / "s").exists()


def test_one_after_the_other_and_resume(tmp_path):
    """A trial without data fails; once the data is there, --resume runs that one alone."""
    np.savez(tmp_path / "own.npz", x=np.ones((40, 3), np.float32), y=np.arange(40) % 2)
    own = ["-c", str(TINY), "--set", "max_epochs=1", "--set", "data.name=npz", "--param", "data.path=own.npz,later.npz"]
    line = [str(BIN / "hvd-train"), "sweep", *own, "--run-dir", "s"]
    done = run(line, tmp_path)
    assert done.returncode == 0 and 'trial-001 (data.path="later.npz"): failed, there is no such' in done.stdout, done
    before = os.stat(tmp_path / "s" / "trial-000" / "summary.json").st_mtime_ns
    (tmp_path / "own.npz").rename(tmp_path / "later.npz")
    again = run([*line, "--resume"], tmp_path)
    assert again.returncode == 0 and again.stdout.count("done") == 3, again.stdout + again.stderr
    assert os.stat(tmp_path / "s" / "trial-000" / "summary.json").st_mtime_ns == before

"""A scaling study: its runs are what was asked for, its figures are those of its runs, and nothing measured is lost."""

from __future__ import annotations

import csv
import json
import math
import re
import signal
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from hvd_train.cli.main import cli
from hvd_train.config import load_config
from hvd_train.errors import CheckpointError, ConfigError
from hvd_train.insight.scaling_laws import Law
from hvd_train.launch.start import environment
from hvd_train.run_folder.lock import Lock
from hvd_train.scaling import page, results, runs, turns
from hvd_train.scaling.points import measured
from hvd_train.scaling.study import Study, Target, discard, load, parse_target, prepare
from hvd_train.sweep.folder import LOG, fail
from tests.limits import SECONDS, until
from tests.scaling.made_up import write_run, write_training

ROOT = Path(__file__).parents[2]
TINY = ROOT / "scripts" / "configs" / "tiny.yaml"
TARGET = Target("val_accuracy", 0.9, "max")


def study(folder, ranks=(1, 2, 4), *sets, **others):
    config = load_config(None, ["batch_size=32", "max_epochs=3", "model.name=mlp", *sets], run_dir=str(folder))
    return Study(Path(folder), config, ranks, **{"steps": 100, **others})


# ---- what is run


def test_strong_keeps_the_global_batch_and_weak_a_ranks(tmp_path):
    strong, weak = study(tmp_path), study(tmp_path, kind="weak")
    assert [strong.short_run(n, 0).config.global_batch(n) for n in (1, 2, 4)] == [32, 32, 32]
    assert [weak.short_run(n, 0).config.global_batch(n) for n in (1, 2, 4)] == [32, 64, 128]
    run = strong.short_run(4, 1).config
    assert run.max_steps == 100 and run.max_epochs is None and run.checkpoint.every_n_epochs == 0
    assert run.run_dir == str(tmp_path / "ranks-0004" / "run-1")
    whole = study(tmp_path, (1, 2), "early_stopping.patience=2", target=TARGET).training(2, 1).config
    assert (whole.max_epochs, whole.seed, whole.early_stopping) == (3, 1, None)


def test_parts_of_a_batch_and_pipeline_stages_count(tmp_path):
    parts = study(tmp_path, (1, 2), "accumulate_grad_batches=2", kind="weak")
    assert [parts.batch(n) for n in (1, 2)] == [64, 128]
    stages = study(tmp_path, (2, 4), "parallel.pipeline=2", kind="weak")
    assert [stages.batch(n) for n in (2, 4)] == [32, 64]
    whole = study(tmp_path, (2, 4), "batch_size=null", "global_batch_size=48", kind="weak")
    assert [whole.batch(n) for n in (2, 4)] == [48, 96]


@pytest.mark.parametrize(
    ("ranks", "sets", "kind", "what"),
    [
        ((1, 3, 4), [], "strong", "divided over 3 ranks; --strong; --set batch_size=24 or batch_size=36, or another"),
        ((1, 64), [], "strong", "32 samples cannot be divided over 64 ranks; --strong; --set batch_size=64, or anoth"),
        ((3,), ["batch_size=null", "global_batch_size=32"], "strong", "global_batch_size=30 or global_batch_size=33"),
        ((8,), ["accumulate_grad_batches=3", "batch_size=9"], "strong", "--set batch_size=8 or batch_size=16, or"),
        ((3, 6), ["batch_size=null", "global_batch_size=32"], "weak", "32 cannot be divided over 3 ranks; --weak"),
        ((1, 2), ["parallel.pipeline=2"], "strong", "1 rank cannot hold models of 2 pipeline stages; --ranks; give "),
    ],
)  # fmt: skip
def test_batches_that_do_not_divide(tmp_path, ranks, sets, kind, what):
    with pytest.raises(ConfigError) as caught:
        study(tmp_path, ranks, *sets, kind=kind).check()
    assert what in str(caught.value)
    for setting in re.findall(r"\b(?:global_)?batch_size=\d+", str(caught.value)):  # the advice works
        study(tmp_path, ranks, *sets, setting, kind=kind).check()


def test_options_that_are_none(tmp_path):
    config = study(tmp_path).config
    assert parse_target("val_accuracy=0.97", config) == Target("val_accuracy", 0.97, "max")
    assert parse_target("val_loss=1e-1", config) == Target("val_loss", 0.1, "min")
    for text, what in (
        ("val_acuracy=1", "did you mean 'val_accuracy'"),
        ("val_loss", "NAME=NUMBER"),
        ("val_loss=nan", "as in"),
    ):
        with pytest.raises(ConfigError, match=what):
            parse_target(text, config)  # fmt: skip


def test_a_study_goes_on_and_may_grow(tmp_path):
    first = study(tmp_path / "s", (1, 2)).begin(resume=False)
    assert load(tmp_path / "s").ranks == (1, 2)
    with pytest.raises(ConfigError, match="holds a study already; .*--resume measures what is missing"):
        first.begin(resume=False)
    grown = study(tmp_path / "s", (4,), steps=None).begin(resume=True)
    assert grown.ranks == (1, 2, 4) and grown.steps == 100
    fail(grown.short_run(2, 0), "it was ended", 5)
    assert measured(grown).points[1].problem == "failed: it was ended"
    again = study(tmp_path / "s", (1, 2)).begin(resume=True)
    assert not measured(again).points[1].problem, "what has failed is tried again"
    (tmp_path / "s").rename(tmp_path / "moved")
    assert study(tmp_path / "moved", (1,)).begin(resume=True).ranks == (1, 2, 4)
    for other in (study(tmp_path / "moved", (1,), kind="weak"), study(tmp_path / "moved", (1,), "optim.lr=3")):
        with pytest.raises(ConfigError, match="holds another study"):
            other.begin(resume=True)
    more = study(tmp_path / "moved", (1,), target=TARGET, seeds=2).begin(resume=True)
    assert more.target == TARGET and study(tmp_path / "moved", (1,)).begin(resume=True).target == TARGET
    with pytest.raises(ConfigError, match="holds another study"):
        study(tmp_path / "moved", (1,), target=replace(TARGET, value=0.5)).begin(resume=True)
    study(tmp_path / "early", steps=None).begin(False)  # which was stopped before its length was known
    assert study(tmp_path / "early", steps=50).begin(resume=True).steps == 50
    whole = ("batch_size=null", "global_batch_size=48")
    study(tmp_path / "weak", (2, 4), *whole, kind="weak").begin(False)
    with pytest.raises(ConfigError, match="a study that began with 2 ranks cannot get fewer"):
        study(tmp_path / "weak", (1,), *whole, kind="weak").begin(resume=True)
    with pytest.raises(ConfigError, match="no study to continue"):
        study(tmp_path / "none").begin(resume=True)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text("{}")
    with pytest.raises(ConfigError, match="the folder holds a run; .*for example --run-dir .*run-scale"):
        study(tmp_path / "run").begin(resume=False)
    with pytest.raises(ConfigError, match="holds no study"):
        load(tmp_path / "none")


@pytest.mark.parametrize(
    "change",
    [
        {"steps": "x"}, {"steps": 0}, {"steps": True}, {"seeds": None}, {"seeds": 1.5}, {"ranks": []}, {"ranks": ["1"]},
        {"ranks": [1 << 21]}, {"ranks": 4}, {"kind": 1}, {"target": ["val_loss", "x", "min"]}, {"target": ["val_loss"]},
        {"target": ["val_loss", 1.0, "best"]}, {"target": 7},
    ],
)  # fmt: skip
def test_a_study_file_that_is_damaged(tmp_path, change):
    study(tmp_path, target=TARGET).begin(resume=False)
    values = json.loads((tmp_path / "study.json").read_text())
    (tmp_path / "study.json").write_text(json.dumps(values | change))
    with pytest.raises(CheckpointError, match="the study cannot be used: "):
        load(tmp_path)
    (tmp_path / "study.json").write_text(json.dumps(values))
    (tmp_path / "ranks-0001" / "run-\u00b2").mkdir(parents=True)
    assert load(tmp_path).numbers(1, "run") == []


def test_a_run_that_goes_on_is_not_removed(tmp_path):
    trial = study(tmp_path).short_run(2, 0)
    prepare(trial)
    with Lock(Path(trial.config.run_dir)), pytest.raises(CheckpointError, match="this run is at work"):
        discard(trial)
    assert Path(trial.config.run_dir).exists()
    discard(trial)
    assert not Path(trial.config.run_dir).exists()


def test_two_studies_in_one_folder(tmp_path):
    with Lock(tmp_path):
        done = CliRunner().invoke(cli, ["scale", "--ranks", "1", "--run-dir", str(tmp_path)])
    assert isinstance(done.exception, CheckpointError)
    assert "another study is measured there; wait for its end" in str(done.exception)
    assert not [*tmp_path.iterdir()]


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "s").write_text("")
    trial = study(tmp_path / "s").short_run(1, 0)
    for write in (lambda: prepare(trial), lambda: fail(trial, "killed", 5), lambda: study(tmp_path / "s").save()):
        with pytest.raises(CheckpointError, match="Not a directory|File exists"):
            write()


# ---- what a run measured


def test_the_warm_up_does_not_count(tmp_path):
    trial = study(tmp_path).short_run(2, 0)
    write_run(trial, compute=8.0, exchange=2.0, slow_start=10.0)
    run = runs.read(Path(trial.config.run_dir))
    assert len(run.milliseconds) == 80 and np.allclose(run.milliseconds, 10.0)  # windows end at steps 10, 20, ...
    assert run.rate == pytest.approx(32 / 0.010)
    sums = {name: sum(x) for name, x in run.parts.items() if sum(x)}
    assert sums["compute"] / sums["exchange"] == pytest.approx(4) and set(sums) == {"compute", "exchange"}
    assert (run.factors.parallel, run.factors.transfer) == pytest.approx((0.8, 0.8))


@pytest.mark.parametrize("mode", ["allreduce", "async", "outer"])
def test_only_ranks_that_exchange_in_each_step_have_factors(tmp_path, mode):
    trial = study(tmp_path).short_run(2, 0)
    write_run(trial)
    run = Path(trial.config.run_dir)
    (run / "config.yaml").write_text(f"exchange: {{mode: {mode}}}")
    assert (runs.read(run).factors is None) == (mode != "allreduce")
    for text in ("exchange: 5", "exchange: [mode]", "["):
        (run / "config.yaml").write_text(text)
        runs.read(run)


@pytest.mark.parametrize("name", ["summary.json", "environment.json", "steps.jsonl"])
@pytest.mark.parametrize(
    "text", ["", "{}", "[]", '{"time": 1, "event": "steps", "step": 4, "counted": 1, "cells": 3}\n']
)
def test_a_damaged_run_is_told(tmp_path, name, text):
    s = study(tmp_path)
    trial = s.short_run(2, 0)
    write_run(trial)
    (Path(trial.config.run_dir) / name).write_text(text)
    assert runs.read(Path(trial.config.run_dir)) is None
    one = measured(s).points[1]
    assert not one.runs and ("damaged" in one.problem or name == "summary.json" and text != "{}")


# ---- the figures of a study


def filled(folder, law, ranks=(1, 2, 4, 8), repeats=2, **others):
    s = study(folder, ranks, **others).begin(resume=False)
    for n in ranks:
        for k in range(repeats):
            step = 32.0 / float(law.rate(n)) * 1000
            write_run(s.short_run(n, k), step * 0.75, step * 0.25)
    return s


def test_speedup_efficiency_and_hours(tmp_path):
    law = Law(1000.0, 0.05, 0.002)
    found = measured(filled(tmp_path / "s", law))
    for one in found.points:
        assert found.speedup(one) == pytest.approx(law.speedup(one.ranks), rel=1e-3)
        assert found.efficiency(one) == pytest.approx(law.speedup(one.ranks) / one.ranks, rel=1e-3)
        assert one.milliseconds == pytest.approx([32e3 / law.rate(one.ranks)] * 2, rel=1e-3)
        # 3 epochs of 200 steps
        assert found.hours(one) == pytest.approx(600 * 32 / law.rate(one.ranks) / 3600, rel=1e-3)
        assert one.shares == pytest.approx(
            {**dict.fromkeys(one.shares, 0), "compute": 0.75, "exchange": 0.25}, abs=1e-3
        )
        assert one.uncertainty == 0
    fits, notes = found.fits
    assert [one.name for one in fits] == ["Amdahl", "universal"] and not notes
    assert fits[1].law.sigma == pytest.approx(0.05, abs=2e-3) and fits[1].law.kappa == pytest.approx(0.002, rel=0.1)


def test_hours_of_a_number_of_steps_are_of_the_same_samples(tmp_path):
    s = study(tmp_path / "s", (1, 2), "max_epochs=null", "max_steps=1000", kind="weak").begin(resume=False)
    for n in (1, 2):
        write_run(s.short_run(n, 0), 36.0)
    hours = [measured(s).hours(one) for one in measured(s).points]
    assert hours == pytest.approx([0.01, 0.005])


def test_without_one_rank_the_fewest_are_compared_with(tmp_path):
    s = study(tmp_path, (1, 2, 4)).begin(resume=False)
    for n in (2, 4):
        write_run(s.short_run(n, 0), 30.0 / n)
    fail(s.short_run(1, 0), "\x1b[31mkilled\nby me", 5)
    found = measured(s)
    assert [found.speedup(one) for one in found.known] == pytest.approx([2, 4])
    assert "2.00 times as fast as 2 ranks" in results.summary(found)
    told = results.text(found)
    assert "speed-up: 2 ranks count as 2 times as fast as one, which was not measured" in told
    assert "1 rank: failed: ?[31mkilled?by me\n" in told


def test_the_interval_is_that_of_student(tmp_path):
    s = study(tmp_path, (1,))
    for k, ms in enumerate((9.0, 10.0, 11.0)):
        write_run(s.short_run(1, k), ms)
    one = measured(s).points[0]
    assert one.uncertainty == pytest.approx(2.920 * 1.0 / math.sqrt(3) / 10, rel=1e-4)
    assert one.rate == pytest.approx(3200) and not turns.precise(one)
    assert replace(one, runs=one.runs[:1]).uncertainty is None


def test_nodes_cores_and_ranks_that_share_them(tmp_path):
    s = study(tmp_path, (1, 2, 4)).begin(resume=False)
    for n, threads in ((1, 2), (2, 1), (4, 1)):
        write_run(s.short_run(n, 0), cores=2, threads=threads)
    found = measured(s)
    assert [(one.runs[0].cores, one.crowded) for one in found.points] == [(2, False), (2, False), (2, True)]
    told = results.text(found)
    assert "4*" in told and "on 4 ranks some share a core; the laws leave" in told
    assert (
        "1 and 2 ranks use the same number of cores" in told and "universal law: 2 numbers of ranks are too few" in told
    )
    write_run(s.short_run(4, 0), cores=2, per_host=2)
    assert measured(s).points[2].runs[0].hosts == 2 and measured(s).points[2].runs[0].cores == 4


def test_table_and_pictures(tmp_path):
    s = filled(tmp_path / "s", Law(1000.0, 0.05), target=TARGET, seeds=2)
    for n in s.ranks[:3]:
        for k in range(2):
            write_training(s.training(n, k), [0.5, 0.8, 0.91, 0.95], seconds_each=2.0 / n)
    write_training(s.training(8, 0), [0.5, 0.6], 1.0)
    write_training(s.training(8, 1), [0.5, 0.7], 1.0)
    found = measured(s)
    results.write(found)
    rows = list(csv.DictReader((tmp_path / "s" / "results.csv").open()))
    assert [row["ranks"] for row in rows] == ["1", "2", "4", "8"]
    assert [row["samples_to_target"] for row in rows] == ["300.0", "300.0", "300.0", ""]
    assert [row["seconds_to_target"] for row in rows[:3]] == ["6.0", "3.0", "1.5"]
    assert float(rows[1]["share_exchange"]) == pytest.approx(0.25, abs=1e-3) and rows[1]["share_input"] == "0.0"
    told = results.text(found)
    assert "8 ranks: 2 of 2 trainings did not reach val_accuracy=0.9 (best 0.7)" in told
    assert "samples to val_accuracy=0.9" in told and "0 of 2" in told
    names = {"speedup.png", "shares.png", "hours.png", "target.png"}
    assert names == {path.name for path in (tmp_path / "s").glob("*.png")}


def test_a_target_that_half_of_the_trainings_reach(tmp_path):
    s = study(tmp_path, (1,), target=TARGET, seeds=3)
    for k, last in enumerate((0.95, 0.95, 0.8)):
        write_training(s.training(1, k), [0.5, last], seconds_each=1.0 + k)
    one = measured(s).points[0]
    assert one.to_target() == (200, 4.0, 2, 3), "the median counts one that never reached it as the last"
    write_training(s.training(1, 1), [0.5, 0.6], 1.0)
    assert measured(s).points[0].to_target() == (None, None, 1, 3)


# ---- turns


@pytest.fixture
def fits(monkeypatch):
    """Trainings that take no time. ``faults``: {(ranks, number): exit code}."""
    done, faults = [], {}

    def fit(trial, words):
        ranks, run = trial.values["ranks"], Path(trial.config.run_dir)
        assert (run / "trial.yaml").exists() and words[-1] == f"ranks {ranks}"
        done.append((ranks, run.name))
        if code := faults.get((ranks, trial.number)):
            (run / LOG).write_text("error: the training loss is nan; step 3\n")
            return code
        if run.name.startswith("seed"):
            write_training(trial, [0.5, 0.95], 1.0)
        else:
            write_run(trial, noise[len(done) % len(noise)] * 10.0 / ranks)
        return 0

    noise = [1.0]
    monkeypatch.setattr(turns, "fit", fit)
    return done, faults, noise


def measure(s, lines=None, **limits):
    return turns.measure(
        s, lambda n: [f"ranks {n}"], turns.Limits(**limits), (lines if lines is not None else []).append
    )


def test_turns_end_when_the_times_are_known(tmp_path, fits):
    done, _, noise = fits
    assert measure(study(tmp_path, (1, 2)).begin(False)) == 0
    assert done == [(1, "run-0"), (2, "run-0"), (1, "run-1"), (2, "run-1")]
    noise[:] = [1.0, 1.1, 1.2, 0.9, 1.0]
    s = study(tmp_path / "noisy", (1, 2), target=TARGET, seeds=2).begin(False)
    done.clear()
    assert measure(s, repeats=4) == 0
    assert done[:8] == [(n, f"run-{k}") for k in range(4) for n in (1, 2)]
    assert done[8:] == [(1, "seed-0"), (2, "seed-0"), (1, "seed-1"), (2, "seed-1")]
    done.clear()
    assert measure(s, repeats=4) == 0 and not done, "nothing is measured twice"


def test_a_first_run_decides_the_length(tmp_path, fits):
    s, lines = study(tmp_path, (1, 2), steps=None).begin(False), []
    assert measure(s, lines, seconds=3.0, repeats=1) == 0
    assert load(tmp_path).steps == 400 and "each run takes 400 steps" in lines[0]  # 300 of 10 ms, and a quarter before
    assert "run 1 of at most 1, 2 ranks: 5 ms a step, 6,400 samples/s" in lines[2]


def test_what_failed_is_told_and_the_rest_is_measured(tmp_path, fits):
    done, faults, _ = fits
    faults[2, 0] = 6
    s, lines = study(tmp_path, (1, 2, 4)).begin(False), []
    assert measure(s, lines) == 0
    assert done.count((2, "run-0")) == 1 and (4, "run-1") in done
    assert "run 1 of at most 5, 2 ranks: failed: the training loss is nan; step 3" in lines
    told = results.text(measured(s))
    assert "2 ranks: failed: the training loss is nan; step 3" in told and "6,400" not in told
    faults.clear()
    s = study(tmp_path, (1, 2, 4)).begin(resume=True)
    assert measure(s) == 0 and "6,400" in results.text(measured(s))


def test_nothing_trains(tmp_path, fits):
    done, faults, _ = fits
    faults[1, 0] = 3
    with pytest.raises(ConfigError, match="a short training does not run: the training loss is nan") as caught:
        measure(study(tmp_path, steps=None).begin(False))
    assert caught.value.exit_code == 3
    faults |= {(n, 0): 3 for n in (1, 2, 4)}
    s = study(tmp_path / "s").begin(False)
    measure(s)
    with pytest.raises(ConfigError, match="nothing was measured: failed: the training loss is nan"):
        results.check(measured(s))


def test_a_signal_ends_the_study_and_resume_goes_on(tmp_path, fits):
    done, faults, _ = fits
    faults[2, 1] = 130
    s = study(tmp_path, (1, 2)).begin(False)
    assert measure(s) == 130
    assert [len(one.runs) for one in measured(s).points] == [2, 1]
    assert not any(one.problem for one in measured(s).points)
    faults.clear()
    assert measure(study(tmp_path, (1, 2)).begin(resume=True)) == 0
    assert done[-2:] == [(2, "run-1"), (2, "run-1")]


def test_time_is_limited(tmp_path, fits):
    done, _, _ = fits
    lines = []
    assert measure(study(tmp_path, (1, 2)).begin(False), lines, minutes=0.0) == 0
    assert not done and lines == ["0 minutes have passed: nothing further is measured"]


def test_slurm_gets_a_job_for_each_run(tmp_path):
    s = study(tmp_path / "s", (2, 8), "slurm.ntasks_per_node=4", "slurm.time=30", target=TARGET)
    found = turns.scripts(s, turns.Limits(repeats=2), "job")
    assert [(t.values["ranks"], Path(t.config.run_dir).name) for t, _ in found] == [
        (2, "run-0"), (8, "run-0"), (2, "run-1"), (8, "run-1"), (2, "seed-0"), (8, "seed-0"),
    ]  # fmt: skip
    text = found[1][1]
    assert "#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=4\n" in text and "#SBATCH --time=30" in text
    run = tmp_path / "s" / "ranks-0008" / "run-0"
    assert f"--output={run}/output.log" in text and f"fit -c {run}/trial.yaml --run-dir {run} --overwrite" in text
    assert "--resume auto" in found[-1][1] and text.endswith(f" ended {run} $?\n")
    write_run(found[0][0])
    assert len(turns.scripts(s, turns.Limits(repeats=2), "job")) == 5
    with pytest.raises(ConfigError, match="give --steps"):
        turns.scripts(replace(s, steps=None), turns.Limits(), "job")
    with pytest.raises(ConfigError, match="5 ranks cannot be spread evenly over 2 nodes of at most 4"):
        turns.places(5, 4)


def test_the_end_of_a_job_is_recorded(tmp_path):
    s = study(tmp_path / "s", (2, 8)).begin(False)
    trials = s.short_run(2, 0), s.training(8, 1), s.short_run(8, 0)
    for trial, code in zip(trials, (6, 3, 75), strict=True):
        prepare(trial)
        run = Path(trial.config.run_dir)
        (run / LOG).write_text("error[rank 1]: the training loss is nan; step 3\nsrun: error: a task\n")
        with pytest.raises(SystemExit) as caught:
            cli.main(["ended", str(run), str(code)], standalone_mode=False)
        assert caught.value.code == code
    states = [s.state(trial) for trial in trials]
    assert [(one.word, one.code) for one in states[:2]] == [("failed", 6), ("failed", 3)]
    assert states[2].word == "running", "it was stopped and may go on"
    assert measured(s).points[0].problem == "failed: the training loss is nan; step 3"
    write_run(trials[0])
    assert turns.ended(Path(trials[0].config.run_dir), 0) == 0 and s.state(trials[0]).word == "done"


def test_files_of_a_study_that_are_damaged(tmp_path):
    study(tmp_path).begin(False)
    for text in ("", "[]", "{}", '{"ranks": ["x"]}', json.dumps({"ranks": [], "kind": "strong", "target": None})):
        (tmp_path / "study.json").write_text(text)
        with pytest.raises(Exception, match="the study cannot be used") as caught:
            load(tmp_path)
        assert caught.value.exit_code == 4
    prepare(study(tmp_path).short_run(1, 0))


class Page(HTMLParser):
    """The rows of tables, the text and the tags of a page."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.rows, self.text = [], [], ""
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        assert not {"src", "href"} & dict(attributes).keys() or tag in ("use", "image")

    def handle_data(self, data):
        if self.tags and self.tags[-1] in ("td", "th"):
            self.rows[-1][-1] += data
        self.text += data


def test_the_page_for_a_proposal(tmp_path):
    s = filled(tmp_path / "s", Law(1000.0, 0.05, 0.002), target=TARGET, seeds=2)
    write_training(s.training(1, 0), [0.5, 0.95], 1.0)
    fail(s.short_run(8, 2), "a <b>rank</b> was lost", 5)
    found = measured(s)
    path = page.write(found, tmp_path / "proposal")
    assert {one.name for one in path.parent.iterdir()} == {"index.html", "results.csv"}
    text = path.read_text()
    read = Page(text)
    assert (
        read.tags.count("svg") == 4
        and "script" not in read.tags
        and "http" not in text.replace("http://www.w3.org", "")
    )
    assert "8 ranks: failed: a <b>rank</b> was lost" in read.text
    row = next(row for row in read.rows if row[:2] == ["1", "4"])
    assert row[8:10] == [f"{found.speedup(found.points[2]):.2f}", f"{100 * found.efficiency(found.points[2]):.0f} %"]
    # N / (1 + 0.05 (N-1) + 0.002 N (N-1)): 0.849 on 4 ranks, 0.69 on 8
    assert "4 ranks are the most whose efficiency (speed-up divided by ranks) is at least 70 %" in read.text
    assert "of 100 steps each. The first 25 % of the steps are not timed" in read.text
    assert "The global batch is 32 samples on all numbers of ranks (strong scaling)" in read.text
    assert "2 trainings with different seeds" in read.text and "{" not in page.method(found)


def test_a_law_that_does_not_hold_is_told(tmp_path):
    s = study(tmp_path, (1, 2, 4)).begin(False)
    for n, ms in ((1, 10.0), (2, 50.0), (4, 30.0)):
        write_run(s.short_run(n, 0), ms)
    told = results.text(measured(s))
    assert (
        re.search(r"Amdahl law: does not hold here, off by at most \d+\.\d %\n", told) and "times as fast" not in told
    )
    assert "1 rank is the most whose efficiency" in told and "This is also the fastest that was measured." in told
    # Two points contradict it as well, if the second is slower than one rank.
    told = results.text(measured(replace(s, ranks=(1, 2))))
    assert "does not hold here" in told and "cannot contradict" not in told


def test_it_says_what_to_take_and_how_sure_that_is(tmp_path):
    exact = filled(tmp_path / "s", Law(1000.0, 0.05, 0.002))
    told = results.text(measured(exact))
    assert "4 ranks are the most whose efficiency" in told and "The fastest that was measured is 8 ranks" in told
    assert "write global_batch_size: 32 in place of batch_size" in told and "known to" not in told
    weak = study(tmp_path / "w", (1, 2), kind="weak").begin(False)
    for n, k, ms in ((1, 0, 10.0), (1, 1, 14.0), (2, 0, 10.0), (2, 1, 10.0)):
        write_run(weak.short_run(n, k), ms)
    told = results.text(measured(weak))
    assert "known to ±105 % only" in told and "give more --repeats" in told and "global_batch_size" not in told
    assert re.search(r"^1 .* ±105\.2 % ", told, re.M) and re.search(r"^1 +2 .* ±0\.0 % ", told, re.M)


def test_a_page_of_one_point(tmp_path):
    s = study(tmp_path, (2, 4), kind="weak").begin(False)
    write_run(s.short_run(2, 0))
    found = measured(s)
    read = Page(page.write(found, tmp_path / "p").read_text())
    assert "2 ranks are the most" in read.text and "Each rank keeps its batch" in read.text
    assert "not measured yet: 4 ranks; --resume goes on" in results.text(found)
    results.write(found)


# ---- as typed


def scale(*words, cwd, code=0):
    line = [sys.executable, "-m", "hvd_train", "scale", *words]
    done = subprocess.run(
        line, cwd=cwd, env=environment() | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=SECONDS,
        check=False,
    )  # fmt: skip
    assert done.returncode == code, done.stdout + done.stderr
    return done


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["--ranks", "1,x"], "'x' is no whole number from 1; --ranks 1,x"),
        (["--ranks", "1,3"], "cannot be divided over 3 ranks"),
        (["--seeds", "2"], "--seeds repeats trainings to a target; give --target"),
        (["--target", "accuracy=1"], "unknown 'accuracy'; did you mean 'val_accuracy'"),
        (["--resume"], "there is no study to continue"),
        (["--collect"], "the folder holds no study"),
        (["--slurm"], "a job needs to know how long it trains; --slurm; give --steps"),
        (["--ranks", "4", "-H", "here:2"], "4 ranks"),
    ],
)
def test_mistakes(words, what, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=re.escape(what)) as caught:
        cli.main(["scale", "--run-dir", "s", *words], standalone_mode=False)
    assert "\n" not in str(caught.value) and not (tmp_path / "s").exists()


def test_a_study_as_typed(tmp_path):
    """One rank and two train, an interrupted study goes on, and there is a page."""
    own = ["-c", str(TINY), "--run-dir", "s", "--steps", "24", "--repeats", "1", "--ranks"]
    first = scale(*own, "1", "--target", "val_accuracy=0.1", cwd=tmp_path)
    assert "run 1 of at most 1, 1 rank: " in first.stderr and "training 1 of 1 to val_accuracy=0.1" in first.stderr
    both = scale(*own, "1,2", "--target", "val_accuracy=0.1", "--resume", "--report", "p", cwd=tmp_path)
    assert "run 1 of at most 1, 1 rank" not in both.stderr and "1 of at most 1, 2 ranks" in both.stderr
    rows = list(csv.DictReader((tmp_path / "p" / "results.csv").open()))
    assert [row["ranks"] for row in rows] == ["1", "2"] and rows[0]["speedup"] == "1.0"
    for row in rows:
        shares = sum(float(row[name]) for name in row if name.startswith("share_"))
        assert shares == pytest.approx(1) and float(row["step_ms"]) > 0 and int(row["runs"]) == 1
        assert float(row["samples_per_second"]) > 0 and float(row["samples_to_target"]) > 0
        assert float(row["parallel_efficiency"]) == pytest.approx(
            float(row["load_balance"]) * float(row["communication_efficiency"])
        )
    assert rows[0]["samples_to_target"] == rows[1]["samples_to_target"], "two ranks train as one"
    assert Page((tmp_path / "p" / "index.html").read_text()).tags.count("svg") == 4
    collected = scale("--run-dir", "s", "--collect", cwd=tmp_path)
    assert collected.stdout.startswith("strong scaling (the global batch stays) of pytorch")


@pytest.mark.long("PyTorch runs each time")
def test_the_other_framework_and_weak_scaling(tmp_path):
    own = ["-c", str(TINY), "--run-dir", "s", "--set", "framework=tensorflow", "--steps", "40", "--repeats", "2"]
    done = scale(*own, "--ranks", "1,2", "--weak", cwd=tmp_path)
    assert done.stdout.startswith("weak scaling (each rank keeps its batch) of tensorflow")
    rows = list(csv.DictReader((tmp_path / "s" / "results.csv").open()))
    assert [(row["ranks"], row["global_batch"], row["runs"]) for row in rows] == [("1", "50", "2"), ("2", "100", "2")]
    for row in rows:
        assert float(row["samples_per_second"]) * float(row["step_ms"]) / 1000 == pytest.approx(
            int(row["global_batch"]), rel=0.5
        )


@pytest.mark.long("the parts run each time")
def test_a_signal_keeps_what_was_measured(tmp_path):
    """SIGINT in the third run: two are in the table, and --resume measures the rest."""
    own = ["-c", str(TINY), "--run-dir", "s", "--steps", "24", "--repeats", "2", "--ranks", "1,2"]
    line = [sys.executable, "-m", "hvd_train", "scale", *own]
    env = environment() | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        line, cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as child:
        until(lambda: (tmp_path / "s" / "ranks-0001" / "run-1" / LOG).exists())
        child.send_signal(signal.SIGINT)
        out, err = child.communicate(timeout=SECONDS)
    assert child.returncode == 130 and "stopped; --resume goes on" in err, err
    rows = list(csv.DictReader((tmp_path / "s" / "results.csv").open()))
    assert [row["runs"] for row in rows] == ["1", "1"] and "speed-up" in out
    scale(*own, "--resume", cwd=tmp_path)
    rows = list(csv.DictReader((tmp_path / "s" / "results.csv").open()))
    assert [row["runs"] for row in rows] == ["2", "2"]

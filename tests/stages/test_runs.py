"""Trainings in stages through the command line: numbers of one process, checkpoints, mistakes, a killed rank."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file

import hvd_train
from hvd_train.errors import TrainError
from tests.cli.running import run
from tests.ranks.job import ROOT, TINY, Job, settings, summary

FRAMEWORKS = ["pytorch", "tensorflow"]
# What stages save and load is written once for both frameworks.
PYTORCH = ["pytorch", pytest.param("tensorflow", marks=pytest.mark.long("as in PyTorch"))]
KEYS = ["precision=64", "threads=1", "tensorboard=false", "global_batch_size=47", "sync_batchnorm=true"]
KEYS += ["optim.lr=0.02", "gradient_clip_val=0.5", "parallel.microbatches=3"]
RESUME = ("--resume", "auto")


def job_of(folder: Path, framework: str, *sets: str, model: str) -> dict:
    """The configuration that ``fit`` is told in words, beside ``TINY``."""
    job: dict = {}
    keys = [*KEYS, f"model.name={model or f'tests.stages.models:{framework}'}", f"code_dir={ROOT}"]
    for one in (*keys, f"framework={framework}", f"run_dir={folder}", *sets):
        path, _, value = one.partition("=")
        *above, key = path.split(".")
        section = job
        for name in above:
            section = section.setdefault(name, {})
        section[key] = yaml.safe_load(value)
    return job


def fit(folder: Path, framework: str, *words: str, sets: tuple[str, ...] = (), model: str = "") -> tuple[int, str]:
    model = model or f"tests.stages.models:{framework}"
    keys = [*KEYS, f"model={{name: '{model}'}}", f"code_dir={ROOT}", f"framework={framework}", *sets]
    line = ["fit", "-c", str(TINY), "--run-dir", str(folder), *words]
    done = run(*line, *(word for one in keys for word in ("--set", one)), code=None)
    return done.returncode, done.stdout + done.stderr


def trained(folder: Path, *arguments, **options) -> dict[str, np.ndarray]:
    code, text = fit(folder, *arguments, **options)
    assert code == 0, text
    return arrays(folder)


def arrays(folder: Path) -> dict[str, np.ndarray]:
    last = max((folder / "checkpoints").glob("step-*"))
    return load_file(last / "weights.safetensors") | load_file(last / "optimizer.safetensors")


def assert_same(a, b):
    assert a.keys() == b.keys() and any(key.startswith("statistics/") for key in a)
    for key, x in a.items():
        np.testing.assert_allclose(x, b[key], rtol=1e-9, atol=1e-12, err_msg=key)


def stages(count: int, *sets: str) -> tuple[str, ...]:
    return (f"parallel.pipeline={count}", "max_steps=33", *sets)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_stages_have_the_numbers_of_one_process(tmp_path, framework):
    """Two epochs with their evaluation, batch normalization over micro-batches, and the norm of all stages' gradients.

    As two replicas of two stages, over Gloo; and as four stages.
    """
    metrics = 'task.metrics=[accuracy, "gathered:tests.stages.models:of_label"]'
    one = trained(tmp_path / "one", framework, sets=("max_steps=33", metrics))
    runs = [("horovodrun", 2, "gpipe"), ("auto", 4, "1f1b")] if framework == "pytorch" else [("horovodrun", 2, "1f1b")]
    for launcher, count, schedule in runs:
        words, sets = ("-np", "4", "--launcher", launcher), stages(count, f"parallel.schedule={schedule}", metrics)
        assert_same(one, trained(tmp_path / schedule, framework, *words, sets=sets))
        for key in ("train_loss", "val_loss", "val_accuracy", "val_of_label"):
            assert summary(tmp_path / schedule)[key] == pytest.approx(summary(tmp_path / "one")[key], rel=1e-9)


@pytest.mark.parametrize("framework", PYTORCH)
def test_a_run_goes_on_with_stages_and_without(tmp_path, framework):
    one, cut = tmp_path / "one", tmp_path / "cut"
    trained(one, framework, sets=("max_steps=33",))
    trained(cut, framework, sets=("max_steps=9",))
    trained(cut, framework, "-np", "4", *RESUME, sets=(*stages(2, "parallel.split=[1,3]"), "max_steps=24"))
    assert_same(arrays(one), trained(cut, framework, "-np", "2", *RESUME, sets=("max_steps=33",)))
    assert '"samples": 359' in run("eval", "--run-dir", str(cut), "--trust").stdout


@pytest.mark.parametrize("framework", PYTORCH)
def test_a_resumed_run_has_the_bits_of_one_that_nobody_cut(tmp_path, framework):
    """With residuals of each rank, statistics of each rank, and masks of dropout; the split is measured once."""
    sets = (*stages(2), "sync_batchnorm=false", "model.dropout=0.2", "exchange={compression: topk, ratio: 0.1}")
    sets += ("checkpoint.every_n_steps=8",)
    cut, whole = tmp_path / "cut", tmp_path / "whole"
    trained(cut, framework, "-np", "4", sets=(*sets, "max_steps=8"))
    assert "not restored" not in fit(cut, framework, "-np", "4", *RESUME, sets=sets)[1]
    split = [line.strip() for line in (cut / "config.yaml").read_text().splitlines() if "split: [" in line]
    trained(whole, framework, "-np", "4", sets=(*sets, "parallel." + split[0].replace(": ", "=")))
    assert summary(cut)["weights_sha256"] == summary(whole)["weights_sha256"]


@pytest.mark.parametrize("framework", PYTORCH)
def test_a_stage_that_is_killed_is_named(tmp_path, framework):
    sets = ["parallel={pipeline: 2, split: [1, 1]}", f"framework={framework}"]
    job = Job("-np", tmp_path, *settings(tmp_path / "run", *sets), HVD_TRAIN_FAULT="step:1:10:stop")
    job.stopped(1).kill()
    code, _, err = job.end()
    assert code == 5 and err.startswith("error: rank 1 was ended by SIGKILL; in "), err


SPLIT = "parallel.pipeline=2"
# (framework, model, settings, the line)
MISTAKES = [
    ("pytorch", "mlp", [SPLIT, "model.hidden=[]"], "2 stages for 1 block; parallel.pipeline: 2"),
    ("pytorch", "cnn", [SPLIT, "data.image_size=16"], "the model is not a list of blocks; model"),
    ("tensorflow", "cnn", [SPLIT, "data.image_size=16"], "the model is not a list of blocks; model"),
    ("pytorch", "", ["parallel={pipeline: 2, split: [1, 1]}"], "2 blocks, and the model has 4; parallel.split"),
    ("pytorch", "", ["parallel={pipeline: 2, split: [1, 2, 1]}"], "3 numbers of blocks for 2 st"),
    ("pytorch", "tests.stages.models:pytorch_pair", [SPLIT], "block 1 (Two) does not take the"),
    ("pytorch", "tests.stages.models:pytorch_tuple", [SPLIT], "block 0 (Two) gives tuple, and n"),
    ("tensorflow", "tests.stages.models:keras_mask", [SPLIT], "block 2 (masking) gives a mask be"),
    ("tensorflow", "tests.stages.models:keras_regular", [SPLIT], "the model adds losses of its ow"),
]


def told(jobs: list[dict]) -> list[tuple[int, str]]:
    """On a rank: train each job, which is a mistake; the exit code and the line of each."""
    lines = []
    for job in jobs:
        try:
            hvd_train.fit(job)
        except TrainError as error:
            lines.append((error.exit_code, str(error)))
    return lines


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_mistakes_are_told_before_the_first_step(tmp_path, framework):
    """One launch for all of them."""
    mistakes = [mistake for mistake in MISTAKES if mistake[0] == framework]
    jobs = []
    for number, (_, model, sets, _) in enumerate(mistakes):
        job = job_of(tmp_path / f"{number}", framework, *sets, model=model)
        jobs.append(yaml.safe_load(TINY.read_text()) | job)
    first, other = hvd_train.launch(told, np=2, args=(jobs,))
    assert first == other and len(first) == len(mistakes)
    for number, ((code, line), (*_, words)) in enumerate(zip(first, mistakes, strict=True)):
        assert code == 2 and words in line and "\n" not in line, line
        assert not (tmp_path / f"{number}" / "metrics.jsonl").exists()


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_each_rank_keeps_half_of_the_weights_gradients_and_slots(tmp_path, framework):
    sets = ("max_steps=3", "model.sizes=[512, 512, 512, 512, 512]", "model.norm=false", "sync_batchnorm=false")
    sets += ("optim={name: adam, lr: 0.001}", "hooks=['tests.stages.memory_hook:Memory']", "limit_val_batches=1")
    for name, words, more in (("one", (), ()), ("two", ("-np", "2"), ("parallel={pipeline: 2, split: [3, 3]}",))):
        code, text = fit(tmp_path / name, framework, *words, sets=(*sets, *more))
        assert code == 0, text
    (whole,) = (int(path.read_text()) for path in tmp_path.glob("one.bytes.*"))
    parts = [int(path.read_text()) for path in tmp_path.glob("two.bytes.*")]
    assert len(parts) == 2 and max(parts) <= 0.55 * whole, (parts, whole)

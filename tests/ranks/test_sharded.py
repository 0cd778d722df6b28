"""A sharded optimizer through the command line: other ranks, the other framework and whole slots go on from it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.cli.running import run
from tests.ranks.job import TINY, Job, settings

SAME = pytest.mark.long("as in PyTorch; only the copies of weights differ")
KEYS = ["precision=64", "threads=1", "tensorboard=false", "optim.name=adam", "optim.momentum=0", "optim.lr=0.01"]
CNN = ["model={name: cnn, hidden: 20}", "data.image_size=16"]  # kernels that PyTorch and Keras lay out apart


def fit(folder: Path, *words: str, sets: tuple[str, ...] = (), **more: str) -> None:
    keys = [word for one in (*KEYS, *CNN, *sets) for word in ("--set", one)]
    run("fit", "-c", str(TINY), "--run-dir", str(folder), *words, *keys, **more)


def arrays(folder: Path) -> dict[str, np.ndarray]:
    (last,) = (folder / "checkpoints").glob("step-*12")
    return load_file(last / "weights.safetensors") | load_file(last / "optimizer.safetensors")


def test_ranks_that_share_memory_have_the_bits_of_those_that_do_not(tmp_path):
    """Both add in rank order. With micro-batches, clipping and gradients in half the bits."""
    sets = ("max_steps=12", "optim.sharded=true", "accumulate_grad_batches=2", "gradient_clip_val=0.05")
    runs = [tmp_path / name for name in ("shared", "apart")]
    for folder, shares in zip(runs, ("1", "0"), strict=True):
        fit(folder, "-np", "3", sets=(*sets, "exchange.compression=fp16"), HVD_TRAIN_HOST_MEMORY=shares)
    shared, apart = map(arrays, runs)
    assert shared.keys() == apart.keys()
    for key, x in shared.items():
        np.testing.assert_array_equal(x, apart[key], err_msg=key)


@pytest.mark.parametrize("framework", ["pytorch", pytest.param("tensorflow", marks=SAME)])
def test_hosts_exchange_what_their_ranks_have_in_common(tmp_path, framework):
    """Two pairs of ranks stand for two hosts: numbers are those of one process, and slots those of the whole."""
    sets = ("max_steps=12", f"framework={framework}", "optim.sharded=true", "gradient_clip_val=0.05")
    fit(tmp_path / "one", sets=sets)
    fit(tmp_path / "hosts", "-np", "4", sets=sets, HVD_TRAIN_HOST_MEMORY="2")
    one, hosts = arrays(tmp_path / "one"), arrays(tmp_path / "hosts")
    assert one.keys() == hosts.keys()
    for key, x in one.items():
        np.testing.assert_allclose(hosts[key], x, rtol=1e-8, atol=1e-12, err_msg=key)


def test_a_sharded_run_goes_on_whole_in_the_other_framework_on_other_ranks(tmp_path):
    fit(tmp_path / "one", sets=("max_steps=12",))
    first = ("max_steps=5", "optim.sharded=true")
    fit(tmp_path / "run", "-np", "2", "--launcher", "horovodrun", sets=first)
    go_on = ("--resume", "auto", "--allow-change", "framework")
    fit(tmp_path / "run", "-np", "3", *go_on, sets=("max_steps=9", "optim.sharded=true", "framework=tensorflow"))
    fit(tmp_path / "run", *go_on, sets=("max_steps=12",))
    one, run = arrays(tmp_path / "one"), arrays(tmp_path / "run")
    assert one.keys() == run.keys() and any("exp_avg_sq" in key for key in one)
    for key, x in one.items():
        np.testing.assert_allclose(run[key], x, rtol=1e-8, atol=1e-12, err_msg=key)


@pytest.mark.parametrize("framework", ["pytorch", pytest.param("tensorflow", marks=SAME)])
def test_a_rank_that_is_killed_while_ranks_share_memory_is_named(tmp_path, framework):
    sets = settings(tmp_path / "run", "optim.sharded=true", f"framework={framework}")
    job = Job("-np", tmp_path, *sets, HVD_TRAIN_FAULT="step:1:10:stop")
    killed = job.stopped(1)
    assert ["hvd-train-host" in Path(f"/proc/{one.pid}/maps").read_text() for one in job.ranks()] == [True, True]
    killed.kill()
    code, _, err = job.end()
    assert code == 5 and err.startswith("error: rank 1 was ended by SIGKILL; in "), err


CHANGING = """
import torch

class Changing(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(64, 10)

    def forward(self, x):
        with torch.no_grad():
            self.linear.weight.mul_(0.999)
        return self.linear(x.flatten(1))

def model(**shape):
    return Changing()
"""


@pytest.mark.parametrize("change", ["mul_(0.999)", "data.mul_(0.999)", "data = self.linear.weight.data * 0.999"])
def test_a_model_that_changes_its_weights_trains_as_where_no_memory_is_shared(tmp_path, change):
    """Each rank makes the change in pages of its own, and it counts once. Also the one in the last evaluation."""
    (tmp_path / "changing.py").write_text(CHANGING.replace("mul_(0.999)", change))
    sets = ("model={name: 'changing:model'}", "optim.sharded=true", "max_steps=3", "precision=64")
    words = [word for one in sets for word in ("--set", one)]
    for shares in ("1", "0"):
        job = Job("-np", tmp_path, *settings(tmp_path / shares), *words, HVD_TRAIN_HOST_MEMORY=shares)
        ended, _, err = job.end()
        assert ended == 0, err
    shared, apart = (
        load_file(next((tmp_path / one / "checkpoints").glob("step-*3")) / "weights.safetensors") for one in "10"
    )
    for key, x in apart.items():
        np.testing.assert_allclose(shared[key], x, rtol=1e-12, err_msg=key)


def test_changes_that_differ_between_ranks_are_refused(tmp_path):
    change = "mul_(0.9 + 0.01 * float(x.mean()))"
    (tmp_path / "changing.py").write_text(CHANGING.replace("mul_(0.999)", change))
    words = [word for one in ("model={name: 'changing:model'}", "optim.sharded=true") for word in ("--set", one)]
    ended, _, err = Job("-np", tmp_path, *settings(tmp_path / "run"), *words).end()
    assert ended == 2 and "changes its weights, and differently on each rank; model.name: changing:model; let" in err


LARGE = {"pytorch": [1000, 1000], "tensorflow": [2000, 2500]}  # above sharded_from


@pytest.mark.parametrize("framework", LARGE)
def test_auto_shards_large_models_on_one_host_with_the_numbers_of_whole_slots(tmp_path, framework):
    sets = (f"framework={framework}", f"model={{name: mlp, hidden: {LARGE[framework]}}}", "max_steps=6")
    told = {}
    for name, more in {"auto": {}, "apart": {"HVD_TRAIN_HOST_MEMORY": "0"}}.items():
        words = [word for one in (*KEYS, *sets) for word in ("--set", one)]
        told[name] = run("fit", "-c", str(TINY), "--run-dir", str(tmp_path / name), "-np", "2", *words, **more)
    assert "optim.sharded: auto: the ranks share one copy of the " in told["auto"].stdout + told["auto"].stderr
    assert "optim.sharded" not in told["apart"].stdout + told["apart"].stderr
    auto, apart = (
        load_file(next((tmp_path / name / "checkpoints").glob("step-*06")) / "optimizer.safetensors") for name in told
    )
    assert auto.keys() == apart.keys()
    for key, x in apart.items():
        np.testing.assert_allclose(auto[key], x, rtol=1e-9, atol=1e-14, err_msg=key)


KERAS = """
import keras

class Changing(keras.layers.Layer):
    def build(self, shape):
        self.dense = keras.layers.Dense(2500)
        self.dense.build(shape)

    def call(self, x):
        self.dense.kernel.assign(self.dense.kernel * 0.99)
        return self.dense(x)

def model(input_shape, num_classes):
    flat = [keras.Input(input_shape), keras.layers.Flatten()]
    return keras.Sequential([*flat, keras.layers.Dense(2000), Changing(), keras.layers.Dense(num_classes)])
"""


def test_auto_leaves_keras_models_alone_that_may_change_their_weights_and_true_refuses_them(tmp_path):
    (tmp_path / "changing.py").write_text(KERAS)
    sets = ("model={name: 'changing:model'}", "framework=tensorflow", "max_steps=3")
    words = [word for one in sets for word in ("--set", one)]
    ended, out, err = Job("-np", tmp_path, *settings(tmp_path / "run"), *words).end()
    assert ended == 0, err
    assert "optim.sharded: auto: not sharded, because changing (assign) may change weights" in out + err
    words += ["--set", "optim.sharded=true", "--set", f"run_dir={tmp_path / 'other'}"]
    ended, _, err = Job("-np", tmp_path, *settings(tmp_path / "other"), *words).end()
    assert ended == 2 and "the model changes its own weights, which ranks of one host share" in err
    assert "set optim.sharded: false" in err

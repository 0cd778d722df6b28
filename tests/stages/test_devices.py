"""Trainings whose ranks place the model's blocks on several devices: numbers of one device, checkpoints, mistakes."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest

from hvd_train.config import Config, load_config
from hvd_train.errors import ConfigError
from hvd_train.frontends.devices import gpus_of
from hvd_train.frontends.serial import Serial
from hvd_train.protocol import TensorSpec
from hvd_train.update.buckets import plan
from tests.cli.running import run
from tests.stages.test_runs import RESUME, assert_same, fit, trained
from tests.verify.test_zoo import ZOO, check

DEVICES = "parallel.devices_per_rank"
PLAIN = ("parallel.microbatches=null", "gradient_clip_val=0.5")


def command(*words: str) -> tuple[int, str]:
    done = run(*words, code=None)
    return done.returncode, done.stdout + done.stderr


EACH = ["pytorch", pytest.param("tensorflow", marks=pytest.mark.long("as in PyTorch, and verify trains both"))]


@pytest.mark.parametrize("framework", EACH)
def test_a_run_on_devices_is_one_of_one_device(tmp_path, framework):
    """It goes on with others and with one, is scored, and is exported."""
    one, run = trained(tmp_path / "one", framework, sets=(*PLAIN, "max_steps=12")), tmp_path / "run"
    code, text = fit(run, framework, sets=(*PLAIN, f"{DEVICES}=4", "max_steps=6"))
    names = ["cpu"] * 4 if framework == "pytorch" else [f"/CPU:{k}" for k in range(4)]
    assert code == 0 and f"4 devices a rank: {', '.join(names)}" in text, text
    assert re.search(r"device +blocks +ms a micro-batch", text) and re.search(r"^ *3 +1: .* 3 ", text, re.MULTILINE), (
        text
    )
    trained(run, framework, "-np", "2", *RESUME, sets=(*PLAIN, f"{DEVICES}=2", "parallel.split=[1,3]", "max_steps=9"))
    saved = trained(run, framework, *RESUME, sets=(*PLAIN, "max_steps=12"))
    assert_same(one, saved)
    of_run = ("--run-dir", str(run), "--trust")
    scores = [command("eval", *of_run, "--set", f"{DEVICES}={count}") for count in (1, 2)]
    assert scores[0] == scores[1] and scores[0][0] == 0 and '"samples": 359' in scores[0][1], scores
    code, text = command("predict", *of_run, "--set", f"{DEVICES}=2", "-o", str(tmp_path / "out.npy"))
    assert code == 0 and (tmp_path / "out.npy").exists(), text
    to = "pytorch" if framework == "pytorch" else "keras"
    code, text = command("export", *of_run, "--set", f"{DEVICES}=2", "--to", to)
    assert code == 0, text


def test_verify_compares_with_one_device(capfd):
    """Two ranks of two devices, with a table of tokens that both devices use, against one rank of one."""
    model, data, keys = ZOO["gpt"]
    check("gpt", model, data, keys | {"parallel": {"devices_per_rank": 2}, "gradient_clip_val": 0.5}, capfd)


def test_numbers_of_blocks_for_other_devices_are_refused():
    with pytest.raises(ConfigError, match="parallel.split: 3 numbers of blocks for 2 devices"):
        load_config(None, [f"{DEVICES}=2", "parallel.split=[1, 2, 1]"])


def test_a_mistake_is_one_line_before_the_first_step(tmp_path):
    sets = (*PLAIN, f"{DEVICES}=2", "model.hidden=[]")
    code, text = fit(tmp_path / "run", "pytorch", sets=sets, model="mlp")
    told = f"2 devices for 1 block; {DEVICES}: 2; set {DEVICES} to at most 1"
    assert code == 2 and text.startswith("error") and told in text and text.count("\n") == 1, text


def gpus(local_rank: int, local_size: int, visible: int, devices=None, count: int = 2) -> list[int]:
    config = Config.model_validate({"parallel": {"devices_per_rank": count}, "devices": devices})
    ranks = SimpleNamespace(local_rank=local_rank, local_size=local_size)
    return gpus_of(config, ranks, visible, "PyTorch")


def test_each_rank_takes_its_gpus(monkeypatch):
    assert [gpus(rank, 2, 4) for rank in range(2)] == [[0, 1], [2, 3]]
    assert gpus(1, 2, 8, [7, 6, 5, 4]) == [5, 4]
    assert gpus(0, 2, 0) == [] and gpus(3, 4, 4, count=1) == [3]
    assert gpus_of(Config.model_validate({"device": "cpu"}), Serial(), 4, "PyTorch") == []
    for rank in range(2):
        with pytest.raises(
            ConfigError, match=f"2 ranks of 2 devices need 4 GPUs, and this host has 3; {DEVICES}: 2; sta"
        ):
            gpus(rank, 2, 3)
    with pytest.raises(ConfigError, match=r"and this host has 4 \(devices \[0, 1, 2\]\)"):
        gpus(1, 2, 4, [0, 1, 2])
    monkeypatch.setenv("SLURM_GPUS_PER_TASK", "2")
    assert gpus(1, 2, 2) == [0, 1]


def test_no_bucket_has_tensors_of_two_devices():
    specs = [TensorSpec(str(i), (10,), "float32", place) for i, place in enumerate((0, 0, 1, 1, 0))]
    packing = SimpleNamespace(bucket_bytes=1 << 20, alone_bytes=1 << 20)
    assert sorted(map(sorted, plan(specs, packing))) == [[0, 1, 4], [2, 3]]

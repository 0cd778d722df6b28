"""Faults on purpose: who has them, when they come, and what is no fault."""

from __future__ import annotations

import os
import re
from types import SimpleNamespace

import pytest

from hvd_train import faults
from hvd_train.checkpoint import store
from hvd_train.cli import guide
from hvd_train.errors import ConfigError
from hvd_train.run_folder.log import RunLog
from tests.core.test_loop import config, final


@pytest.fixture(autouse=True)
def disarmed():
    yield
    faults._planned.clear()


def arm(monkeypatch, text, rank=0):
    monkeypatch.setenv(faults.VARIABLE, text)
    faults.arm(rank)


def test_a_fault_comes_once_to_its_rank_at_its_time(monkeypatch):
    arm(monkeypatch, "step:1:2:raise,write:0:1:enospc", rank=1)
    faults.at("write")
    faults.at("step")
    with pytest.raises(RuntimeError, match="on purpose"):
        faults.at("step")
    for _ in range(5):
        faults.at("step")
    arm(monkeypatch, "step:1:2:raise,write:0:1:enospc", rank=0)
    with pytest.raises(OSError, match="No space left"):
        faults.at("write")


def test_what_the_process_starts_has_none(monkeypatch):
    arm(monkeypatch, "step:0:1:raise")
    assert faults.VARIABLE not in os.environ


@pytest.mark.parametrize(
    "text", ["x:0:1:kill", "step:0:1:burn", "step:0:kill", "step:-1:1:kill", "step:0:one:kill", ":"]
)
def test_no_fault_is_one_line(monkeypatch, text):
    with pytest.raises(ConfigError, match=f"is no fault; {faults.VARIABLE}; POINT:RANK:NTH:ACTION of start, "):
        arm(monkeypatch, text)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("times", [1, 2])
def test_a_checkpoint_that_cannot_be_removed_ends_no_run(tmp_path, monkeypatch, capsys, ranks, times):
    """It is tried once more, then the next save does it. One failure after a good save was code 1 and a traceback."""
    monkeypatch.setattr("hvd_train.checkpoint.store.AGAIN_SECONDS", 0.0)
    arm(monkeypatch, ",".join(["remove:0:1:eio"] * times))  # a fault that comes hides the call from those behind it
    log = RunLog(tmp_path, tensorboard=False, total_epochs=3)
    final(ranks, config(checkpoint={"every_n_steps": 2}), tmp_path, log=log)
    log.close()
    kept, told = store.find(tmp_path / "checkpoints"), capsys.readouterr().err
    what = f"warning: old checkpoints cannot be removed: Input/output error; {tmp_path}/checkpoints; the next save"
    assert len(kept) in (2, 3) and told == f"{what} tries again\n" * (times - 1)


def test_all_points_are_met(tmp_path, monkeypatch):
    """A point that the training does not come to would test nothing."""
    met = []
    monkeypatch.setattr(faults, "at", met.append)
    lock = SimpleNamespace(path=tmp_path, check=lambda: None)
    log = RunLog(tmp_path, tensorboard=False, total_epochs=3, lock=lock)
    final(1, config(checkpoint={"every_n_steps": 2}), tmp_path, log=log)
    log.close()
    assert {*met} == {*faults.POINTS} - {"start"}  # which is before the loop


def test_the_guide_names_all_points():
    listed = re.search(r"Points are ([^.]+)\.", guide.page("resume"))
    assert {*re.findall(r"\w+", listed[1])} - {"and"} == {*faults.POINTS}

"""The trackers of ``loggers``: what they get, and that none of them ends or holds up a training."""

from __future__ import annotations

import csv
import os
import sys
import time
import types

import pytest

from hvd_train.config import load_config
from hvd_train.config.keys.config import Config
from hvd_train.config.trackers import TRACKERS
from hvd_train.errors import ConfigError
from hvd_train.run_folder import metrics_file
from hvd_train.run_folder.log import RunLog
from hvd_train.run_folder.trackers import calls, load
from hvd_train.run_folder.trackers.calls import Trackers
from hvd_train.run_folder.trackers.tracker import TrackedRun
from tests.limits import SECONDS

NUMBERS = {"loss": 1.5, "accuracy": 0.5, "samples": 10}
CONFIG = {"optim.lr": 0.1, "model.hidden": [8, 8]}


def opened(folder, *names, resumed_at=None):
    log = RunLog(folder, tensorboard=False, total_epochs=2)
    log.trackers = Trackers(load(names), TrackedRun(folder, CONFIG))
    log.resumed_at = resumed_at
    log.begin(0)
    return log


def finish(log, step=6):
    log.summary({"epochs": 2, "steps": step, "val_loss": 0.25, "model": "mlp"})
    log.close()


def test_each_row_is_a_value_of_the_key():
    assert Config(loggers=["tensorboard", *TRACKERS])
    assert all(row.tracker_class for row in TRACKERS.values())


def cells(folder):
    with open(folder / "metrics.csv", newline="") as stream:
        return list(csv.DictReader(stream))


def test_a_table_of_the_lines(tmp_path):
    """Columns come when they are needed; a resumed run repeats steps, and the table holds them once."""
    log = opened(tmp_path, "csv")
    log.train(0, 2, NUMBERS, 0.1, 3.0)
    log.val(0, 2, {"loss": float("nan"), "samples": 4, "f1": 0.25}, 0.1, 3.0)
    log.straggler(0, 3, {"shares": [0.5, 0.5]})
    log.train(0, 4, NUMBERS, 0.1, 3.0)
    log.close()
    rows = cells(tmp_path)
    assert [(row["event"], row["step"], row["loss"], row["f1"]) for row in rows] == [
        ("train", "2", "1.5", ""),
        ("val", "2", "", "0.25"),
        ("straggler", "3", "", ""),
        ("train", "4", "1.5", ""),
    ]
    assert rows[2]["shares"] == "[0.5, 0.5]"
    log = opened(tmp_path, "csv", resumed_at=3)
    log.train(0, 4, NUMBERS | {"loss": 1.25}, 0.1, 3.0)
    finish(log)
    assert [row["loss"] for row in cells(tmp_path)] == ["1.5", "", "", "1.25"]
    assert len(cells(tmp_path)) == len(metrics_file.read(tmp_path)[0])


class Failing:
    """A tracker that raises, or hangs, in one of its methods."""

    def __init__(self, at, how):
        self.at, self.how, self.called = at, how, []

    def __call__(self, run):
        self.enter("__init__")
        return self

    def enter(self, name):
        self.called.append(name)
        if name == self.at:
            self.how()

    def row(self, row):
        self.enter("row")

    def scalars(self, epoch, step, values):
        self.enter("scalars")

    def close(self, finished, summary):
        self.enter("close")


def full():
    raise OSError(28, os.strerror(28))


@pytest.mark.parametrize("thread", [False, True], ids=["called", "in a thread"])
@pytest.mark.parametrize("at", ["__init__", "scalars", "close"])
@pytest.mark.parametrize("how", [full, sys.exit])
def test_a_failure_is_told_once_and_ends_nothing(tmp_path, monkeypatch, capsys, thread, at, how):
    made = Failing(at, how)
    row = types.SimpleNamespace(thread=thread, tracker_class=made)
    log = opened(tmp_path)
    log.close()
    log = RunLog(tmp_path, tensorboard=False, total_epochs=2)
    log.trackers = Trackers({"mine": row}, TrackedRun(tmp_path, CONFIG))
    log.begin(0)
    for step in (2, 4, 6):
        log.train(0, step, NUMBERS, 0.1, 3.0)
        time.sleep(0.05 * thread)
    finish(log)
    err = capsys.readouterr().err
    reason = "OSError: [Errno 28] No space left on device" if how is full else "SystemExit: "
    assert err == (
        f"warning: mine is disabled: {reason}; loggers: mine; training goes on without it, and "
        "metrics.jsonl has all numbers\n"
    )
    assert made.called.count(at) == 1 and made.called[-1] == at
    assert [row["step"] for row in metrics_file.read(tmp_path)[0]] == [2, 4, 6] and (tmp_path / "summary.json").exists()


def test_a_tracker_that_hangs_holds_nothing_up(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(calls, "WAITING", 3)
    monkeypatch.setattr(calls, "END_SECONDS", 0.2)
    for at, reason in (("scalars", "it has not processed the last 3 lines"), ("close", "it does not finish")):
        log = RunLog(tmp_path / at, tensorboard=False, total_epochs=2)
        row = types.SimpleNamespace(thread=True, tracker_class=Failing(at, lambda: time.sleep(SECONDS)))
        log.trackers = Trackers({"mine": row}, TrackedRun(tmp_path / at, CONFIG))
        log.begin(0)
        began = time.monotonic()
        for step in range(6 if at == "scalars" else 1):
            log.train(0, step, NUMBERS, 0.1, 3.0)
        finish(log)
        assert f"mine is disabled: {reason}; " in capsys.readouterr().err
        assert time.monotonic() - began < SECONDS


@pytest.mark.parametrize("name", ["mlflow", "wandb", "aim"])
def test_what_is_not_installed_or_broken_is_refused(monkeypatch, tmp_path, name):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=f"^{name} .*; loggers: {name}; pip install {name} on the host of rank 0"):
        load([name])
    monkeypatch.delitem(sys.modules, name)
    (tmp_path / f"{name}.py").write_text("import ctypes\nctypes.CDLL('libgone.so')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=f"{name} cannot be imported: OSError: libgone.so"):
        load([name])


def test_only_known_names():
    with pytest.raises(ConfigError, match=r"loggers\[?.*neptune|'tensorboard', 'csv'"):
        load_config(None, ["loggers=[neptune]"])


class Recorder:
    """Take any call; keep (name, positional arguments, keywords)."""

    def __init__(self, calls, name=""):
        self.__dict__.update(calls=calls, path=name)

    def __getattr__(self, name):
        return Recorder(self.calls, f"{self.path}.{name}".strip("."))

    def __setattr__(self, name, value):
        self.calls.append((name, value))

    __setitem__ = __setattr__

    def __call__(self, *args, **keywords):
        self.calls.append((self.path, args, keywords))
        return self


def recorded(folder, name, monkeypatch, **attributes):
    """Run a log with a stand-in for a package that is not installed here; return the calls."""
    found = []
    module = Recorder(found)
    module.__dict__.update(attributes)
    monkeypatch.setitem(sys.modules, name, module)
    log = opened(folder, name)
    log.train(0, 2, NUMBERS, 0.1, 3.0)
    finish(log)
    return found


SCALARS = {"loss/train": 1.5, "accuracy/train": 0.5, "lr": 0.1, "samples_per_second": 3.0}


def test_weights_and_biases_is_offline_and_goes_on_with_a_run(tmp_path, monkeypatch):
    for variable in ("WANDB_MODE", "WANDB_ERROR_REPORTING", "WANDB_PROJECT"):
        monkeypatch.delenv(variable, raising=False)
    ids = []
    for _ in range(2):
        found = recorded(tmp_path, "wandb", monkeypatch)
        assert os.environ["WANDB_MODE"] == "offline" and os.environ["WANDB_ERROR_REPORTING"] == "false"
        (settings,) = [k for name, _, k in (c for c in found if len(c) == 3) if name == "Settings"]
        assert settings == {"console": "off", "silent": True}
        (began,) = [call[2] for call in found if call[0].endswith("init")]
        assert began["resume"] == "allow" and began["config"] == CONFIG and began["name"] == tmp_path.name
        ids.append(began["id"])
        (numbers,) = [call[1][0] for call in found if call[0].endswith(".log")]
        assert numbers == SCALARS | {"epoch": 1, "step": 2}
        assert found[-1][0].endswith("finish") and found[-1][2] == {"exit_code": 0}
    assert ids[0] == ids[1]
    monkeypatch.setenv("WANDB_MODE", "online")
    load(["wandb"])
    assert os.environ["WANDB_MODE"] == "online"


def test_mlflow_writes_into_the_run_folder(tmp_path, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.delenv("MLFLOW_DISABLE_TELEMETRY", raising=False)
    entities = types.SimpleNamespace(Metric=lambda *x: x, Param=lambda *x: x)
    monkeypatch.setitem(sys.modules, "mlflow.entities", entities)
    keep = TrackedRun.keep_id
    monkeypatch.setattr(TrackedRun, "keep_id", lambda self, tracker, name: keep(self, tracker, "abc"))
    found = recorded(tmp_path, "mlflow", monkeypatch)
    assert found[0] == ("MlflowClient", (), {"tracking_uri": f"sqlite:///{tmp_path}/loggers/mlflow/mlflow.db"})
    (parameters,) = [k["params"] for _, _, k in found if "params" in k]
    assert parameters == [("optim.lr", "0.1"), ("model.hidden", "[8, 8]")]
    metrics = [{m[0]: m[1] for m in k["metrics"]} for _, _, k in found if "metrics" in k]
    assert metrics == [SCALARS | {"epoch": 1}, {"epochs": 2.0, "steps": 6.0, "val_loss": 0.25, "epoch": 2}]
    assert found[-1][0] == "MlflowClient.set_terminated" and found[-1][1][1] == "FINISHED"
    assert os.environ["MLFLOW_DISABLE_TELEMETRY"] == "true"
    again = recorded(tmp_path, "mlflow", monkeypatch)
    assert ("MlflowClient.update_run", ("abc",), {"status": "RUNNING"}) in again


def test_aim_keeps_its_repository_in_the_run_folder(tmp_path, monkeypatch):
    monkeypatch.delenv("AIM_REPO", raising=False)
    keep = TrackedRun.keep_id
    monkeypatch.setattr(TrackedRun, "keep_id", lambda self, tracker, name: keep(self, tracker, "abc"))
    for old in (None, "abc"):
        found = recorded(tmp_path, "aim", monkeypatch)
        assert found[0][1] == (old,) and found[0][2]["repo"] == f"{tmp_path}/loggers/aim"
        tracked = [call for call in found if call[0].endswith("track")]
        assert tracked[0][1:] == ((1.5,), {"name": "loss", "step": 2, "epoch": 1, "context": {"subset": "train"}})
        assert len(tracked) == len(SCALARS) and found[-1][0].endswith("close")


def test_a_run_that_fails_closes_its_trackers(tmp_path):
    log = opened(tmp_path)
    made = Failing("", None)
    log.trackers = Trackers({"mine": types.SimpleNamespace(thread=True, tracker_class=made)}, TrackedRun(tmp_path, {}))
    log.trackers.begin()
    log.failed()
    log.failed()
    assert made.called == ["__init__", "close"]
    log.close()

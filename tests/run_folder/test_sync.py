"""``sync``: what trackers have of a run afterwards, read back by their own packages (where they are installed)."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hvd_train.config.trackers import TARGETS
from hvd_train.errors import CheckpointError, ConfigError
from hvd_train.run_folder import metrics_file, sync
from hvd_train.run_folder.lock import Lock
from tests.environments import run_pytest_with
from tests.limits import SECONDS

ROOT = Path(__file__).parents[2]
CONFIG = "optim: {lr: 0.1}\nmodel: {hidden: [8, 8]}\ntensorboard: false\nloggers: []\n"


@pytest.fixture(autouse=True)
def places(monkeypatch):
    """Leave out what this machine's user has set, and forget what a test sets."""
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME", "AIM_REPO", "WANDB_MODE", "WANDB_PROJECT"):
        monkeypatch.delenv(name, raising=False)


def targets(*but):
    """Return parameters for the targets; those whose packages are not here skip."""
    found = []
    for name, spec in TARGETS.items():
        missing = bool(spec.package) and importlib.util.find_spec(spec.package) is None
        found.append(pytest.param(name, marks=pytest.mark.skipif(missing, reason=f"{name} is not installed")))
    return [one for one in found if one.values[0] not in but]


def lines(epochs, loss=1.0, speed=100.0):
    """Two lines of the log for each of these epochs, of ten steps."""
    for epoch in epochs:
        for event, more in (("train", 0.0), ("val", 0.25)):
            value = loss / epoch / 3 + more
            row = {"event": event, "epoch": epoch, "step": 10 * epoch, "loss": value, "samples": 20}
            yield row | {"lr": 0.1, "samples_per_second": speed + epoch}


def write(folder, rows, summary=None, config=CONFIG):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(config)
    (folder / metrics_file.NAME).write_text("".join(json.dumps(row) + "\n" for row in rows))
    if summary:
        (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def send(run, name, address="", project=""):
    return sync.sync(run, name, sync.opened(name, address, project), address, project)


READ_AIM = """
import json, sys

import aim

repository, numbers = aim.Repo(sys.argv[1]), []
runs = [aim.Run(name, repo=repository, read_only=True) for name in repository.list_all_runs()]
(name,) = {one.hash for one in runs if one.name == sys.argv[2]}
quiet = {"system_tracking_interval": None, "capture_terminal_logs": False}
found = aim.Run(name, repo=repository, **quiet)  # what is read-only shows what a server has indexed
for metric in found.metrics():
    steps, (values, *_) = metric.data.numpy()
    name = "/".join([metric.name, *metric.context.to_dict().values()])
    numbers += [(name, int(step), float(x)) for step, x in zip(steps, values, strict=True)]
said = numbers, found["config"], found["summary"], found["finished"]
found.close()
print(json.dumps(said))
"""


class Read:
    """What a target has of a run, by its own package: ``numbers`` [(name, step, value)], ``config``, ``summary``."""

    def __init__(self, name, run, address=""):
        self.numbers, self.config, self.summary, self.state = [], {}, {}, ""
        getattr(self, name)(run, address)
        self.numbers = sorted(x for x in self.numbers if x[0] not in ("epoch", "step"))

    def tensorboard(self, run, address):
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(str(Path(address) / run.name if address else run / "tensorboard"), {"scalars": 0})
        events.Reload()
        for name in events.Tags()["scalars"]:
            self.numbers += [(name, one.step, one.value) for one in events.Scalars(name)]
        texts = {
            name: events.Tensors(name)[-1].tensor_proto.string_val[0].decode() for name in events.Tags()["tensors"]
        }
        read = {name: dict(line.strip().split(": ", 1) for line in text.splitlines()) for name, text in texts.items()}
        self.config, self.summary = (
            {k: json.loads(x) for k, x in read.get(n, {}).items()} for n in ("config", "summary")
        )

    def csv(self, run, address):
        import csv

        with open(run / "metrics.csv", newline="") as stream:
            for row in csv.DictReader(stream):
                self.numbers.append((f"loss/{row['event']}", int(row["step"]), float(row["loss"])))

    def mlflow(self, run, address):
        from mlflow import MlflowClient

        client = MlflowClient(address or f"sqlite:///{run.resolve()}/loggers/mlflow/mlflow.db")
        (experiment,) = (one for one in client.search_experiments() if one.name == "hvd_train")
        (found,) = (x for x in client.search_runs([experiment.experiment_id]) if x.info.run_name == run.name)
        for name in found.data.metrics:
            history = client.get_metric_history(found.info.run_id, name)
            self.numbers += [(name, one.step, one.value) for one in history]
        self.summary = {name: x for name, x in found.data.metrics.items() if "/" not in name}
        self.numbers = [x for x in self.numbers if "/" in x[0] or x[0] in ("lr", "samples_per_second", "epoch")]
        assert len({x[:2] for x in self.numbers}) == len(self.numbers), "epochs, too, are sent once"
        self.config, self.state = found.data.params, found.info.status

    def aim(self, run, address):
        # In a process of its own: this one does not see runs that were made after its first look at a repository.
        line = [sys.executable, "-c", READ_AIM, address or str(run / "loggers" / "aim"), run.name]
        done = subprocess.run(line, capture_output=True, text=True, timeout=SECONDS, check=False)
        assert done.returncode == 0, done.stderr
        numbers, self.config, self.summary, self.state = json.loads(done.stdout.splitlines()[-1])
        self.numbers += [(name, step, x) for name, step, x in numbers]

    def wandb(self, run, address):
        from wandb.proto.wandb_internal_pb2 import Record

        (file,) = (run / "loggers" / "wandb-sync").glob("wandb/offline-run-*/*.wandb")
        for data in leveldb_records(file.read_bytes()):
            record = Record()
            record.ParseFromString(data)
            if record.WhichOneof("record_type") == "history":
                row = {
                    item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item
                }
                names = (name for name in row if not name.startswith("_"))
                self.numbers += [(name, row["step"], row[name]) for name in names]
            for kind, into in (("run", self.config), ("summary", self.summary)):
                if record.WhichOneof("record_type") == kind:
                    items = record.run.config.update if kind == "run" else record.summary.update
                    into.update({x.key or "/".join(x.nested_key): json.loads(x.value_json) for x in items})


def leveldb_records(data):
    """Yield the records of a log in LevelDB's format: blocks of 32 KiB of parts with checksum, length and kind."""
    assert data.startswith(b":W&B")
    at, record = 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        record, at = record + data[at + 7 : at + 7 + length], at + 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield record
            record = b""


def numbers(rows, name):
    """The numbers of the log as the target shows them."""
    found = [(n, row["step"], x) for row in rows for n, x in metrics_file.scalars(row).items()]
    if name == "tensorboard":
        import numpy as np

        return sorted((n, step, float(np.float32(x))) for n, step, x in found)
    return sorted(x for x in found if name != "csv" or x[0].startswith("loss"))


@pytest.mark.parametrize("name", targets())
def test_what_is_sent_once_is_there_once(tmp_path, name):
    """Nothing is lost or doubled, whenever sync is called: while the log grows, twice, and after the end."""
    rows = [*lines(range(1, 6))]
    run = write(tmp_path / "a", rows[:4])
    with Lock(run):  # it is training
        assert f"{run}: 4 lines sent to " in send(run, name)
        assert Read(name, run).numbers == numbers(rows[:4], name)
        with open(run / metrics_file.NAME, "a") as stream:
            stream.write(json.dumps(rows[4]) + "\n" + json.dumps(rows[5])[:20])  # which is not whole yet
        send(run, name)
        assert Read(name, run).numbers == numbers(rows[:5], name)
    summary = {"epochs": 5, "steps": 50, "val_loss": 0.125, "model": "mlp"}
    write(run, rows, summary)
    said = send(run, name)
    assert "5 were there already" in said or name in ("csv", "wandb")
    again = send(run, name)
    assert " has all 10 lines" in again or name == "csv"
    read = Read(name, run)
    assert read.numbers == numbers(rows, name)
    if name != "csv":
        hidden = read.config["model.hidden"]
        assert hidden in ([8, 8], "[8, 8]") and read.summary["val_loss"] == 0.125
        assert {"mlflow": "FINISHED", "aim": True}.get(name, "") == read.state


@pytest.mark.parametrize("name", targets())
def test_a_resumed_run_with_the_same_numbers(tmp_path, name):
    """Lines are dropped and come again with another speed: each number is there once."""
    rows = [*lines(range(1, 5))]
    run = write(tmp_path / "a", rows)
    send(run, name)
    write(run, rows[:4])
    with Lock(run):
        send(run, name)
        write(run, [*rows[:4], *lines(range(3, 7), speed=200)])
        said = send(run, name)
    assert "other numbers" not in said
    whole = [*rows[:4], *lines(range(3, 7), speed=100)]
    read, wanted = Read(name, run).numbers, numbers(whole, name)
    assert [x for x in read if "speed" not in x[0] and "second" not in x[0]] == [
        x for x in wanted if "second" not in x[0]
    ]
    assert [x[:2] for x in read] == [x[:2] for x in wanted]


@pytest.mark.parametrize("name", targets())
def test_a_resumed_run_with_other_numbers(tmp_path, name):
    """The target shows those of the log, and none of the earlier start."""
    rows = [*lines(range(1, 5))]
    run = write(tmp_path / "a", rows)
    send(run, name)
    write(run, other := [*rows[:4], *lines(range(3, 5), loss=7.0)])
    said = send(run, name)
    assert "a resumed run has other numbers from step 30 on" in said or name in ("csv", "wandb")
    assert Read(name, run).numbers == numbers(other, name)
    write(run, fewer := other[:6])  # and ended there
    send(run, name)
    assert Read(name, run).numbers == numbers(fewer, name)
    assert send(run, name).endswith("6 lines") or name == "csv"


KILLED = """
import os, sys
from pathlib import Path
from hvd_train.run_folder import sync
from hvd_train.run_folder.trackers import {file} as module
point, left = module.{owner}{method}, [{after}]
def dies(*words, **keys):
    left[0] -= 1
    if left[0] < 0:
        os._exit(9)
    return point(*words, **keys)
module.{owner}{method} = dies
{more}
sync.sync(Path("a"), "{name}", sync.opened("{name}"))
"""
POINTS = {
    "mlflow": ("mlflow_store", "MLflowTarget.", "_log", 3, "module.NUMBERS = 7"),
    "aim": ("aim_repository", "", "_track", 5, ""),
    "wandb": ("weights_and_biases", "shutil.", "rmtree", 1, ""),
    "tensorboard": ("tensorboard_folder", "Events.", "scalars", 5, ""),
}


@pytest.mark.parametrize("name", targets("csv"))
def test_a_killed_sync_is_called_again(tmp_path, name):
    file, owner, method, after, more = POINTS[name]
    run = write(tmp_path / "a", rows := [*lines(range(1, 9))])
    code = KILLED.format(file=file, owner=owner, method=method, after=after, more=more, name=name)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    line = [sys.executable, "-c", code]
    done = subprocess.run(line, cwd=tmp_path, env=environment, capture_output=True, timeout=SECONDS, check=False)
    assert done.returncode == 9, done.stderr.decode()
    if name == "tensorboard":  # as if within a record
        (events,) = (run / "tensorboard").iterdir()
        os.truncate(events, events.stat().st_size - 5)
    said = send(run, name)
    assert Read(name, run).numbers == numbers(rows, name), said
    assert " has all 16 lines" in send(run, name)


@pytest.mark.parametrize("name", targets("csv", "wandb"))
def test_several_runs_in_one_place(tmp_path, name):
    """Runs of the same name from different folders stay apart, and a copied run that goes on is another one."""
    address = str(tmp_path / "place")
    if name == "mlflow":
        address = f"sqlite:///{address}.db"
    runs = {write(tmp_path / "x" / n, r := [*lines(range(1, 3), loss=k + 1.0)]): r for k, n in enumerate("ab")}
    for _ in range(2):
        for run in runs:
            send(run, name, address)
    for run, rows in runs.items():
        assert Read(name, run, address).numbers == numbers(rows, name)
    copy = tmp_path / "x" / "c"
    shutil.copytree(tmp_path / "x" / "a", copy)
    write(copy, rows := [*lines(range(1, 3)), *lines([3], loss=9.0)])
    assert "6 lines sent to" in send(copy, name, address)
    assert Read(name, copy, address).numbers == numbers(rows, name)
    assert "has all 4 lines" in send(tmp_path / "x" / "a", name, address)


def test_runs_of_one_name_in_a_folder_of_tensorboard(tmp_path):
    one, two = (write(tmp_path / n / "run", lines([k])) for k, n in enumerate("ab", 1))
    for _ in range(2):
        for run in (one, two):
            send(run, "tensorboard", str(tmp_path / "boards"))
    assert len([*(tmp_path / "boards").iterdir()]) == 2


@pytest.mark.parametrize(("name", "address"), [("mlflow", "http://127.0.0.1:9"), ("aim", "aim://127.0.0.1:9")])
def test_a_server_that_does_not_answer(tmp_path, monkeypatch, name, address):
    pytest.importorskip(name)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    run = write(tmp_path / "a", lines([1]))
    with pytest.raises(ConfigError, match=rf"{name} failed: .*--uri {address}; what was sent is kept; run .* again"):
        send(run, name, address)
    assert not (run / "loggers" / "lock").exists()


def test_a_training_that_sends_by_itself_is_left_alone_until_its_end(tmp_path):
    run = write(tmp_path / "a", lines([1]), config=CONFIG.replace("tensorboard: false", "tensorboard: true"))
    with Lock(run):
        assert "the training itself sends its numbers to tensorboard" in send(run, "tensorboard")
        assert "2 lines sent" in send(run, "tensorboard", str(tmp_path / "boards"))
        assert not (run / "tensorboard").exists()
    assert "2 lines sent" in send(run, "tensorboard")


def test_what_is_no_run_folder(tmp_path):
    with pytest.raises(ConfigError, match="there is no such run folder"):
        sync.check([tmp_path / "x"])
    write(tmp_path / "runs" / "a", lines([1]))
    with pytest.raises(
        ConfigError, match=r"holds no run: it has no metrics.jsonl; .*give the folders of its runs: .*/\*"
    ):
        sync.check([tmp_path / "runs" / "a", tmp_path / "runs"])


@pytest.mark.parametrize("name", ["mlflow", "wandb", "aim"])
def test_a_package_that_is_missing(monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=f"^{name} .*; --to {name}; pip install {name}$"):
        sync.opened(name)


def test_options_that_a_target_does_not_take():
    with pytest.raises(ConfigError, match="csv takes no --uri"):
        sync.opened("csv", "x")
    with pytest.raises(ConfigError, match="tensorboard takes no --project"):
        sync.opened("tensorboard", "", "x")


def test_two_at_a_time(tmp_path):
    run = write(tmp_path / "a", lines([1]))
    with Lock(run / "loggers"), pytest.raises(CheckpointError, match="another sync may be at work"):
        send(run, "csv")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written(tmp_path):
    run = write(tmp_path / "a", lines([1]))
    run.chmod(0o500)
    with pytest.raises(CheckpointError, match="the run folder cannot be written"):
        send(run, "csv")


def test_the_choices_of_the_command():
    assert [*TARGETS] == importlib.import_module("hvd_train.cli.sync").TARGETS


PACKAGES = ["mlflow-skinny", "sqlalchemy", "alembic", "wandb", "aim"]  # mlflow itself asks for another pyarrow


@pytest.mark.long("installs the trackers into an environment of its own")
def test_with_the_trackers_own_packages(tmp_path):
    if not [*targets()][0].marks[0].args[0]:
        return  # they are here, and the tests above ran with them
    assert "mlflow is not installed" not in run_pytest_with(PACKAGES, tmp_path, __file__)

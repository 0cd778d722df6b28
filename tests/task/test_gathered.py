"""Metrics of all outputs of an evaluation at once: the value of one rank in the order of the samples, on any number."""

from __future__ import annotations

import json

import numpy as np
import pytest

from hvd_train.config import load_config
from hvd_train.data.catalog import open_data
from hvd_train.errors import ConfigError
from hvd_train.frontends.serial import Serial
from hvd_train.metrics.metric import LabelForm
from hvd_train.protocol import Batch
from hvd_train.task import gathered
from hvd_train.task.gathered import Gathered, Gathering
from hvd_train.task.task import Task
from tests.cli.running import run
from tests.numpy_frontend import NumpyOps

NAME = "gathered:tests.task.test_gathered:margin"


def margin(outputs, labels):
    """The median of how far the right class is above the best other, and the place of the lowest."""
    own = outputs[np.arange(len(labels)), labels]
    others = np.where(np.arange(outputs.shape[1]) == labels[:, None], -np.inf, outputs).max(1)
    return np.median(own - others) + np.argmin(own - others)  # it depends on the order


def failing(outputs, labels):
    return outputs / labels[:3]


class Ranks(Serial):
    """One of several ranks, whose parts are ``everyone``'s."""

    def __init__(self, everyone):
        self._everyone = everyone

    def allgather_bytes(self, data, name="bytes"):
        return self._everyone(name)


def batch(indices, labels, rows=4):
    weights = (np.arange(rows) < len(indices)).astype(np.float32)
    return Batch({}, {"label": np.resize(labels, rows)}, weights, np.array(indices))


def filled(parts):
    gathering = Gathering("", "task.metrics: mine")
    for indices, outputs in parts:
        gathering.add(np.resize(np.asarray(outputs, float), (4, 1)), batch(indices, np.array(indices) * 10))
    return gathering


def test_all_samples_once_and_in_their_order():
    own = [filled(parts) for parts in ([([0, 1], [5, 6]), ([4], [9])], [([2, 3], [7, 8])], [])]
    data = [one._to_bytes() for one in own]
    named = {"gathered sizes": [str(len(one)).encode() for one in data], "gathered": data}
    outputs, labels = Gathering("", "mine").joined(Ranks(named.__getitem__))
    assert outputs.tolist() == [[5], [6], [7], [8], [9]] and labels.tolist() == [0, 10, 20, 30, 40]
    assert Gathering("", "mine").joined(Serial()) is None


def test_what_cannot_be_gathered_is_told_on_all_ranks(monkeypatch):
    gathering = filled([([0], [1])])
    gathering.add(np.zeros((4, 3)), batch([1], [1]))
    with pytest.raises(ConfigError, match="the outputs of batches have unequal shapes; task.metrics: mine") as told:
        gathering.joined(Serial())
    assert told.value.common
    monkeypatch.setattr(gathered, "MOST_BYTES", 100)
    with pytest.raises(ConfigError, match="all outputs and labels take 0.0 GiB on each rank, .*; set limit"):
        filled([([0], [1])]).joined(Serial())
    metric = Gathered("gathered:tests.task.test_gathered:failing", LabelForm("classes", 2))
    told = r"the function failed: ValueError: .*; it is called with outputs \(4, 2\) and labels \(4,\)"
    with pytest.raises(ConfigError, match=told):
        metric.value(np.zeros((4, 2)), np.zeros(4))


def test_its_name():
    config = load_config(base={"task": {"metrics": ["accuracy", NAME]}})
    assert config.task.names == ["loss", "accuracy", "margin"]
    assert config.user_code["task.metrics"] == f"accuracy, {NAME.removeprefix('gathered:')}"
    with pytest.raises(ConfigError, match="'gathered:margin': it is gathered:module:function"):
        load_config(base={"task": {"metrics": ["gathered:margin"]}})


@pytest.mark.parametrize("framework", ["pytorch", "tensorflow"])
def test_two_ranks_have_the_value_of_all_predictions(framework, tmp_path):
    folder = tmp_path / "run"
    sets = [f"framework={framework}", "precision=64", "model={name: mlp, hidden: [8]}", f"task.metrics=['{NAME}']"]
    words = [word for one in (*sets, "max_steps=5", "batch_size=33") for word in ("--set", one)]
    run("fit", "-np", "2", "--run-dir", str(folder), *words)
    run("predict", "--run-dir", str(folder), "-o", str(tmp_path / "rows.npy"))
    data = open_data(load_config(folder / "config.yaml").data).val
    want = margin(np.load(tmp_path / "rows.npy"), data.fetch(np.arange(len(data)))[1]["label"])
    assert json.loads((folder / "summary.json").read_text())["val_margin"] == pytest.approx(want, rel=1e-12)


MINE = """
import numpy as np
import torch

X = np.random.default_rng(0).normal(size=(37, 4)).astype(np.float32)
LABELS = {"price": X.sum(1), "sold": (X.sum(1) > 0).astype(np.int64)}


def data():
    return tuple((X[rows], {name: y[rows] for name, y in LABELS.items()}) for rows in (slice(24), slice(24, 37)))


def net():
    return torch.nn.Linear(4, 2)


def step(model, x, y):
    z = model(x)
    sold = torch.nn.functional.softplus(-z[:, 1] * (2 * y["sold"] - 1))
    return {"price": (z[:, 0] - y["price"]) ** 2, "sold": sold, "outputs": z}


def distance(outputs, labels):
    return np.median(np.abs(outputs[:, 1] - labels["sold"]))
"""


def test_a_step_of_several_losses_gives_all_labels(tmp_path):
    """Its losses have names of their own, which may be those of labels."""
    pytest.importorskip("torch")
    (tmp_path / "mine.py").write_text(MINE)
    task = "task={step: 'mine:step', loss_weights: {price: 1, sold: 1}, metrics: ['gathered:mine:distance']}"
    sets = ["model={name: 'mine:net'}", "data={name: 'mine:data'}", task, "max_epochs=1", "precision=64"]
    run("fit", "--run-dir", "run", *(word for one in sets for word in ("--set", one)), cwd=tmp_path)
    run("predict", "--run-dir", "run", "--trust", "-o", "rows.npy", cwd=tmp_path)
    x = np.random.default_rng(0).normal(size=(37, 4)).astype(np.float32)[24:]
    want = np.median(np.abs(np.load(tmp_path / "rows.npy")[:, 1] - (x.sum(1) > 0)))
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["val_distance"] == pytest.approx(want, rel=1e-6)


def test_labels_that_are_images_are_refused():
    """They came as stored, bytes and channels last, beside outputs of numbers with the channels first."""
    base = {"data": {"name": "mine:data", "target": "inputs"}, "task": {"loss": "mse", "metrics": [NAME]}}
    images = np.zeros((8, 6, 6, 1), np.uint8)
    config = load_config(base=base)
    data = open_data(config.data, config.task, ((images, np.zeros(8)), (images, np.zeros(8))))
    with pytest.raises(ConfigError, match="are images, which are gathered as stored, .*value for each sample"):
        Task(config.task, data.sample, NumpyOps())

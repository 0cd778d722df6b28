"""Metric objects of TorchMetrics and Keras: any partition gives the number that the library gives of all samples."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import numpy as np
import pytest

from hvd_train.config import TaskConfig
from hvd_train.errors import ConfigError
from hvd_train.protocol import Field, Sample
from hvd_train.task.task import Task

N, CLASSES = 23, 4
OF = {"task": "multiclass", "num_classes": CLASSES}
TORCH = [
    ("CohenKappa", OF),
    ("MatthewsCorrCoef", OF),
    ("F1Score", OF | {"average": "macro"}),
    ("AUROC", OF | {"thresholds": 50}),
    ("R2Score", {}),
    ("MeanAbsolutePercentageError", {}),
    ("LogCoshError", {}),
]
KERAS = [
    ("F1Score", {"average": "macro"}),
    ("TopKCategoricalAccuracy", {"k": 2}),
    ("CategoricalHinge", {}),
    ("AUC", {"from_logits": True, "multi_label": True}),
    ("R2Score", {}),
    ("RootMeanSquaredError", {}),
    ("LogCoshError", {}),
]
OF_NUMBERS = {name for name, options in TORCH if not options} | {"RootMeanSquaredError"}
CUTS = ([], [7], [1, 1, 20], [5, 9, 16])


def data(classes: bool) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    labels = rng.integers(0, CLASSES, N) if classes else rng.normal(size=(N, 1)).astype(np.float32)
    known = np.eye(CLASSES)[labels] if classes else labels
    return (known + 0.8 * rng.normal(size=known.shape)).astype(np.float32), labels


def made(metric, ops, classes=True, one_hot=False) -> Task:
    """The task with this metric; ``own_task`` is a file of a user's."""
    sys.modules["own_task"].metric = metric
    label = Field((), "int64", classes=CLASSES) if classes else Field((1,), "float32")
    label = Field((CLASSES,), "float32") if one_hot else label
    loss = "bce" if one_hot else "cross_entropy" if classes else "mse"
    task = Task(TaskConfig(loss=loss, metrics=["own_task:metric"]), Sample({}, {"label": label}), ops)
    shapes = {"outputs": (2, CLASSES if classes else 1), "label": (2, *label.shape), "weights": (2,)}
    outputs, labels, weights = (np.zeros(shape, np.float32) for shape in shapes.values())
    labels, weights = ops.from_numpy(labels.astype(label.dtype)), ops.from_numpy(weights + 1)
    task.probe(ops.from_numpy(outputs), {"label": labels}, weights)
    return task


def found(task, call, ops, outputs, labels, cuts) -> float:
    """The value from parts of the samples, each padded by two samples of another kind."""
    total = 0.0
    for part in np.split(np.arange(N), cuts):
        pad = np.concatenate([part, [0, 1]]).astype(int)
        weights = np.ones(len(pad), np.float32)
        weights[len(part) :] = 0
        z, y, w = (ops.from_numpy(x) for x in (outputs[pad], labels[pad], weights))
        total = total + ops.to_numpy(call(z, {"label": y}, w)[1])
    return task.results(total)["metric"]


@pytest.fixture(autouse=True)
def own_task(monkeypatch):
    monkeypatch.setitem(sys.modules, "own_task", SimpleNamespace())


def torch_ops():
    pytest.importorskip("torchmetrics")
    import torch

    from hvd_train.frontends.pytorch.ops import TorchOps

    return TorchOps(torch.device("cpu"))


def keras_ops():
    pytest.importorskip("tensorflow")
    from hvd_train.frontends.tensorflow.ops import TensorFlowOps

    return TensorFlowOps()


@pytest.mark.parametrize(("name", "options"), TORCH)
def test_any_partition_gives_the_number_of_torchmetrics(name, options):
    ops, classes = torch_ops(), name not in OF_NUMBERS
    import torch
    import torchmetrics

    (outputs, labels), metric = data(classes), getattr(torchmetrics, name)
    wanted = float(metric(**options).set_dtype(torch.float64)(torch.from_numpy(outputs), torch.from_numpy(labels)))
    assert np.isfinite(wanted) and wanted != 0
    task = made(metric(**options), ops, classes)
    for cuts in CUTS:
        assert found(task, task, ops, outputs, labels, cuts) == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize(("name", "options"), KERAS)
@pytest.mark.parametrize("traced", [False, True])
def test_any_partition_gives_the_number_of_keras(name, options, traced):
    ops, classes = keras_ops(), name not in OF_NUMBERS
    import keras
    import tensorflow as tf

    (outputs, labels), metric = data(classes), getattr(keras.metrics, name)
    labels = np.eye(CLASSES, dtype=np.float32)[labels] if classes else labels
    whole = metric(**options)
    whole.update_state(labels, outputs)
    wanted = float(whole.result())
    assert np.isfinite(wanted) and wanted != 0
    task = made(metric(**options), ops, classes, one_hot=classes)
    call = tf.function(task.__call__) if traced else task
    for cuts in CUTS:
        assert found(task, call, ops, outputs, labels, cuts) == pytest.approx(wanted, rel=1e-5)


def curve():
    import torchmetrics

    return torchmetrics.AUROC("multiclass", num_classes=CLASSES)


def correlation():
    import torchmetrics

    return torchmetrics.PearsonCorrCoef()


def of_each_class():
    import torchmetrics

    return torchmetrics.F1Score("multiclass", num_classes=CLASSES, average="none")


def largest():
    import torch
    import torchmetrics

    class Largest(torchmetrics.Metric):
        def __init__(self):
            super().__init__()
            self.add_state("largest", torch.tensor(0.0), dist_reduce_fx="sum")

        def update(self, outputs, labels):
            self.largest = torch.maximum(self.largest, 1 + outputs.abs().max())

        def compute(self):
            return self.largest

    return Largest()


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (curve, r"MulticlassAUROC keeps a list of all outputs \(preds, target\); .*metric; take a form that counts: "),
        (correlation, "PearsonCorrCoef: the state mean_x is no sum; task.metrics: own_task:metric; write a function"),
        (of_each_class, "its result failed: .*; it must give one number, for example a macro average"),
        (largest, "what it keeps of two samples is not the sum of what it keeps of each; task.metrics: own_task:m"),
    ],
)
def test_what_is_no_sum_is_refused(make, told):
    ops = torch_ops()
    with pytest.raises(ConfigError, match=told):
        made(make(), ops)


def test_a_mean_of_keras_alone_is_refused():
    ops = keras_ops()
    import keras

    with pytest.raises(ConfigError, match="Mean compares no outputs with labels; .*; name the function of which"):
        made(keras.metrics.Mean(), ops)


def test_each_library_belongs_to_its_framework():
    import keras

    for_torch, for_keras = torch_ops(), keras_ops()
    with pytest.raises(ConfigError, match="metrics of keras are for framework: tensorflow; task.metrics: own_task:m"):
        made(keras.metrics.F1Score(), for_torch)
    with pytest.raises(ConfigError, match="metrics of torchmetrics are for framework: pytorch"):
        made(correlation(), for_keras)


def test_a_class_that_needs_arguments():
    ops = torch_ops()
    import torchmetrics

    with pytest.raises(ConfigError, match=r"cannot be made without arguments: .*metric = CohenKappa\(\.\.\.\)"):
        made(torchmetrics.CohenKappa, ops)

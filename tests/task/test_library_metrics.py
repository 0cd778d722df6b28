"""Metric objects of TorchMetrics and Keras: any partition gives the number that the library gives of all samples."""

from __future__ import annotations

import sys
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

from hvd_train.config import TaskConfig
from hvd_train.errors import ConfigError
from hvd_train.metrics.metric import LabelForm, Predictions
from hvd_train.protocol import Field, Sample
from hvd_train.task.task import Task
from hvd_train.task.user_functions import UserLibraryMetric
from tests.numpy_frontend import NumpyOps

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
    # Whose variables are whole numbers: logits were cut to whole ones before the largest was looked for.
    ("MeanIoU", {"num_classes": CLASSES, "sparse_y_true": False, "sparse_y_pred": False}),
    ("OneHotIoU", {"num_classes": CLASSES, "target_class_ids": [0, 2]}),
]
OF_NUMBERS = {name for name, options in TORCH if not options} | {"RootMeanSquaredError"}
CUTS = ([], [7], [1, 1, 20], [5, 9, 16])


def data(classes: bool) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    labels = rng.integers(0, CLASSES, N) if classes else rng.normal(size=(N, 1)).astype(np.float32)
    known = np.eye(CLASSES)[labels] if classes else labels
    return (known + 0.8 * rng.normal(size=known.shape)).astype(np.float32), labels


def made(metric, ops, classes=True, one_hot=False, label=None, loss="", outputs=None) -> Task:
    """The task with this metric; ``own_task`` is a file of a user's."""
    sys.modules["own_task"].metric = metric
    loss = loss or ("bce" if one_hot else "cross_entropy" if classes else "mse")
    if label and ":" not in loss:
        loss = "cross_entropy" if label.classes else "mse" if label.shape else "bce"
    if outputs is None:
        outputs = (*label.shape, *[CLASSES] * bool(label.classes)) if label else (CLASSES if classes else 1,)
    label = label or (Field((), "int64", classes=CLASSES) if classes else Field((1,), "float32"))
    label = Field((CLASSES,), "float32") if one_hot else label
    task = Task(TaskConfig(loss=loss, metrics=["own_task:metric"]), Sample({}, {"label": label}), ops)
    shapes = {"outputs": (2, *outputs), "label": (2, *label.shape), "weights": (2,)}
    outputs, labels, weights = (np.zeros(shape, np.float32) for shape in shapes.values())
    labels, weights = ops.from_numpy(labels.astype(label.dtype)), ops.from_numpy(weights + 1)
    task.probe(ops.from_numpy(outputs), {"label": labels}, weights)
    return task


def found(task, call, ops, outputs, labels, cuts, pads=2) -> float:
    """The value from parts of the samples, each padded by samples of another kind."""
    total = 0.0
    for part in np.split(np.arange(N), cuts):
        pad = np.concatenate([part, [0, 1][:pads]]).astype(int)
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


@pytest.mark.parametrize("probabilities", [False, True])
def test_beside_an_own_loss_all_outputs_decide_whether_they_are_logits(probabilities):
    ops = torch_ops()
    import torchmetrics

    rng = np.random.default_rng(0)
    labels = rng.integers(0, 2, N).astype(np.float32)
    # Logits of which a few lie outside [0, 1]: a batch without them looked like probabilities.
    outputs = rng.uniform(0, 1, N) if probabilities else np.where(np.arange(N) % 8, rng.uniform(0, 1, N), -2)
    outputs = outputs.astype(np.float32)
    wanted = float(torchmetrics.Accuracy("binary")(*map(ops.from_numpy, (outputs, labels.astype(int)))))
    sys.modules["own_task"].loss = lambda outputs, labels: (outputs - labels) ** 2
    task = made(torchmetrics.Accuracy("binary"), ops, label=Field((), "float32"), loss="own_task:loss")
    for cuts in CUTS:
        assert found(task, task, ops, outputs, labels, cuts, pads=0) == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize("library", ["torchmetrics", "keras"])
def test_beside_an_own_loss_labels_that_do_not_count_are_left_out(library):
    if library == "torchmetrics":
        ops, keep = torch_ops(), lambda labels: (labels != -100).double()
        import torchmetrics

        metric = torchmetrics.Accuracy("multiclass", num_classes=CLASSES, average="micro")
    else:
        ops, keep = keras_ops(), lambda labels: ops.cast(labels != -100, "float64")
        import keras

        metric = keras.metrics.SparseCategoricalAccuracy()
    rng = np.random.default_rng(0)
    labels = np.where(rng.random(N) < 0.4, -100, rng.integers(CLASSES, size=N))
    outputs = rng.normal(size=(N, CLASSES)).astype(np.float32)
    sys.modules["own_task"].loss = lambda outputs, labels: (ops.cast(outputs[:, 0], "float64"), keep(labels))
    task = made(metric, ops, label=Field((), "int64"), loss="own_task:loss", outputs=(CLASSES,))
    wanted = (outputs.argmax(1) == labels)[labels != -100].mean()
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


NO_SUM = "its state after several samples is not the sum of its states after each; task.metrics: own_task:metric"
NAME = ".*; name the function that"
IMAGES = Field((16, 16), "float32")
REFUSED = [  # a metric of TorchMetrics or Keras, its labels (of classes, unless said), the message
    (
        lambda t: t.AUROC("multiclass", num_classes=CLASSES),
        None,
        r"MulticlassAUROC keeps a list of all outputs \(preds, target\); .*metric; take a form that counts: ",
    ),
    (lambda t: t.PearsonCorrCoef(), None, "PearsonCorrCoef: the state mean_x is not a sum; task.metrics: own_task:met"),
    (
        lambda t: t.F1Score("multiclass", num_classes=CLASSES, average="none"),
        None,
        "its result failed: .*; it must give one number, for example a macro average",
    ),
    # Its formula takes the range of the data from the batch.
    (lambda t: of_images(t.image.StructuralSimilarityIndexMeasure), IMAGES, NO_SUM),
    (lambda t: t.MeanMetric(), None, f"MeanMetric does not compare outputs with labels; {NAME}"),
    (
        lambda t: t.MetricCollection([t.R2Score()]),
        None,
        "MetricCollection holds several metrics; .*; name each of",
    ),
    (lambda t: t.CohenKappa, None, r"cannot be made without arguments: .*metric = CohenKappa\(\.\.\.\)"),
    (lambda _: keras_metric("F1Score"), None, "metrics of keras are for framework: tensorflow; task.metrics: own_task"),
]


def of_images(kind):
    class OfRows(kind):
        def update(self, outputs, labels):
            super().update(outputs[:, None], labels[:, None])

    return OfRows()


def keras_metric(name):
    import keras

    return getattr(keras.metrics, name)()


@pytest.mark.parametrize(("make", "label", "told"), REFUSED)
def test_what_is_no_sum_of_torchmetrics_is_refused(make, label, told):
    ops = torch_ops()
    import torchmetrics

    with pytest.raises(ConfigError, match=told):
        made(make(torchmetrics), ops, label=label)


@pytest.mark.parametrize(
    ("name", "label", "told"),
    [
        ("Mean", None, f"Mean does not compare outputs with labels; {NAME}"),
        # They take the largest label of the batch for the class of all its samples.
        ("CategoricalAccuracy", None, NO_SUM),
        ("SparseCategoricalAccuracy", Field((), "float32"), NO_SUM),
    ],
)
def test_what_is_no_sum_of_keras_is_refused(name, label, told):
    ops = keras_ops()
    with pytest.raises(ConfigError, match=told):
        made(keras_metric(name), ops, label=label)


def test_a_metric_of_torchmetrics_is_not_for_keras():
    ops = keras_ops()
    torchmetrics = pytest.importorskip("torchmetrics")
    with pytest.raises(ConfigError, match="metrics of torchmetrics are for framework: pytorch"):
        made(torchmetrics.PearsonCorrCoef(), ops)


def test_logits_between_0_and_1_are_logits_in_each_part():
    """TorchMetrics takes a batch for probabilities where all of it lies in [0, 1]."""
    ops = torch_ops()
    import torch
    import torchmetrics

    rng = np.random.default_rng(1)
    for options, label in (({"task": "binary"}, Field((), "float32")), (OF, Field((), "int64", classes=CLASSES))):
        count = label.classes or 1
        outputs = rng.normal(size=(N, count)).astype(np.float32).reshape(N, *[CLASSES] * bool(label.classes))
        labels = rng.integers(0, count + (count == 1), N).astype(label.dtype)
        metric = partial(torchmetrics.AUROC, thresholds=50) if label.classes else torchmetrics.Accuracy
        wanted = float(metric(**options)(torch.from_numpy(outputs), torch.from_numpy(labels.astype(int))))
        task = made(metric(**options), ops, label=label)
        for cuts in ([], [*range(1, N)]):
            assert found(task, task, ops, outputs, labels, cuts, pads=0) == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize(
    ("name", "count"), [("AveragePrecision", 0), ("AveragePrecision", CLASSES), ("JaccardIndex", CLASSES)]
)
def test_yes_and_no_of_bce_are_whole_numbers_for_torchmetrics(name, count):
    """The loss has them as float32, which these metrics refuse."""
    ops = torch_ops()
    import torch
    import torchmetrics

    options = {"task": "multilabel", "num_labels": count} if count else {"task": "binary"}
    options |= {"thresholds": 50} if name == "AveragePrecision" else {}
    label, rng = Field((count,) if count else (), "float32"), np.random.default_rng(0)
    outputs = rng.normal(size=(N, *label.shape)).astype(np.float32)
    labels, metric = rng.integers(0, 2, outputs.shape).astype(np.float32), getattr(torchmetrics, name)
    chances = torch.from_numpy(outputs).double().sigmoid()
    wanted = float(metric(**options).set_dtype(torch.float64)(chances, torch.from_numpy(labels).long()))
    task = made(metric(**options), ops, label=None if count else label, one_hot=bool(count))
    for cuts in CUTS:
        assert found(task, task, ops, outputs, labels, cuts) == pytest.approx(wanted, rel=1e-6)
    with pytest.raises(ConfigError, match="the metric failed: "):  # a label between yes and no
        found(task, task, ops, outputs, labels * 0.5, [7])


@pytest.mark.parametrize("shape", [(5,), ()])
@pytest.mark.parametrize("library", ["torchmetrics", "keras"])
def test_places_and_samples_without_a_label_do_not_count(library, shape):
    ops = torch_ops() if library == "torchmetrics" else keras_ops()
    import keras

    label = Field(shape, "int64", classes=CLASSES, masked=True)
    if library == "keras":
        metric = keras.metrics.SparseCategoricalAccuracy()
    else:
        import torchmetrics

        metric = torchmetrics.Accuracy(**OF, average="micro")
    task, rng = made(metric, ops, label=label), np.random.default_rng(0)
    labels, outputs = rng.integers(0, CLASSES, (N, *shape)), rng.normal(size=(N, *shape, CLASSES)).astype(np.float32)
    labels[rng.random(labels.shape) < 0.4] = -100
    there = labels >= 0
    wanted = (outputs.argmax(-1) == labels)[there].mean()
    for cuts in CUTS:
        assert found(task, task, ops, outputs, labels, cuts) == pytest.approx(wanted, rel=1e-6)


def test_what_is_no_sum_is_refused_where_the_model_gives_zeros():
    ops = keras_ops()
    import keras
    import tensorflow as tf

    class Largest(keras.metrics.Metric):
        def __init__(self):
            super().__init__()
            self.largest = self.add_weight(name="largest", initializer="zeros")

        def update_state(self, labels, outputs, sample_weight=None):
            self.largest.assign(tf.maximum(self.largest, tf.reduce_max(abs(outputs - tf.cast(labels, outputs.dtype)))))

        def result(self):
            return self.largest

    with pytest.raises(ConfigError, match="its state after several samples is not the sum of its states after each"):
        made(Largest(), ops, classes=False)


def test_labels_that_broadcast_with_the_outputs_are_told():
    """Outputs (n, 1) and labels (n,) gave n x n values, whose mean no sum of samples gives."""
    ops = keras_ops()
    import keras

    sys.modules["own_task"].metric, sample = keras.metrics.Hinge(), Sample({}, {"label": Field((), "float32")})
    task = Task(TaskConfig(loss="mse", metrics=["own_task:metric"]), sample, ops)
    outputs, zeros = ops.from_numpy(np.zeros((2, 1), np.float32)), ops.from_numpy(np.zeros(2, np.float32))
    with pytest.raises(ConfigError, match=r"its state after .*give labels the shape of the outputs, \(n, 1\)"):
        task.probe(outputs, {"label": zeros}, zeros + 1)


def test_losses_of_keras_get_the_labels_first():
    """Functions, objects, those with an argument, and classes derived from them; (outputs, labels) would be another."""
    ops = keras_ops()
    import keras
    import tensorflow as tf

    class Derived(keras.losses.Loss):
        def call(self, y_true, y_pred):
            return tf.reduce_mean(tf.abs(y_true - y_pred) / tf.abs(y_true), -1)

    outputs, labels = data(classes=False)
    wanted = np.mean(np.abs(outputs - labels) / np.abs(labels))
    percent = keras.losses.mean_absolute_percentage_error
    for metric, factor in [
        (percent, 100),
        (keras.losses.MeanAbsolutePercentageError(reduction=None), 100),
        (partial(percent), 100),
        (Derived(reduction=None), 1),
    ]:
        task = made(metric, ops, classes=False)
        assert found(task, task, ops, outputs, labels, [7]) == pytest.approx(factor * wanted, rel=1e-5)


def test_a_loss_of_keras_that_compares_samples_is_told():
    ops = keras_ops()
    import keras

    (remark,) = made(keras.losses.Circle(reduction=None), ops).remarks
    assert remark.startswith("task.metrics: own_task:metric: the value of a sample depends on the others of its batch")
    assert not made(keras.losses.SparseCategoricalCrossentropy(True, reduction=None), ops).remarks


def test_functions_of_pytorch_may_give_half_numbers_and_arrays():
    """NumPy has no bfloat16, and arrays are no tensors: to compare samples with one another needs neither."""
    ops, labels = torch_ops(), np.ones((N, 1), np.float32)
    for metric in (lambda z, y: abs(z - y)[:, 0].bfloat16(), lambda z, y: abs(z - y)[:, 0].numpy()):
        task = made(metric, ops, classes=False)
        assert found(task, task, ops, 0 * labels, labels, [7]) == 1


class NoFalsePositive:
    """A metric whose state is 0 after any number of rows."""

    shapes = [(2,)]

    def sums(self, outputs, labels, weights):
        return np.zeros(2)

    def result(self, states):
        return float(states[0].sum())


def test_a_state_of_zeros_has_a_value_unless_there_was_no_row():
    """It was taken for no value, and the best epoch of all was thrown away."""
    metric = UserLibraryMetric("mine:metric", NoFalsePositive(), LabelForm("classes", 2), False)
    rows = np.zeros((3, 2)), np.zeros(3, np.int64)
    found = [Predictions(*rows, np.array(weights), None, rows, NumpyOps()) for weights in ([1.0, 0, 1], [0.0, 0, 0])]
    values = [metric.result(np.asarray(metric.sums(one))) for one in found]
    assert values[0] == 0 and np.isnan(values[1])

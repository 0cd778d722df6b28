"""Every built-in loss and metric has scikit-learn's value, for all kinds of outputs and labels, in every framework.

Samples are divided into parts as among 1 to 3 ranks, one of which may be empty, and padded. Ties, outputs that are all
equal, classes that no label has, labels of -1 and 1, and shares of yes are among the kinds.
"""

from __future__ import annotations

import functools
import math
import sys
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
from scipy.special import log_softmax, softmax
from sklearn import metrics

from hvd_train.config import TaskConfig
from hvd_train.errors import ConfigError
from hvd_train.metrics.ranking import Ranking
from hvd_train.metrics.table import LOSSES, METRICS
from hvd_train.protocol import Field, Sample
from hvd_train.task.task import Task
from tests.numpy_frontend import NumpyOps

N, CLASSES, PLACES = 61, 7, 5


@pytest.fixture(scope="module", params=["numpy", "pytorch", "tensorflow"])
def ops(request):
    if request.param == "numpy":
        return NumpyOps()
    if request.param == "pytorch":
        torch = pytest.importorskip("torch")
        from hvd_train.frontends.pytorch.ops import TorchOps

        return TorchOps(torch.device("cpu"))
    pytest.importorskip("tensorflow")
    from hvd_train.frontends.tensorflow.ops import TensorFlowOps

    return TensorFlowOps()


# {form: (loss, shape of a sample's labels, classes or 0)}
FORMS = {
    "one output": ("bce", (), 0),
    "two outputs": ("cross_entropy", (), 2),
    "more classes": ("cross_entropy", (), CLASSES),
    "places": ("cross_entropy", (PLACES,), CLASSES),
    "several labels": ("bce", (4,), 0),
    "mask": ("bce", (3, 4), 0),
    "distances of yes and no": ("mse", (), 0),
    "number": ("mse", (), 0),
    "vector": ("huber", (3,), 0),
    "absolute": ("mae", (2, 3), 0),
}
YES_AND_NO = ("one output", "several labels", "mask")
OUTPUTS = ("any", "tied", "equal", "sure")
CASES = [(form, outputs, "all") for form in FORMS for outputs in OUTPUTS]
CASES += [(form, outputs, "few classes") for form in FORMS if FORMS[form][2] for outputs in ("any", "tied")]
CASES += [(form, "tied", "one class") for form in FORMS]
CASES += [(form, "tied", "shares") for form in YES_AND_NO]
CASES += [("places", outputs, "missing") for outputs in OUTPUTS] + [("more classes", "tied", "missing")]


def drawn(form, outputs, labels):
    """(loss, outputs, labels, field of the labels) of N samples."""
    loss, shape, classes = FORMS[form]
    rng = np.random.default_rng(len(form + outputs + labels))
    if classes:
        y = rng.integers(
            0, 1 if labels == "one class" else min(3, classes) if labels == "few classes" else classes, (N, *shape)
        )
        if labels == "missing":
            y[rng.random(y.shape) < 0.5] = -100
        field = Field(shape, "int64", classes=classes, masked=labels == "missing")
    else:
        y = rng.normal(size=(N, *shape)) + 1
        if form in (*YES_AND_NO, "distances of yes and no"):
            y = (y > 0.5).astype(float)
        if labels == "shares":
            y = np.round(rng.random(y.shape), 1)  # a half itself among them
        if labels == "one class":
            y[:] = 1
        if form == "distances of yes and no":
            y = 2 * y - 1
        field = Field(shape, "float32")
    known = np.eye(classes)[np.maximum(y, 0)] if classes else y
    z = rng.normal(size=known.shape) + known
    z = {"any": z, "tied": np.round(z), "equal": np.full_like(z, 0.25), "sure": 30 * z}[outputs]
    return loss, z, y, field


def areas(area, y, z, how):
    """The mean of scikit-learn's area over the labels that have one."""
    y, z = (x.reshape(len(x), -1) if how != "micro" else x.reshape(-1, 1) for x in (y, z))
    none = {
        "roc_auc_score": lambda one: one.all() or not one.any(),
        "average_precision_score": lambda one: not one.any(),
    }
    there = [k for k in range(y.shape[1]) if not none[area.__name__](y[:, k])]
    found = [area(y[:, k], z[:, k]) for k in there]
    return np.average(found, weights=y[:, there].sum(0) if how == "weighted" else None) if there else math.nan


@functools.cache
def wanted(form, outputs, labels):
    """{loss or metric: scikit-learn's value}, of all that this form of outputs and labels has."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # scikit-learn warns where classes are absent
        return values_of(form, *drawn(form, outputs, labels)[1:3])


def values_of(form, z, y):
    _, shape, classes = FORMS[form]
    found = {}
    if form in ("number", "vector", "absolute"):
        y, z = y.ravel(), z.ravel()
        gap = abs(z - y)
        found |= {"mse": metrics.mean_squared_error(y, z), "mae": metrics.mean_absolute_error(y, z)}
        found |= {"rmse": found["mse"] ** 0.5, "mape": metrics.mean_absolute_percentage_error(y, z)}
        found["r2"] = metrics.r2_score(y, z) if np.ptp(y) else math.nan
        return found | {"huber": np.where(gap <= 1, gap**2 / 2, gap - 0.5).mean()}
    if classes:
        there = y >= 0
        y, z = y[there], z[there]
        losses = -log_softmax(z, -1)[np.arange(len(y)), y]
        found["cross_entropy"] = losses.mean()
        if losses.max() < 30:  # log_loss takes no probability below 1e-16
            known = metrics.log_loss(y, softmax(z, -1), labels=range(classes))
            assert found["cross_entropy"] == pytest.approx(known, rel=1e-12)
        found["perplexity"] = np.exp(found["cross_entropy"])
        if classes > 2:
            found["top5"] = metrics.top_k_accuracy_score(y, z, k=5, labels=range(classes))
        predicted, several = z.argmax(-1), False
        z = z[:, 1] - z[:, 0] if classes == 2 else None
    else:
        found["bce"] = np.mean(np.logaddexp(0, z) - y * z)
        found["mse"] = np.mean((z - y) ** 2)
        several = len(shape) == 1
        y, predicted = y > 0.5, z > 0
        if not several:
            y, z, predicted = y.ravel(), z.ravel(), predicted.ravel()
    found["accuracy"] = 1 - metrics.hamming_loss(y, predicted) if several else metrics.accuracy_score(y, predicted)
    if not several:
        found["balanced_accuracy"] = metrics.balanced_accuracy_score(y, predicted)
    scores = {"f1": metrics.f1_score, "precision": metrics.precision_score, "recall": metrics.recall_score}
    for name, score in (scores | {"iou": metrics.jaccard_score}).items():
        for how in ("macro", "micro", "weighted"):
            found[f"{name}_{how}"] = score(y, predicted, average=how, zero_division=0)
        alone = not several and classes in (0, 2)
        found[name] = score(y, predicted, average="binary", zero_division=0) if alone else found[f"{name}_macro"]
    found["dice"] = found["f1"]
    if z is not None:
        for name, area in (("auc", metrics.roc_auc_score), ("average_precision", metrics.average_precision_score)):
            found |= {f"{name}_{how}": areas(area, y, z, how) for how in ("macro", "micro", "weighted")}
            found[name] = found[f"{name}_macro"]
    return found


def evaluated(task, ops, z, y, parts):
    """The results of samples that lie on several ranks, each of which pads its batches."""
    sums, rankings = np.zeros(task.length), [{k: Ranking(n) for k, n in task.ranked.items()} for _ in parts]
    for rows, of_rank in zip(parts, rankings, strict=True):
        for batch in (rows[:8], rows[8:]):
            pad = [(0, 3)] + [(0, 0)] * (z.ndim - 1)
            weights = np.pad(np.ones(len(batch)), pad[0])
            given = np.pad(z[batch], pad), np.pad(y[batch], pad[: y.ndim]), weights
            outputs, labels, weights = (ops.from_numpy(x) for x in given)
            row = ops.to_numpy(task.scores(outputs, {"label": labels}, weights))
            sums += row[: task.length]
            task.rank(row[task.length :], of_rank)
    joined = {k: one.joined([of_rank[k].to_bytes() for of_rank in rankings]) for k, one in rankings[0].items()}
    return task.results(sums, joined)


@pytest.mark.parametrize("case", CASES, ids=", ".join)
def test_values_are_those_of_scikit_learn(ops, case):
    loss, z, y, field = drawn(*case)
    known = wanted(*case)
    names = [name for name in known if METRICS[name].labels in ("both", "classes" if field.classes else "numbers")]
    task = Task(TaskConfig(loss=loss, metrics=names), Sample({}, {"label": field}), ops)
    rng = np.random.default_rng(0)
    for parts in ([[*range(N)]], np.split(rng.permutation(N), [20, 20])):  # the second of three is empty
        found = evaluated(task, ops, z, y, [np.array(rows, int) for rows in parts])
        assert found["samples"] == N
        for name, value in known.items():
            assert found[name] == pytest.approx(value, rel=1e-11, abs=1e-13, nan_ok=True), name
        assert found["loss"] == pytest.approx(known[loss], rel=1e-11)


@pytest.mark.parametrize("kind", ["int64", "int32", "uint8", "float32", "bool"])
@pytest.mark.parametrize("outputs", [(), (1,), (2,), (CLASSES,)], ids=str)
def test_beside_a_loss_of_ones_own_labels_have_any_type(ops, monkeypatch, kind, outputs):
    """Built-in metrics of classes ended with errors of TensorFlow unless labels were int64."""
    monkeypatch.setitem(sys.modules, "own_any", SimpleNamespace(loss=lambda z, y: ops.reshape(z, (len(z), -1))[:, 0]))
    rng, classes = np.random.default_rng(0), max(2, *outputs, 2)
    y = rng.integers(0, 2 if kind == "bool" else classes, N)
    z = rng.normal(size=(N, *outputs)).astype(np.float32)
    form = {1: "one output", 2: "two outputs"}.get(max((1, *outputs)), "more classes")
    known = values_of(form, z if classes > 2 or outputs == (2,) else z.reshape(N).astype(float), y)
    names = [name for name in known if METRICS[name].labels == "both" or classes == CLASSES or outputs == (2,)]
    names = [name for name in names if METRICS[name].labels != "numbers"]
    task = Task(TaskConfig(loss="own_any:loss", metrics=names), Sample({}, {"label": Field((), kind)}), ops)
    given = [ops.from_numpy(z), {"label": ops.from_numpy(y.astype(kind))}, ops.from_numpy(np.ones(N, np.float32))]
    task.probe(given[0][:2], {"label": given[1]["label"][:2]}, given[2][:2])
    row, ranking = ops.to_numpy(task.scores(*given)), {k: Ranking(n) for k, n in task.ranked.items()}
    task.rank(row[task.length :], ranking)
    found = task.results(row[: task.length], ranking)
    for name in names:
        assert found[name] == pytest.approx(known[name], rel=1e-5), name


def test_labels_with_fractions_are_no_classes(monkeypatch):
    monkeypatch.setitem(sys.modules, "own_any", SimpleNamespace(loss=lambda z, y: z[:, 0]))
    task = Task(
        TaskConfig(loss="own_any:loss", metrics=["f1"]), Sample({}, {"label": Field((), "float32")}), NumpyOps()
    )
    z, y = np.random.default_rng(0).normal(size=(N, CLASSES)), np.full(N, 0.7)
    task.probe(z[:2], {"label": y[:2]}, np.ones(2))
    with pytest.raises(ConfigError, match=f"{N} labels are none of the 7 classes"):
        task.results(task(z, {"label": y}, np.ones(N))[1])


def test_all_of_them_are_compared():
    compared = {name for case in CASES for name in wanted(*case)}
    assert compared == {*METRICS} and {loss for loss, *_ in FORMS.values()} == {*LOSSES}

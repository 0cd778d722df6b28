"""Losses and metrics are sums: any partition into ranks, micro-batches and padding gives the same ones."""

from __future__ import annotations

import math
import re
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from sklearn import metrics

from hvd_train.cli import guide
from hvd_train.config import Config, TaskConfig
from hvd_train.errors import ConfigError
from hvd_train.metrics.auc import AUC, AveragePrecision
from hvd_train.metrics.metric import LabelForm, Metric
from hvd_train.metrics.ranking import Ranking
from hvd_train.metrics.table import LOSSES, METRICS, loss_function
from hvd_train.protocol import Field, Sample
from hvd_train.task.objective import unfit
from hvd_train.task.task import Task
from hvd_train.task.user_functions import UserFunction
from tests.numpy_frontend import NumpyOps

N, PLACES, CLASSES = 23, 5, 7
AVERAGED = [name for name, row in METRICS.items() if "average" in row.options]
RNG = np.random.default_rng(0)


def own_loss(outputs, labels):
    """Values and weights, some of them 0 where the value is no number."""
    weights = (labels > 0).astype(float) * labels
    with np.errstate(invalid="ignore"):
        return np.where(weights > 0, (outputs - labels) ** 2, np.nan), weights


def signed(outputs, labels):
    return (outputs - labels) ** 2, np.sign(labels)


def near(outputs, labels):
    return abs(outputs - labels) < 0.5


class Correlation:
    """Pearson's, of sums in 64 bits: no mean of anything."""

    def __call__(self, outputs, labels):
        z, y = outputs.astype(np.float64), labels.astype(np.float64)
        return np.stack([z * 0 + 1, z, y, z * z, y * y, z * y], 1)

    def result(self, sums):
        n, z, y, zz, yy, zy = sums
        return (n * zy - z * y) / np.sqrt((n * zz - z * z) * (n * yy - y * y))


def furthest(outputs, labels):
    return abs(outputs - labels) > 2


furthest.result = lambda sums: sums[0]


@pytest.fixture(autouse=True)
def own(monkeypatch):
    names = {"loss": own_loss, "same": own_loss, "near": near, "signed": signed}
    names |= {"Correlation": Correlation, "corr": Correlation(), "furthest": furthest}
    monkeypatch.setitem(sys.modules, "own_task", SimpleNamespace(**names))


def labels_of(kind, shape):
    if kind == "classes":
        return RNG.integers(0, CLASSES, shape)
    return RNG.integers(0, 2, shape).astype(float) if kind == "binary" else RNG.normal(size=shape)


def made(loss, metrics, kind, shape, masked=False):
    """(task, outputs, labels) of N samples."""
    labels = labels_of(kind, (N, *shape))
    last = (CLASSES,) if kind == "classes" else ()
    outputs = 2 * RNG.normal(size=(N, *shape, *last))
    field = Field(shape, "int64", classes=CLASSES, masked=masked) if last else Field(shape, "float32")
    if masked:
        labels[RNG.random(labels.shape) < 0.6] = -100
    config = TaskConfig(loss=loss, metrics=metrics)
    task = Task(config, Sample({}, {"label": field}), NumpyOps())
    if task.has_user_functions:
        task.probe(outputs[:2], {"label": labels[:2]}, np.ones(2))
    return task, outputs, labels


AREAS = ("auc", "average_precision")
COUNTED = [kind for kind in AVERAGED if not kind.startswith(AREAS)]
CASES = {
    "classes": ("cross_entropy", ["accuracy", "top5", *COUNTED], "classes", ()),
    "labels": ("bce", ["accuracy", *AVERAGED], "binary", (4,)),
    "places": ("cross_entropy", ["accuracy", "top5", "f1"], "classes", (PLACES,)),
    "masked": (
        "cross_entropy",
        ["accuracy", "top5", "cross_entropy", "perplexity", "f1", "iou", "balanced_accuracy"],
        "classes",
        (PLACES,),
        True,
    ),
    "binary": ("bce", ["accuracy", "bce", *AVERAGED], "binary", ()),
    "regression": ("mse", ["mse", "mae", "rmse", "mape", "huber", "r2"], "numbers", (3,)),
    "absolute": ("mae", ["own_task:near"], "numbers", ()),
    "huber": ("huber", [], "numbers", (2, 3)),
    "sums": ("mse", ["own_task:Correlation", "own_task:corr", "own_task:furthest", "r2", "mae"], "numbers", ()),
    "own": ("own_task:loss", ["own_task:same", "mae"], "numbers", (4,)),
}


def summed(task, outputs, labels, parts, pad):
    """The vector of parts, each padded to the longest with rows of ``pad``."""
    longest, total = max(map(len, parts)), 0.0
    for rows in parts:
        z, y = (np.concatenate([x[rows], np.full((longest - len(rows), *x.shape[1:]), pad, x.dtype)])
                for x in (outputs, labels))  # fmt: skip
        total = total + task(z, {"label": y}, (np.arange(longest) < len(rows)).astype(float))[1]
    return total


@pytest.mark.parametrize("name", CASES)
def test_any_partition_gives_the_same_sums(name):
    task, outputs, labels = made(*CASES[name])
    whole = summed(task, outputs, labels, [np.arange(N)], 0)
    assert whole.shape == (task.length,) and whole[task.samples] == N
    for count in (2, 3, 7):
        parts = np.array_split(RNG.permutation(N), count)
        found = summed(task, outputs, labels, [*parts, parts[0][:0]], 1)
        np.testing.assert_allclose(found, whole, rtol=1e-12, atol=1e-12)
    assert task.results(whole) == pytest.approx(task.results(found), rel=1e-12)
    counts = 0.0
    for rows in parts:
        padded = np.append(rows, rows[:2])
        counts = counts + task.counts({"label": labels[padded]}, 1.0 * (np.arange(len(padded)) < len(rows)))
    assert counts == pytest.approx(whole[[count for _, count in task.entries]], rel=1e-12)


def softmax(z):
    e = np.exp(z - z.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


@pytest.mark.parametrize("masked", [False, True])
def test_classes_count_by_their_weights(masked):
    """The mean by the sum of weights, as torch's CrossEntropyLoss(weight) and scikit-learn's sample_weight have it."""
    weights = RNG.uniform(0, 2, CLASSES)
    y = labels_of("classes", (N, PLACES))
    z = RNG.normal(size=(N, PLACES, CLASSES))
    if masked:
        y[RNG.random(y.shape) < 0.5] = -100
    field = Field((PLACES,), "int64", classes=CLASSES, masked=masked)
    task = Task(TaskConfig(class_weights=weights.tolist()), Sample({}, {"label": field}), NumpyOps())
    sums = summed(task, z, y, np.array_split(np.arange(N), 3), 0)
    there = y >= 0
    of_place = weights[y[there]]
    wanted = metrics.log_loss(y[there], softmax(z[there]), sample_weight=of_place, labels=range(CLASSES))
    results = task.results(sums)
    assert results["loss"] == pytest.approx(wanted, rel=1e-12)
    assert results["accuracy"] == pytest.approx((z[there].argmax(-1) == y[there]).mean(), rel=1e-12), "it is as before"
    counts = task.counts({"label": y}, np.ones(N))
    assert counts == pytest.approx([of_place.sum()], rel=1e-12)
    task.check(sums, counts)


@pytest.mark.parametrize("shape", [(PLACES,), ()])
@pytest.mark.parametrize("weighted", [False, True])
def test_what_has_no_label_counts_in_no_metric_of_ones_own(monkeypatch, shape, weighted):
    """Padding of ``data.lengths`` is such: how much of it there is depends on the batch, and so on the ranks."""

    def right(outputs, labels):
        values = outputs.argmax(-1) == labels
        return (values, np.full(labels.shape, 2.0)) if weighted else values

    monkeypatch.setattr(sys.modules["own_task"], "right", right, raising=False)
    label = Field(shape, "int64", classes=CLASSES, masked=True)
    task = Task(TaskConfig(metrics=["accuracy", "own_task:right"]), Sample({}, {"label": label}), NumpyOps())
    task.probe(np.zeros((2, *shape, CLASSES)), {"label": np.zeros((2, *shape), int)}, np.ones(2))
    labels, outputs = RNG.integers(0, CLASSES, (N, *shape)), RNG.normal(size=(N, *shape, CLASSES))
    labels[RNG.random(labels.shape) < 0.4] = -100
    for parts in ([], [7], [3, 4]):
        sums = sum(
            task(outputs[rows], {"label": labels[rows]}, np.ones(len(rows)))[1]
            for rows in np.split(np.arange(N), parts)
        )
        results = task.results(sums)
        assert results["right"] == pytest.approx(results["accuracy"], rel=1e-12)


def table_of(page, columns):
    """Rows of the guide's tables that have so many columns, less the code's quotes."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line[:1] == "|"]
    return [row for row in rows if len(row) == columns and row[0].startswith("`")]


FORMS = {
    "two outputs": (3, 2, None),
    "one output": (3, None, None),
    "more classes": (4, CLASSES, None),
    "several labels": (5, None, 4),
}


@pytest.mark.parametrize("loss", ["built-in", "own"])
@pytest.mark.parametrize("form", FORMS)
def test_metrics_are_those_of_scikit_learn(monkeypatch, form, loss):
    """As the guide's table has it; with a loss of the user's own the outputs tell which form it is."""
    page = guide.page("own-loss")
    column, classes, several = FORMS[form]
    y = RNG.integers(0, classes or 2, (200, several) if several else 200)
    z = RNG.normal(size=(*y.shape, classes)) + np.eye(classes)[y] if classes else RNG.normal(size=y.shape) + y
    rows, calls = table_of(page, 5), {}
    for row in rows:
        for name in re.findall(r"`(\w+)`", row[0]):
            cell = row[3] if row[column - 1] == "the same" else row[column - 1]
            calls[name] = row[2] if cell == "the same" else cell
    for kind in ("precision", "recall"):
        calls |= {f"{kind}_{how}": calls[f"f1_{how}"].replace("f1", kind) for how in ("macro", "micro", "weighted")}
    assert set(calls) == {*AVERAGED, "accuracy", "top5", "balanced_accuracy"}
    names = [name for name, cell in calls.items() if cell not in ("", "refused")]
    monkeypatch.setitem(sys.modules, "own_task", SimpleNamespace(any=lambda z, y: z.reshape(len(z), -1)[:, 0]))
    usual = "cross_entropy" if classes else "bce"
    field = Field(y.shape[1:], "int64", classes=classes)
    config = TaskConfig(loss="own_task:any" if loss == "own" else usual, metrics=names)
    task = Task(config, Sample({}, {"label": field}), NumpyOps())
    if loss == "own":
        task.probe(z[:2], {"label": y[:2]}, np.ones(2))
    labels = y if classes else y.astype(float)
    rankings = {k: Ranking(count) for k, count in task.ranked.items()}
    rows = [task.scores(z[k], {"label": labels[k]}, np.ones(len(k))) for k in np.split(np.arange(200), 4)]
    for row in rows:
        task.rank(row[task.length :], rankings)
    found = task.results(sum(row[: task.length] for row in rows), rankings)
    known = {"y": y, "z": z[:, 1] - z[:, 0] if classes == 2 else z, "predicted": z.argmax(1) if classes else z > 0}
    for name in names:
        cell = calls[name]
        while cell.startswith("as `"):
            cell = calls[cell.split("`")[1]]
        area = next((area for area in AREAS if name.startswith(area)), "")
        how = name.removeprefix(area).strip("_") or "macro"
        call = cell.strip("`").replace('average="macro"', f'average="{how}"') if area else cell
        wanted = eval(call.strip("`"), vars(metrics), known)
        assert found[name] == pytest.approx(wanted, abs=1e-12), name


@pytest.mark.parametrize("metric", ["roc_auc_score", "average_precision_score"])
def test_areas_of_training_are_those_of_outputs_in_bins(metric):
    """Average precision took the middle of a bin, and of two values of output was 0.6770 where 0.6544 is right."""
    rng, name = np.random.default_rng(0), {"roc_auc_score": "auc"}.get(metric, "average_precision")
    area = getattr(metrics, metric)
    task = Task(TaskConfig(loss="bce", metrics=[name]), fields((), "float32"), NumpyOps())
    for count, spread in ((50, 1.0), (20_000, 0.3)):
        y = (rng.random(count) < 0.3).astype(float)
        z = spread * (rng.normal(size=count) + y)
        bins = np.floor(1000 / (1 + np.exp(-z / 8)))
        assert task.results(task(z, {"label": y}, np.ones(count))[1])[name] == pytest.approx(area(y, bins), rel=1e-12)
        tied = np.sign(z)
        assert task.results(task(tied, {"label": y}, np.ones(count))[1])[name] == pytest.approx(
            area(y, tied), rel=1e-12
        )


@pytest.mark.parametrize("labels", [1, 3])
def test_a_ranking_of_too_many_outputs_drops_their_last_bits(labels):
    """The same ones in every partition. With a thirtieth of the outputs the areas stay right to 0.002."""
    rng = np.random.default_rng(0)
    y = rng.random((30_000, labels)) < 0.2
    z = -7 + 0.1 * (rng.normal(size=y.shape) + 2 * y)
    z[::7] = np.round(z[::7], 1)
    form = LabelForm("labels", labels) if labels > 1 else LabelForm("classes", 2)
    averages = ("macro", "micro", "weighted") if labels > 1 else ("",)
    found = []
    for parts in ([], [10_000, 10_007]):
        ranks = [Ranking(labels, most=1000 * labels) for _ in range(len(parts) + 1)]
        for rank, rows in zip(ranks, np.split(rng.permutation(len(z)), parts), strict=True):
            for batch in np.array_split(rows, 9):
                rank.add(z[batch].ravel(), 1.0 + y[batch].ravel())
        whole = ranks[0].joined([rank.to_bytes() for rank in ranks])
        found.append([kind(form, average=how).exact(whole) for kind in (AUC, AveragePrecision) for how in averages])
    assert found[0] == found[1]
    known = [
        area(y.squeeze(), z.squeeze(), average=how or "macro")
        for area in (metrics.roc_auc_score, metrics.average_precision_score)
        for how in averages
    ]
    np.testing.assert_allclose(found[0], np.ravel(known), atol=2e-3)
    few = Ranking(labels)
    few.add(z.ravel(), 1.0 + y.ravel())
    exact = [kind(form, average=how).exact(few) for kind in (AUC, AveragePrecision) for how in averages]
    np.testing.assert_allclose(exact, np.ravel(known), rtol=1e-12)


def test_a_ranking_has_a_place_for_every_number():
    ranking = Ranking(1)
    scores = np.array([np.nan, -np.inf, -0.0, 0.0, np.inf, -1e-300])
    ranking.add(scores, np.array([1.0, 2, 1, 2, 2, 0]))
    ((no, yes),) = ranking.histograms(False)
    # NaN is the lowest, -0 is 0, and the last one has no label.
    assert no.tolist() == [1, 1, 0] and yes.tolist() == [1, 1, 1]
    assert Ranking(2).histograms(False)[1][0].shape == (0,) and math.isnan(
        AUC(LabelForm("classes", 2), average="").exact(Ranking(1))
    )


@pytest.mark.parametrize(("middle", "spread"), [(0, 0.3), (-7, 1), (7, 1), (-12, 1), (0, 6)])
def test_auc_of_rare_classes_and_of_sure_models(middle, spread):
    """Bins of the sigmoid itself end at 7 and were wrong by 0.02 to 0.25 here."""
    rng = np.random.default_rng(0)
    y = (rng.random(20_000) < 0.1).astype(float)
    z = middle + spread * (rng.normal(size=len(y)) + y)
    task = Task(TaskConfig(loss="bce", metrics=["auc"]), fields((), "float32"), NumpyOps())
    wanted = metrics.roc_auc_score(y, z)
    assert task.results(task(z, {"label": y}, np.ones(len(y)))[1])["auc"] == pytest.approx(wanted, abs=1e-3)


def test_losses_are_those_of_scikit_learn():
    """The guide's second table."""
    calls = table_of(guide.page("own-loss"), 3)
    calls = {name.strip("`"): call.strip("`") for name, _, call in calls}
    assert set(calls) == {*LOSSES, "rmse", "r2", "mape", "perplexity"}
    y, z = RNG.normal(size=(2, N, 3))
    names = ["rmse", "mae", "r2", "mse", "mape"]
    task = Task(TaskConfig(loss="mse", metrics=names), fields((3,), "float32"), NumpyOps())
    found = task.results(task(z, {"label": y}, np.ones(N))[1])
    for name in names:
        assert found[name] == pytest.approx(eval(calls[name], vars(metrics), {"y": y, "z": z}), rel=1e-12)
    y, z = RNG.integers(0, 2, (N, 3)), RNG.normal(size=(N, 3))
    task = Task(TaskConfig(loss="bce"), fields((3,), "float32"), NumpyOps())
    known = {"y": y.ravel(), "z": z.ravel(), "sigmoid": lambda z: 1 / (1 + np.exp(-z)), "softmax": softmax}
    known["exp"] = np.exp
    wanted = eval(calls["bce"], vars(metrics), known)
    assert task.results(task(z, {"label": y.astype(float)}, np.ones(N))[1])["loss"] == pytest.approx(wanted, rel=1e-12)
    y = np.arange(N) % 3
    config = TaskConfig(metrics=["cross_entropy", "perplexity"])
    task = Task(config, Sample({}, {"label": Field((), "int64", classes=3)}), NumpyOps())
    found = task.results(task(z, {"label": y}, np.ones(N))[1])
    for name in ("cross_entropy", "perplexity"):
        assert found[name] == pytest.approx(eval(calls[name], vars(metrics), known | {"y": y, "z": z}), rel=1e-12)
    assert found["loss"] == found["cross_entropy"]


def fields(shape, dtype):
    return Sample({}, {"label": Field(shape, dtype)})


def test_a_class_is_not_a_loss(monkeypatch):
    """It was made of outputs and labels."""
    monkeypatch.setitem(sys.modules, "own_task", SimpleNamespace(Hinge=type("Hinge", (), {})))
    with pytest.raises(ConfigError, match="Hinge is a class, not a function; task.loss: own_task:Hinge"):
        Task(TaskConfig(loss="own_task:Hinge"), fields((), "float32"), NumpyOps())


@pytest.mark.parametrize(
    ("loss", "metric", "kind", "shape", "words"),
    [
        ("bce", "top5", "numbers", (), "does not fit the loss; task.metrics: top5; .* the loss bce is for numbers"),
        ("mse", "cross_entropy", "numbers", (), "does not fit the loss; .* the loss mse is for numbers"),
        ("cross_entropy", "mse", "classes", (), "does not fit the loss; .* the loss cross_entropy is for classes"),
        ("bce", "balanced_accuracy", "binary", (4,), "for one label, not for several; task.metrics: balanced_accuracy"),
        ("cross_entropy", "auc", "classes", (), "it is for two classes, not 7; task.metrics: auc"),
    ],
)
def test_metrics_that_do_not_fit_are_refused(loss, metric, kind, shape, words):
    with pytest.raises(ConfigError, match=words):
        made(loss, [metric], kind, shape)


def test_where_no_label_counts_there_is_no_value():
    """An evaluation of places that have none had a loss of 0, a perplexity of 1, and the best checkpoint of all."""
    task, z, y = made(*CASES["masked"])
    for rows in (np.arange(N), np.arange(0)):
        found = task.results(summed(task, z, np.full_like(y, -100), [rows], 0))
        assert all(math.isnan(value) for name, value in found.items() if name != "samples"), found
        assert found["samples"] == len(rows)
        assert task.finite(summed(task, z, np.full_like(y, -100), [rows], 0)), "no sign of a model gone wrong"
    assert not task.finite(summed(task, z * np.nan, y, [np.arange(N)], 0))


def test_a_loss_of_weights_that_are_all_0_has_no_value():
    task, z, y = made(*CASES["own"])
    found = task.results(summed(task, z, -abs(y), [np.arange(N)], 0))
    assert math.isnan(found["loss"]) and math.isnan(found["same"]) and found["mae"] > 0


@pytest.mark.parametrize(("outputs", "labels"), [((N,), -1), ((N, 1), -1), ((N, 2), -1), ((N, CLASSES), CLASSES)])
def test_labels_that_are_no_class_are_told(monkeypatch, outputs, labels):
    """With one output -1 is no: PyTorch ended with a bare IndexError, and Keras left these samples out silently."""
    monkeypatch.setitem(sys.modules, "own_task", SimpleNamespace(hinge=lambda z, y: y * 0.0))
    y, z = np.where(np.arange(N) % 3, 1, labels), RNG.normal(size=outputs)
    names = ["accuracy", "f1_macro", "balanced_accuracy"]
    task = Task(TaskConfig(loss="own_task:hinge", metrics=names), fields((), "float32"), NumpyOps())
    task.probe(z[:2], {"label": y[:2]}, np.ones(2))
    sums = task(z, {"label": y}, np.ones(N))[1]
    if outputs in ((N,), (N, 1)):
        found, known = task.results(sums), (y > 0, z.reshape(N) > 0)
        assert found["f1_macro"] == pytest.approx(metrics.f1_score(*known, average="macro"), rel=1e-12)
        assert found["balanced_accuracy"] == pytest.approx(metrics.balanced_accuracy_score(*known), rel=1e-12)
        return
    with pytest.raises(
        ConfigError, match=r"\d+ labels are none of the \d classes that the model has outputs for; task.met"
    ):
        task.results(sums)


def test_a_model_of_nothing_is_not_perfect():
    """Of equal outputs the higher class is the larger, as in scikit-learn: top5 was 1. NaN is among no 5 largest."""
    task, z, y = made("cross_entropy", ["top5", "accuracy"], "classes", ())
    with np.errstate(invalid="ignore"):
        for constant, wanted in ((0.5, (y >= CLASSES - 5).mean()), (np.nan, 0.0)):
            assert task.results(task(z * 0 + constant, {"label": y}, np.ones(N))[1])["top5"] == pytest.approx(wanted)


@pytest.mark.parametrize("built_in", [[], ["accuracy"]])
@pytest.mark.parametrize("shape", [(), (1,), (PLACES,)])
def test_own_metrics_beside_an_own_loss_leave_out_what_has_no_label(monkeypatch, shape, built_in):
    """As the guide says: the accuracy of one's own counted the labels of -100, and the built-in one did not."""
    places = shape if shape != (1,) else ()
    own = SimpleNamespace(
        loss=lambda z, y: (z[..., 0] * 0, (y.reshape(len(z), *places) != -100) * 1.0),
        hit=lambda z, y: z.argmax(-1) == y.reshape(len(z), *places),
    )
    monkeypatch.setitem(sys.modules, "own_task", own)
    config = TaskConfig(loss="own_task:loss", metrics=["own_task:hit", *built_in])
    task = Task(config, fields(shape, "int64"), NumpyOps())
    y, z = RNG.integers(CLASSES, size=(N, *shape)), RNG.normal(size=(N, *places, CLASSES))
    task.probe(z[:2], {"label": y[:2] * 0}, np.ones(2))
    y[RNG.random(y.shape) < 0.5] = -100
    right = (z.argmax(-1) == y.reshape(N, *places))[y.reshape(N, *places) != -100].mean()
    for cuts in ([], [3, 4]):
        parts = np.split(np.arange(N), cuts)
        found = task.results(sum(task(z[k], {"label": y[k]}, np.ones(len(k)))[1] for k in parts))
        assert found["hit"] == pytest.approx(right, rel=1e-12)
        assert found.get("accuracy", right) == pytest.approx(right, rel=1e-12)


def test_numbers_with_several_outputs_each_are_no_classes(monkeypatch):
    """As quantiles of a temperature, of which -100 is one."""
    own = SimpleNamespace(loss=lambda z, y: z[:, 0] - y, above=lambda z, y: z[:, 2] > y)
    monkeypatch.setitem(sys.modules, "own_task", own)
    task = Task(TaskConfig(loss="own_task:loss", metrics=["own_task:above"]), fields((), "float32"), NumpyOps())
    y, z = np.full(N, -100.0), RNG.normal(size=(N, 3))
    task.probe(z[:2], {"label": y[:2]}, np.ones(2))
    assert task.results(task(z, {"label": y}, np.ones(N))[1])["above"] == 1.0


@pytest.mark.parametrize(("kind", "more"), [(np.int64, ["top5", "cross_entropy"]), (np.float32, [])])
def test_built_in_metrics_beside_a_loss_of_the_users_leave_out_what_has_no_label(monkeypatch, kind, more):
    """Half of the places had the label -100, and the accuracy of a model without a mistake was 0.5."""
    monkeypatch.setitem(sys.modules, "own_task", SimpleNamespace(none=lambda z, y: z[:, 0, 0] * 0))
    config = TaskConfig(loss="own_task:none", metrics=["accuracy", "f1_macro", *more])
    task = Task(config, fields((PLACES,), "int64"), NumpyOps())
    y = RNG.integers(CLASSES, size=(N, PLACES)).astype(kind)
    z = RNG.normal(size=(N, PLACES, CLASSES)) + 9 * (np.arange(CLASSES) == y[..., None])
    task.probe(z[:2], {"label": y[:2] * 0}, np.ones(2))
    there = RNG.random((N, PLACES)) < 0.5
    z[~there] = -z[~there]
    for ignored, wanted in ((False, 0.5), (True, 1.0)):
        labels = np.where(there, y, -100) if ignored else y
        parts = np.array_split(np.arange(N), 3)
        found = task.results(sum(task(z[k], {"label": labels[k]}, np.ones(len(k)))[1] for k in parts))
        assert found["accuracy"] == pytest.approx(wanted, abs=0 if ignored else 0.15)
    assert found["f1_macro"] == 1
    if more:
        places = -np.log(np.take_along_axis(softmax(z), y[..., None], -1))[..., 0]
        assert found["top5"] == 1 and found["cross_entropy"] == pytest.approx(places[there].mean())


@pytest.mark.parametrize("label", [0.1, 1 / 3, 123.456, 0.0, -2e5])
def test_r2_of_equal_labels_is_not_a_number(label):
    """Of 1,003 labels 0.1 in batches it was -7e16: what rounding had left of the sums was their spread."""
    for count in (1, 7, 1003, 20_000):
        y = np.full(count, label, np.float32).astype(np.float64)
        assert math.isnan(r2_of(y, y + 0.5, -(-count // 13))), count
        other = y + 1e-4 * max(abs(label), 1) * (np.arange(count) % 2)
        assert math.isnan(r2_of(other, other)) if count == 1 else r2_of(other, other) == 1


def r2_of(y, z, parts=1):
    """In so many batches."""
    task, _, _ = made("mse", ["r2"], "numbers", ())
    batches = zip(np.array_split(y, parts), np.array_split(z, parts), strict=True)
    return task.results(sum(task(b, {"label": a}, np.ones(len(a)))[1] for a, b in batches))["r2"]


@pytest.mark.parametrize("mean", [0, 1e6, 1e8])
def test_r2_keeps_its_digits_whatever_the_mean_of_the_labels(mean):
    """Labels around 1e7 with a deviation of 3 gave 0.88008 on one rank and 0.87971 on two, for 0.87975."""
    y = mean + 3 * RNG.normal(size=5000)
    z = y + RNG.normal(size=5000)
    assert r2_of(y, z, 137) == pytest.approx(metrics.r2_score(y - mean, z - mean), rel=1e-9)
    assert math.isnan(r2_of(y, z * np.nan))


def test_r2_of_labels_far_from_zero_in_32_bits():
    """Years, prices: their squares take all the digits that there are."""
    task, z, y = made("mse", ["r2"], "numbers", ())
    z, y = (2000 + z / 4 + y).astype(np.float32), (2000 + y).astype(np.float32)
    parts = np.array_split(RNG.permutation(N), 2)
    sums = sum(task(z[rows], {"label": y[rows]}, np.ones(len(rows), np.float32))[1] for rows in parts)
    assert task.results(sums)["r2"] == pytest.approx(metrics.r2_score(y.astype(float), z.astype(float)), rel=1e-6)


def test_a_metric_of_ones_own_has_sums_and_a_result():
    task, z, y = made(*CASES["sums"])
    found = task.results(summed(task, z, y, np.array_split(np.arange(N), 3), 1))
    assert found["Correlation"] == pytest.approx(np.corrcoef(z, y)[0, 1], rel=1e-12) == found["corr"]
    assert found["furthest"] == (abs(z - y) > 2).sum() > 0 and found["mae"] == pytest.approx(abs(z - y).mean())
    assert task.results(np.zeros(task.length))["Correlation"] != 0  # nan, and no warning


def test_sums_far_from_zero_are_added_in_64_bits():
    task = made(*CASES["sums"])[0]
    y = (1e4 + RNG.normal(size=N)).astype(np.float32)
    z = (y + 0.5 * RNG.normal(size=N)).astype(np.float32)
    found = task.results(task(z, {"label": y}, np.ones(N, np.float32))[1])
    assert found["Correlation"] == pytest.approx(np.corrcoef(z.astype(float), y.astype(float))[0, 1], rel=1e-6)


@pytest.mark.parametrize(
    ("values", "result", "words"),
    [
        (lambda z, y: (z, y), lambda sums: 0.0, r"gives \(values, weights\).*gives \(samples, k\): the numbers of"),
        (lambda z, y: np.ones((len(z), 2, 2)), lambda sums: 0.0, r"gives \(2, 2, 2\)"),
        (lambda z, y: z.sum(), lambda sums: 0.0, "one number for a batch"),
        (lambda z, y: z, lambda sums: [*sums], "its result failed: TypeError.*called with the 1 sums"),
        (lambda z, y: z, lambda sums: {}[0], "its result failed: KeyError: 0.*task.metrics: own_task:mine"),
    ],
)
def test_what_is_no_metric_with_a_result(monkeypatch, values, result, words):
    def mine(outputs, labels):
        return values(outputs, labels)

    mine.result = result
    monkeypatch.setitem(sys.modules, "own_task", SimpleNamespace(mine=mine))
    with pytest.raises(ConfigError, match=words):
        made("mse", ["own_task:mine"], "numbers", ())


def test_outputs_that_are_no_numbers_have_a_place_in_the_histogram():
    task, z, y = made(*CASES["binary"])
    z[3] = np.nan
    with np.errstate(invalid="ignore"):
        found = task.results(summed(task, z, y, [np.arange(N)], 0))
    assert math.isnan(found["loss"]) and 0 < found["auc"] < 1


def test_f1_of_a_model_with_more_logits_than_classes():
    """As vocabularies that are rounded up: a class that is none is no hit."""
    task, z, y = made("cross_entropy", ["f1"], "classes", ())
    wide = np.concatenate([z, 2 + RNG.normal(size=(N, 3))], axis=1)
    found, told = task.results(task(wide, {"label": y}, np.ones(N))[1])["f1"], wide.argmax(1)
    assert (told >= CLASSES).any()
    assert found == pytest.approx(metrics.f1_score(y, told, labels=range(CLASSES), average="macro"), rel=1e-12)


def test_several_outputs_are_added_each_by_its_own_count():
    """A masked loss per place and one per sample."""
    fields = {"words": Field((PLACES,), "int64", classes=CLASSES, masked=True), "next": Field((), "int64", classes=2)}
    config = TaskConfig(loss={"words": "cross_entropy", "next": "cross_entropy"}, metrics={"next": ["accuracy"]})
    task = Task(config, Sample({}, fields), NumpyOps())
    z = {"words": RNG.normal(size=(N, PLACES, CLASSES)), "next": RNG.normal(size=(N, 2))}
    y = {"words": RNG.integers(0, CLASSES, (N, PLACES)), "next": RNG.integers(0, 2, N)}
    y["words"][RNG.random((N, PLACES)) < 0.7] = -100
    assert task.weighted_by_data and task.counts(y, np.ones(N)).tolist() == [N, (y["words"] >= 0).sum()]
    loss, sums = task(z, y, np.ones(N), 1 / task.counts(y, np.ones(N)))
    found = task.results(sums)
    assert list(found) == [*config.names, "samples"] == ["loss", "next_loss", "words_loss", "next_accuracy", "samples"]
    assert found["loss"] == pytest.approx(found["words_loss"] + found["next_loss"]) == pytest.approx(float(loss))


def test_the_order_of_outputs_in_a_file_means_nothing():
    """A manifest sorts keys: sums of the epoch so far would be taken for one another's after a resume."""
    both = [TaskConfig(loss=dict.fromkeys(names, "mse")) for names in ("ab", "ba")]
    assert list(both[0].terms) == list(both[1].terms) and both[0].names == both[1].names


def test_the_default_costs_no_count():
    task = Task(TaskConfig(), Sample({}, {"label": Field((), "int64", classes=3)}), NumpyOps())
    assert not task.weighted_by_data and task.length == 3 and task.entries == [(0, 2)]


def test_the_names_of_the_configuration_are_those_that_there_are():
    assert all(callable(loss_function(name)) for name in LOSSES)
    assert all(issubclass(row.metric_class, Metric) for row in METRICS.values())


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (
            lambda z, y: ((z - y) ** 2).mean(),
            r"one number for a batch.*reduction='none'.*\(unweighted values, w\[labels\]\): their mean",
        ),
        (lambda z, y: float(z.sum()), "gives float, not a tensor"),
        (lambda z, y: (z - y)[:1], r"gives \(1,\) for 2 samples"),
        (lambda z, y: (z - y, np.ones((2, 3))), r"values \(2,\) and weights \(2, 3\)"),
        (lambda z, y: z.nothing, r"the function failed: AttributeError.*outputs \(\d+,.*\) and labels \(\d+,.*\)"),
    ],
)
def test_what_is_no_loss_is_one_line(monkeypatch, loss, words):
    monkeypatch.setitem(sys.modules, "own_task", SimpleNamespace(loss=loss))
    with pytest.raises(ConfigError, match=f"{words}.*") as caught:
        made("own_task:loss", [], "numbers", ())
    assert "task.loss: own_task:loss" in str(caught.value) and "\n" not in str(caught.value)


def test_weights_must_follow_from_labels_alone(monkeypatch):
    """The gradients are divided by what labels tell before any model is asked."""
    names = {"loss": lambda z, y: (z - y, abs(z)), "label": lambda z, y: (z - y, abs(y)), "near": near}
    names["changing"] = lambda z, y: (z - y, abs(y)) if len(y) == 2 else z - y
    monkeypatch.setitem(sys.modules, "own_task", SimpleNamespace(**names))
    for loss in ("loss", "label"):
        task, z, y = made(f"own_task:{loss}", [], "numbers", (3,))
        sums, counts = summed(task, z, y, [np.arange(N)], 0), task.counts({"label": y}, np.ones(N))
        if loss == "label":
            task.check(sums, counts)
            continue
        with pytest.raises(
            ConfigError, match=r"weights add up to \d+.*, but for outputs of zeros to 0; .*own_task:loss"
        ):
            task.check(sums, counts)
    task, z, y = made("own_task:changing", [], "numbers", (3,))
    with pytest.raises(ConfigError, match="gives weights for some batches and none for others"):
        task(z, {"label": y}, np.ones(N))


def test_samples_that_are_compared_with_each_other_are_refused():
    """Outputs (n, 1) less labels (n,): each value would be a mean over the batch, and depend on the world."""
    for loss, names in (("own_task:near", []), ("mse", ["own_task:near"])):
        task, z, y = made(loss, names, "numbers", ())
        task.probe(z[:2], {"label": y[:2]}, np.ones(2))
        with pytest.raises(ConfigError, match=r"gives \(2, 2\) for 2 samples .* labels \(2, 1\) and \(2,\); .*near"):
            task.probe(z[:2, None], {"label": y[:2]}, np.ones(2))


def test_a_negative_weight_counts_on_both_sides():
    task, z, y = made("own_task:signed", [], "numbers", ())
    found, (total, count, _) = (z - y) ** 2, summed(task, z, y, [np.arange(N)], 0)
    assert total == pytest.approx((found * np.sign(y)).sum()) and count == pytest.approx(np.sign(y).sum())


def test_outputs_that_do_not_fit_are_one_line():
    task, z, y = made("mse", [], "numbers", (3,))
    with pytest.raises(ConfigError, match=r"outputs of shape \(23, 2\) for labels of shape \(23, 3\)"):
        task(z[:, :2], {"label": y}, np.ones(N))
    column, z, y = made("mse", [], "numbers", ())
    assert column(z[:, None], {"label": y}, np.ones(N))[1].tolist() == column(z, {"label": y}, np.ones(N))[1].tolist()
    fields = {"a": Field((), "float32"), "b": Field((), "float32")}
    with pytest.raises(ConfigError, match="one loss for the labels a, b; .*{a: mse, b: mse}"):
        Task(TaskConfig(loss="mse"), Sample({}, fields), NumpyOps())
    with pytest.raises(ConfigError, match="no labels 'c'; .*; the data have a, b"):
        Task(TaskConfig(loss={"c": "mse"}), Sample({}, fields), NumpyOps())
    with pytest.raises(ConfigError, match="the model gives p, q; .*{p: mse, q: mse}"):
        column({"p": z, "q": z}, {"label": y}, np.ones(N))
    two = Task(TaskConfig(loss={"a": "mse", "b": "mse"}), Sample({}, fields), NumpyOps())
    with pytest.raises(ConfigError, match="the model gives one output, and task.loss names 'a'"):
        two(z, {"a": y, "b": y}, np.ones(N))


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"task": {"loss": "cross_entrop"}}, "task.loss.*did you mean 'cross_entropy'"),
        ({"task": {"metrics": ["acuracy"]}}, "did you mean 'accuracy'"),
        ({"task": {"loss": {"a": "mse"}, "metrics": ["mae"]}}, "give them by the outputs of loss"),
        ({"task": {"loss": "mse", "metrics": ["a:loss"]}}, "'loss' names two things in the log"),
        ({"task": {"loss": "mse", "metrics": ["a:far", "b:far"]}}, "'far' names two things"),
        ({"task": {"metrics": ["a:step"]}}, "'step' names two things"),
        ({"checkpoint": {"monitor": "val_acuracy"}}, "did you mean 'val_accuracy'"),
        ({"task": {"loss": "mse"}, "early_stopping": {"monitor": "val_accuracy"}}, "early_stopping.monitor.*val_loss"),
    ],
    ids=str,
)
def test_unknown_names_are_told(keys, words):
    with pytest.raises(ValueError, match=words.replace("task.loss.*", "")):
        Config.model_validate(keys)


def test_any_name_can_be_the_monitor():
    Config.model_validate(
        {"task": {"loss": "mse", "metrics": ["r2"]}, "checkpoint": {"monitor": "val_r2", "mode": "max"}}
    )
    Config.model_validate({"early_stopping": {"monitor": "train_accuracy", "mode": "max"}})


@pytest.mark.parametrize(
    ("task", "monitor", "mode"),
    [
        ({}, "val_loss", "min"),
        ({}, "val_accuracy", "max"),
        ({"loss": "mse", "metrics": ["r2"]}, "train_r2", "max"),
        ({"loss": "mse", "metrics": ["rmse"]}, "val_rmse", "min"),
        ({"loss": "own_task:loss"}, "val_loss", "min"),
        ({"loss": {"a": "mse", "b": "bce"}}, "val_b_loss", "min"),
        ({"loss": {"a": "mse", "b": "bce"}}, "val_b_accuracy", "max"),
    ],
    ids=str,
)
def test_a_metric_knows_which_value_is_better(task, monitor, mode):
    rule = {"monitor": monitor}
    config = Config.model_validate({"task": task, "checkpoint": rule, "early_stopping": rule})
    assert config.mode_of(config.checkpoint) == config.mode_of(config.early_stopping) == mode
    assert config.resolved().checkpoint.mode == config.resolved().early_stopping.mode == mode
    assert (config.checkpoint.mode, config.notes) == ("auto", []), "another monitor may be set later"


@pytest.mark.parametrize("section", ["checkpoint", "early_stopping"])
def test_a_metric_of_the_users_must_say_which_value_is_better(section):
    keys = {"task": {"metrics": ["own_task:near"]}, section: {"monitor": "val_near"}}
    with pytest.raises(
        ValueError, match=f"{section}.mode: auto knows built-in metrics only; set min or max for val_near"
    ):
        Config.model_validate(keys)
    config = Config.model_validate(keys | {section: {"monitor": "val_near", "mode": "max"}})
    assert config.mode_of(getattr(config, section)) == "max" and not config.notes


def test_a_mode_that_contradicts_the_metric_is_taken_and_told():
    config = Config.model_validate({"checkpoint": {"monitor": "val_accuracy", "mode": "min"}})
    (note,) = config.notes
    assert config.mode_of(config.checkpoint) == "min"
    assert note.startswith(
        "checkpoint.mode: min takes the smallest val_accuracy as best, although a larger one is better"
    )


def seen(outputs, labels):
    """1 where it gets what the model gave and the data hold, (n, 1) and (n,)."""
    return np.full(len(labels), float(outputs.shape == (len(labels), 1) and labels.shape == (len(labels),)))


@pytest.mark.parametrize("loss", ["mse", "own_task:column"])
def test_built_in_and_own_metrics_stand_beside_any_loss(monkeypatch, loss):
    """Built-in ones bring outputs (n, 1) to labels (n,), own ones get what there is."""
    names = {"column": lambda z, y: (z[:, 0] - y) ** 2, "seen": seen}
    monkeypatch.setitem(sys.modules, "own_task", SimpleNamespace(**names))
    task = Task(
        TaskConfig(loss=loss, metrics=["mae", "own_task:seen"]), Sample({}, {"label": Field((), "float32")}), NumpyOps()
    )
    z, y = RNG.normal(size=(N, 1)), RNG.normal(size=N)
    task.probe(z[:2], {"label": y[:2]}, np.ones(2))
    found = task.results(task(z, {"label": y}, np.ones(N))[1])
    assert found["seen"] == 1 and found["mae"] == pytest.approx(abs(z[:, 0] - y).mean())
    assert found["loss"] == pytest.approx(((z[:, 0] - y) ** 2).mean())


@pytest.mark.parametrize("shape", [(N,), (N, 1)], ids=str)
@pytest.mark.parametrize("outputs", [(N,), (N, 1), (N, 3)], ids=str)
def test_built_in_metrics_take_labels_of_one_column(monkeypatch, shape, outputs):
    """A function of the user's gets (n, 1) as stored; beside it built-in metrics mean what they mean of (n,)."""
    monkeypatch.setitem(sys.modules, "own_task", SimpleNamespace(stored=lambda z, y: np.full(N, y.shape == shape)))
    y = np.arange(N) % 2
    z = RNG.normal(size=outputs)
    names = ["accuracy", "f1"] if outputs == (N, 3) else ["mae", "accuracy", "f1"]
    found = []
    for given in (y, y.reshape(shape)):
        field = Field(given.shape[1:], "int64")
        task = Task(TaskConfig(loss="own_task:stored", metrics=names), Sample({}, {"label": field}), NumpyOps())
        task.probe(z, {"label": given}, np.ones(N))
        found.append(task.results(task(z, {"label": given}, np.ones(N))[1]))
    assert found[1]["loss"] == 1 and all(found[0][name] == found[1][name] for name in names)
    assert not math.isnan(found[0]["f1"])


@pytest.mark.parametrize(
    ("metric", "outputs", "what"),
    [
        ("mae", np.zeros((N, 3)), r"outputs of shape \(23, 3\) for labels of shape \(23,\); task.metrics: mae"),
        ("top5", np.zeros((N, 1)), r"logits of shape \(23, 1\) for labels of shape \(23,\)"),
        ("auc", np.zeros((N, 3)), "it is for two classes, not 3; task.metrics: auc"),
        ("mae", {"a": np.zeros(N), "b": np.zeros(N)}, "the loss takes several outputs or labels together"),
    ],
)
def test_what_a_built_in_metric_cannot_look_at(monkeypatch, metric, outputs, what):
    monkeypatch.setitem(sys.modules, "own_task", SimpleNamespace(any=lambda z, y: y * 1.0))
    fields = Sample({}, {"label": Field((), "float32")})
    task = Task(TaskConfig(loss="own_task:any", metrics=[metric]), fields, NumpyOps())
    with pytest.raises(ConfigError, match=what):
        task(outputs, {"label": np.zeros(N)}, np.ones(N))


@pytest.mark.parametrize("metric", ["accuracy", "iou"])
@pytest.mark.parametrize("places", [(4, 4), (4,)], ids=str)
@pytest.mark.parametrize("classes", [1, 3])
def test_classes_that_are_not_the_last_axis_are_refused(monkeypatch, metric, places, classes):
    """Masks (n, h, w) and outputs (n, 1, h, w), as torch has them: accuracy was 0.10 where 0.46 is right."""
    monkeypatch.setitem(sys.modules, "own_task", SimpleNamespace(any=lambda z, y: y * 1.0))
    fields = Sample({}, {"label": Field(places, "bool")})
    task = Task(TaskConfig(loss="own_task:any", metrics=[metric]), fields, NumpyOps())
    labels = {"label": np.ones((2, *places), bool)}
    with pytest.raises(ConfigError, match=rf"outputs of shape \(2, {classes}, 4.*task.metrics: {metric}.*last axis"):
        task.probe(np.zeros((2, classes, *places)), labels, np.ones(2))


@pytest.mark.parametrize(
    ("loss", "told"),
    [
        (lambda z, y: (z - z.mean(0)) ** 2 + y, True),
        (lambda z, y: (z - y) ** 2, False),
        (lambda z, y: (z - y) ** 2 * np.random.random(len(z)), False),  # draws differ at each call
        (lambda z, y: ((z - y)[:, None] ** 2).squeeze(), False),  # of one sample it is a number
        (lambda z, y: (z - y) ** 2 * (1 + 0.003 * (len(z) > 1)), False),  # rounded as by a network in 16 bits
    ],
)
def test_a_function_that_compares_samples_is_told(monkeypatch, loss, told):
    """Each rank has its own part of a batch, so that another number of ranks would give other numbers silently."""
    monkeypatch.setitem(sys.modules, "own_task", SimpleNamespace(loss=loss, metric=loss))
    task, *_ = made("own_task:loss", ["own_task:metric"], "numbers", ())
    lines = ["task.loss: own_task:loss: the value of a sample", "task.metrics: own_task:metric: the value of a sample"]
    assert [line[: len(start)] for line, start in zip(task.remarks, lines, strict=told)] == lines * told


@pytest.mark.parametrize(
    ("weight", "dtype", "told"), [([1, 5], np.int64, True), (None, np.int64, False), ([1, 5], float, False)]
)
def test_a_loss_of_pytorch_with_weights_of_classes_is_told(monkeypatch, weight, dtype, told):
    """CrossEntropyLoss(weight=w, reduction="none") had 2.899 here, and 0.805 with PyTorch's own mean, without a word.

    With shares as labels PyTorch divides by the number of samples, too.
    """
    loss = type("CrossEntropyLoss", (), {"__call__": lambda self, z, y: z**2 + y, "ignore_index": -100})()
    loss.weight = weight
    monkeypatch.setitem(sys.modules, "own_task", SimpleNamespace(loss=loss))
    task = Task(TaskConfig(loss="own_task:loss"), Sample({}, {"label": Field((), np.dtype(dtype).name)}), NumpyOps())
    task.probe(np.zeros(2), {"label": np.zeros(2, dtype)}, np.ones(2))
    assert [line.partition(", and")[0] for line in task.remarks] == [
        "task.loss: own_task:loss: its values have the weights of their classes"
    ] * told


@pytest.mark.parametrize(
    ("labels", "told"),
    [((2, 1, 5), "its values (5, 5) compare outputs (5, 1) with labels (1, 5), each with several of the others"),
     ((2, 5, 1), ""), ((2, 1, 1), "")],
)  # fmt: skip
def test_values_that_compare_each_number_with_several_are_told(labels, told):
    loss = UserFunction("task.loss", "mine:loss", lambda z, y: (z - y) ** 2)
    loss.probe(np.ones((2, 5, 1)), np.ones(labels), np.ones(2), NumpyOps())
    assert loss.remark == told


def test_logits_with_the_classes_first_are_told_how_to_turn():
    assert "outputs.movedim(1, -1)" in unfit((2, 3, 4, 5), (2, 4, 5), 3).fix
    assert "movedim" not in unfit((2, 3), (2, 4), 3).fix

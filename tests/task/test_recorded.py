"""The results of every built-in loss and metric are those recorded with the formulas of ad1fa3a, in 64 bits."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from hvd_train.config import TaskConfig
from hvd_train.metrics.table import METRICS
from hvd_train.protocol import Field, Sample
from hvd_train.task.task import Task
from tests.numpy_frontend import NumpyOps

RECORDED = json.loads(Path(__file__).with_name("recorded.json").read_text())
N, PLACES = 37, 5
# Those that there were when the results were recorded.
KINDS = ("f1", "precision", "recall", "auc")
AVERAGED = [name for name in METRICS if name.startswith(KINDS)]
COUNTED = [name for name in AVERAGED if not name.startswith("auc")]
# (loss, metrics, kind of labels, shape of a sample's labels, number of classes, whether some places have no label)
CASES = {
    "classes": ("cross_entropy", ["accuracy", "top5", "cross_entropy", *COUNTED], "classes", (), 7, False),
    "two": ("cross_entropy", ["accuracy", "cross_entropy", *AVERAGED], "classes", (), 2, False),
    "places": ("cross_entropy", ["accuracy", "top5", "f1", "recall_weighted"], "classes", (PLACES,), 7, False),
    "masked": (
        "cross_entropy",
        ["accuracy", "top5", "cross_entropy", "f1", "precision_micro"],
        "classes",
        (PLACES,),
        7,
        True,
    ),
    "labels": ("bce", ["accuracy", "bce", "mse", *AVERAGED], "binary", (4,), 0, False),
    "binary": ("bce", ["accuracy", "bce", "huber", "mae", *AVERAGED], "binary", (), 0, False),
    "masks": ("bce", ["accuracy", *AVERAGED], "binary", (3, 4), 0, False),
    "regression": ("mse", ["mse", "mae", "rmse", "huber", "r2"], "numbers", (3,), 0, False),
    "huber": ("huber", ["r2", "mse"], "numbers", (2, 3), 0, False),
}


def drawn(rng, kind, shape, classes):
    if kind == "classes":
        return rng.integers(0, classes, shape)
    return rng.integers(0, 2, shape).astype(float) if kind == "binary" else rng.normal(size=shape)


@pytest.mark.parametrize("name", CASES)
def test_results_are_those_that_were_recorded(name):
    loss, metrics, kind, shape, classes, masked = CASES[name]
    rng = np.random.default_rng(len(name))
    y = drawn(rng, kind, (N, *shape), classes)
    z = 2 * rng.normal(size=(N, *shape, *((classes,) if classes else ())))
    if masked:
        y[rng.random(y.shape) < 0.6] = -100
    weights = (rng.random(N) < 0.8).astype(float)
    field = Field(shape, "int64", classes=classes, masked=masked) if classes else Field(shape, "float32")
    task = Task(TaskConfig(loss=loss, metrics=metrics), Sample({}, {"label": field}), NumpyOps())
    results = task.results(task(z, {"label": y}, weights)[1])
    recorded = {key: float.fromhex(value) for key, value in RECORDED[name].items()}
    assert list(results) == list(recorded)  # their order is that of the vector in checkpoints
    assert results == pytest.approx(recorded, rel=1e-13)

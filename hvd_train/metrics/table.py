"""The names of the built-in losses and metrics.

The configuration reads this table, so it imports neither NumPy nor a metric: the help and the checks of a configuration
stay fast.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from hvd_train.metrics.metric import Metric

# Each is the function of its name in losses.py.
LOSSES = ("cross_entropy", "mse", "mae", "huber", "bce")


@dataclass(frozen=True)
class Row:
    """A built-in metric.

    ``better``: whether a smaller or a larger value is better. ``labels``: what the labels may be: numbers, classes (the
    model has an output for each), or both. ``made_by``: the file in this folder, and the class in it, which is called
    with ``options``.
    """

    better: Literal["min", "max"]
    labels: Literal["numbers", "classes", "both"]
    made_by: str
    options: Mapping[str, str] = field(default_factory=dict)

    @property
    def metric_class(self) -> type[Metric]:
        file, name = self.made_by.split(":")
        return getattr(importlib.import_module(f"hvd_train.metrics.{file}"), name)


# "": the class or label 1 alone where there are two classes, else the mean ("macro").
AVERAGES = {"": "", "_macro": "macro", "_micro": "micro", "_weighted": "weighted"}

METRICS: dict[str, Row] = {
    "cross_entropy": Row("min", "classes", "means:CrossEntropy"),
    "mse": Row("min", "numbers", "means:SquaredError"),
    "mae": Row("min", "numbers", "means:AbsoluteError"),
    "huber": Row("min", "numbers", "means:Huber"),
    "bce": Row("min", "numbers", "means:BinaryCrossEntropy"),
    "mape": Row("min", "numbers", "means:PercentageError"),
    "perplexity": Row("min", "classes", "means:Perplexity"),
    "rmse": Row("min", "numbers", "means:RootOfSquaredError"),
    "accuracy": Row("max", "both", "means:Accuracy"),
    "top5": Row("max", "classes", "means:Top5"),
    "balanced_accuracy": Row("max", "both", "counts:BalancedAccuracy"),
    "dice": Row("max", "both", "counts:Counts", {"rate": "f1", "average": ""}),
    "r2": Row("max", "numbers", "r2:R2"),
    **{
        f"{rate}{ending}": Row("max", "both", "counts:Counts", {"rate": rate, "average": average})
        for rate in ("f1", "precision", "recall", "iou")
        for ending, average in AVERAGES.items()
    },
    **{
        f"{area}{ending}": Row("max", "both", f"auc:{name}", {"average": average})
        for area, name in (("auc", "AUC"), ("average_precision", "AveragePrecision"))
        for ending, average in AVERAGES.items()
    },
}


@cache
def loss_function(name: str) -> Callable[..., Any]:
    """Return the function (outputs, labels, ops) of a built-in loss, which gives a value for each place."""
    return getattr(importlib.import_module("hvd_train.metrics.losses"), name)

"""The table of built-in losses and metrics.

The configuration reads this table, so it imports neither NumPy nor a metric, to keep help and checks fast.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from hvd_train.metrics.metric import Metric

# Each is a function in losses.py.
LOSSES = ("cross_entropy", "mse", "mae", "huber", "bce")


@dataclass(frozen=True)
class MetricSpec:
    """A built-in metric.

    ``better``: whether a smaller or a larger value is better. ``labels``: allowed labels: numbers, classes (the model
    has an output for each), or both. ``made_by``: file:class in this folder; the class is called with ``options``.
    """

    better: Literal["min", "max"]
    labels: Literal["numbers", "classes", "both"]
    made_by: str
    options: Mapping[str, str] = field(default_factory=dict)

    @property
    def metric_class(self) -> type[Metric]:
        file, name = self.made_by.split(":")
        return getattr(importlib.import_module(f"hvd_train.metrics.{file}"), name)


# "": class 1 alone if there are two classes, else macro.
AVERAGES = {"": "", "_macro": "macro", "_micro": "micro", "_weighted": "weighted"}

METRICS: dict[str, MetricSpec] = {
    "cross_entropy": MetricSpec("min", "classes", "means:MeanLoss", {"loss": "cross_entropy"}),
    **{name: MetricSpec("min", "numbers", "means:MeanLoss", {"loss": name}) for name in ("mse", "mae", "huber", "bce")},
    "mape": MetricSpec("min", "numbers", "means:PercentageError"),
    "perplexity": MetricSpec("min", "classes", "means:Perplexity", {"loss": "cross_entropy"}),
    "rmse": MetricSpec("min", "numbers", "means:RootOfSquaredError", {"loss": "mse"}),
    "accuracy": MetricSpec("max", "both", "means:Accuracy"),
    "top5": MetricSpec("max", "classes", "means:Top5"),
    "balanced_accuracy": MetricSpec("max", "both", "counts:BalancedAccuracy"),
    "dice": MetricSpec("max", "both", "counts:Counts", {"rate": "f1", "average": ""}),
    "r2": MetricSpec("max", "numbers", "r2:R2"),
    **{
        f"{rate}{ending}": MetricSpec("max", "both", "counts:Counts", {"rate": rate, "average": average})
        for rate in ("f1", "precision", "recall", "iou")
        for ending, average in AVERAGES.items()
    },
    **{
        f"{area}{ending}": MetricSpec("max", "both", f"auc:{name}", {"average": average})
        for area, name in (("auc", "AUC"), ("average_precision", "AveragePrecision"))
        for ending, average in AVERAGES.items()
    },
}


@cache
def loss_function(name: str) -> Callable[..., Any]:
    """Return the function (outputs, labels, ops) -> value per position of a built-in loss."""
    return getattr(importlib.import_module("hvd_train.metrics.losses"), name)

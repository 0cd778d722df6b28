"""Metric objects of TorchMetrics, as sums over samples."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from hvd_train.errors import ConfigError
from hvd_train.task.user_functions import for_each, no_comparison

# Classes of TorchMetrics, by what their names begin with -> what they make of outputs that they take for logits.
PROBABILITIES = {
    "Binary": torch.sigmoid,
    "Multilabel": torch.sigmoid,
    **dict.fromkeys(("MulticlassPrecisionRecallCurve", "MulticlassHingeLoss"), partial(torch.softmax, dim=1)),
}


class TorchMetric:
    """A ``torchmetrics.Metric`` whose state is made of sums.

    ``sums`` are its states one after the other, of one batch. ``result`` puts the sums of all batches and ranks in
    their place and calls the object's ``compute``. Raises ConfigError, with the reason, where a state is not a sum, for
    example the list of all outputs that an exact AUROC sorts. ``logits``: whether the outputs are logits.
    """

    def __init__(self, metric: Any, logits: bool) -> None:
        from torchmetrics.aggregation import BaseAggregator
        from torchmetrics.utilities import dim_zero_sum

        self._metric, title = metric.set_dtype(torch.float64), type(metric).__name__
        metric.sync_on_compute = False
        # It takes a batch for probabilities where all of it lies in [0, 1]; then the number depends on the batches.
        names = [c.__name__ for c in type(metric).__mro__ if c.__module__.startswith("torchmetrics.classification")]
        self._ready = _probabilities(names) if logits else torch.asarray
        self._labels = _whole if names else torch.asarray
        if isinstance(metric, BaseAggregator):
            raise no_comparison(title)
        lists = [name for name, start in metric._defaults.items() if isinstance(start, list)]
        if lists:
            fix = "take a form that counts: thresholds=200 for a curve, multidim_average='global' for rates"
            fix += "; or write a function"
            raise ConfigError(f"{title} keeps a list of all outputs ({', '.join(lists)})", fix=fix)
        others = [name for name, reduction in metric._reductions.items() if reduction is not dim_zero_sum]
        if others or not metric._defaults:
            what = f"the state {others[0]} is not a sum" if others else "it keeps no sums itself"
            raise ConfigError(f"{title}: {what}", fix="write a function with a result, or name its parts alone")

    def sums(self, outputs: Any, labels: Any, weights: torch.Tensor) -> torch.Tensor:
        metric, counts = self._metric.to(weights.device), weights > 0
        metric.reset()
        if bool(counts.any()):
            outputs, labels = (for_each(lambda one: one[counts], x) for x in (outputs, labels))
            metric.update(for_each(self._ready, outputs), for_each(self._labels, labels))
        states = [(getattr(metric, name) - start.to(weights.device)) for name, start in metric._defaults.items()]
        return torch.cat([x.reshape(-1).double() for x in states])

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        return [tuple(start.shape) for start in self._metric._defaults.values()]

    def result(self, states: Sequence[np.ndarray]) -> float:
        metric = self._metric
        metric.reset()
        for (name, start), total in zip(metric._defaults.items(), states, strict=True):
            # A state of whole numbers stays one.
            state = start + torch.from_numpy(total).to(start)
            setattr(metric, name, state.to(metric.device))
        metric._update_count = 1  # it warns where no batch came
        return float(metric.compute())


def _probabilities(names: Sequence[str]) -> Any:
    """Return the function that makes of logits what a metric would make of them; ``names``: of it and its bases."""
    kinds = [kind for name in names for start, kind in PROBABILITIES.items() if name.startswith(start)]
    return kinds[0] if kinds else torch.asarray


def _whole(labels: torch.Tensor) -> torch.Tensor:
    """Return labels as whole numbers, if they are: the loss bce has yes and no in float32."""
    whole = labels.long()
    return whole if bool((whole == labels).all()) else labels


def library_metric(metric: Any, logits: bool) -> TorchMetric | None:
    """Return the metric as sums; None: it is not of TorchMetrics."""
    library = sys.modules.get("torchmetrics")
    if library and isinstance(metric, library.MetricCollection):
        raise ConfigError("MetricCollection holds several metrics", fix="name each of them alone")
    return TorchMetric(metric, logits) if library and isinstance(metric, library.Metric) else None

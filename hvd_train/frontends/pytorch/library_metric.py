"""TorchMetrics' metric objects, computed from sums over samples."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from hvd_train.errors import ConfigError
from hvd_train.task.user_functions import for_each, no_comparison

# {first letters of a TorchMetrics class: the function it applies to outputs that it considers logits}.
PROBABILITIES = {
    "Binary": torch.sigmoid,
    "Multilabel": torch.sigmoid,
    **dict.fromkeys(("MulticlassPrecisionRecallCurve", "MulticlassHingeLoss"), partial(torch.softmax, dim=1)),
}


class TorchMetric:
    """A ``torchmetrics.Metric`` whose state consists of sums.

    ``sums``: the concatenated states of one batch. ``result`` assigns the sums of all batches and ranks to the states
    and calls ``compute``. Raises ConfigError if a state is not a sum, for example the list of all outputs that an exact
    AUROC sorts. ``logits``: the outputs are logits, or it is not known, as beside a user's loss.

    Some metrics take outputs for probabilities if all of a call are in [0, 1], else for logits, so that their value
    would depend on the batches. Unless it is known, ``sums`` therefore counts both ways, and how many outputs lie
    outside [0, 1]; ``result`` takes the way that the metric would take with all outputs in one call.
    """

    def __init__(self, metric: Any, logits: bool) -> None:
        from torchmetrics.aggregation import BaseAggregator
        from torchmetrics.utilities import dim_zero_sum

        self._metric, title = metric.set_dtype(torch.float64), type(metric).__name__
        metric.sync_on_compute = False
        names = [c.__name__ for c in type(metric).__mro__ if c.__module__.startswith("torchmetrics.classification")]
        ready = _probabilities(names)
        # What the metric is given instead of the outputs: in one way, or in two.
        self._ways: list[Any] = [ready or torch.asarray] if logits or not ready else [torch.asarray, ready]
        self._labels = _whole if names else torch.asarray
        if isinstance(metric, BaseAggregator):
            raise no_comparison(title)
        lists = [name for name, start in metric._defaults.items() if isinstance(start, list)]
        if lists:
            fix = "take a form that counts: thresholds=200 for a curve, multidim_average='global' for rates"
            fix += "; or write a function, over all predictions as gathered:package.module:function"
            raise ConfigError(f"{title} keeps a list of all outputs ({', '.join(lists)})", fix=fix)
        others = [name for name, reduction in metric._reductions.items() if reduction is not dim_zero_sum]
        if others or not metric._defaults:
            what = f"the state {others[0]} is not a sum" if others else "it keeps no sums itself"
            raise ConfigError(f"{title}: {what}", fix="write a function with a result, or name its parts alone")

    def sums(self, outputs: Any, labels: Any, weights: torch.Tensor) -> torch.Tensor:
        metric, counts = self._metric.to(weights.device), weights > 0
        outputs, labels = (for_each(lambda one: one[counts], x) for x in (outputs, labels))
        sums = []
        for ready in self._ways:
            metric.reset()
            if bool(counts.any()):
                metric.update(for_each(ready, outputs), for_each(self._labels, labels))
            states = [(getattr(metric, name) - start.to(weights.device)) for name, start in metric._defaults.items()]
            sums += [x.reshape(-1).double() for x in states]
        if len(self._ways) == 2:
            sums.append((~((outputs >= 0) & (outputs <= 1))).sum().reshape(1).double())
        return torch.cat(sums)

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        states = [tuple(start.shape) for start in self._metric._defaults.values()]
        return states if len(self._ways) == 1 else [*states, *states, (1,)]

    def result(self, states: Sequence[np.ndarray]) -> float:
        metric, count = self._metric, len(self._metric._defaults)
        metric.reset()
        if len(self._ways) == 2:
            states = states[count:-1] if states[-1] else states[:count]
        for (name, start), total in zip(metric._defaults.items(), states, strict=True):
            # An integer state stays an integer.
            state = start + torch.from_numpy(total).to(start)
            setattr(metric, name, state.to(metric.device))
        metric._update_count = 1  # it warns if it had no batch
        return float(metric.compute())


def _probabilities(names: Sequence[str]) -> Any:
    """Return what a metric applies to logits first, or None if nothing. ``names``: its class and base classes."""
    kinds = [kind for name in names for start, kind in PROBABILITIES.items() if name.startswith(start)]
    return kinds[0] if kinds else None


def _whole(labels: torch.Tensor) -> torch.Tensor:
    """Return labels as integers if they are whole: the loss bce has 0 and 1 as float32."""
    whole = labels.long()
    return whole if bool((whole == labels).all()) else labels


def library_metric(metric: Any, logits: bool) -> TorchMetric | None:
    """Wrap the metric; None if it is not one of TorchMetrics."""
    library = sys.modules.get("torchmetrics")
    if library and isinstance(metric, library.MetricCollection):
        raise ConfigError("MetricCollection holds several metrics", fix="name each of them alone")
    return TorchMetric(metric, logits) if library and isinstance(metric, library.Metric) else None

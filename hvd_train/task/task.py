"""The losses and metrics of a training as one vector of sums, the same for every framework.

A loss or metric gives values, one per sample or place, never a mean. S = sum of w v and W = sum of w are added over
places, micro-batches and ranks, and divided once. Where no place is left out, a sample counts by the mean over its
places, and W is the number of samples, known beforehand.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

import numpy as np

from hvd_train.config import TaskConfig
from hvd_train.config.keys.task import title_of
from hvd_train.errors import ConfigError
from hvd_train.metrics.auc import scores
from hvd_train.metrics.metric import Mean, Metric, Predictions, flat_weights, share
from hvd_train.metrics.ranking import Ranking
from hvd_train.protocol import Ops, Sample, Tensor
from hvd_train.task.objective import Objective
from hvd_train.task.user_functions import UserFunction, for_each

M = TypeVar("M", bound=Metric)


@dataclass(frozen=True)
class Entry(Generic[M]):
    """A metric's place: the number of its objective, and where its sums stand in the vector."""

    title: str
    objective: int
    metric: M
    sums: list[int]


class Task:
    """The objectives of a training, and the vector of their sums.

    The vector: of each loss S, and W where that depends on the data; the sums of metrics that are means; the number of
    samples; the sums of all other metrics. Checkpoints keep it, so this order belongs to their format.
    """

    def __init__(self, config: TaskConfig, sample: Sample, ops: Ops) -> None:
        self._ops = ops
        self.objectives = [
            Objective(name, *names, sample, config.ignore_index, ops, config.class_weights)
            for name, names in config.terms.items()
        ]
        self.has_user_functions = config.has_user_functions
        # Where losses of the user are asked for their weights.
        self._output_shapes: Any = None
        self._lay_out()

    def _lay_out(self) -> None:
        """Give each sum its place in the vector."""
        titled = [
            (k, title_of(objective.output, name), metric)
            for k, objective in enumerate(self.objectives)
            for name, metric in objective.metrics.items()
        ]
        # Whether the W of some loss depends on the data, and must be added over ranks before the step.
        self.weighted_by_data = any(objective.weighted_by_data for objective in self.objectives)
        end = sum(1 + objective.weighted_by_data for objective in self.objectives)
        self._means: list[Entry[Mean]] = []
        for k, title, metric in titled:
            if isinstance(metric, Mean):
                self._means.append(Entry(title, k, metric, [*range(end, end + metric.length)]))
                end += metric.length
        self.samples = end  # the entry of their number
        for entry in self._means:
            # A mean over all places: its W is the number of samples.
            if entry.metric.length == 1:
                entry.sums.append(self.samples)
        end += 1
        self._others: list[Entry[Metric]] = []
        for k, title, metric in titled:
            if not isinstance(metric, Mean):
                self._others.append(Entry(title, k, metric, [*range(end, end + metric.length)]))
                end += metric.length
        self.length = end
        # {objective with a metric that follows from the order of the outputs: how many labels of yes and no it has}
        self.ranked = {entry.objective: entry.metric.ranked for entry in self._others if entry.metric.ranked}

    @property
    def entries(self) -> list[tuple[int, int]]:
        """Return (place of S, place of W) of each loss."""
        places, end = [], 0
        for objective in self.objectives:
            places.append((end, end + 1 if objective.weighted_by_data else self.samples))
            end += 1 + objective.weighted_by_data
        return places

    def probe(self, outputs: Any, labels: Mapping[str, Tensor], weights: Tensor) -> None:
        """Try functions of the user on made-up samples; only then ``length`` and the like are final."""
        for objective in self.objectives:
            objective.probe(outputs, labels, weights)
        self._output_shapes = for_each(lambda x: (tuple(x.shape)[1:], self._ops.dtype(x)), outputs)
        self._lay_out()

    @property
    def remarks(self) -> list[str]:
        """Return a line about each function of the user that compares the samples of a batch; after ``probe``."""
        return [f"{one.where}: {one.remark}" for one in self._functions if one.remark]

    @property
    def compares_samples(self) -> bool:
        """Return whether a function of the user compares the samples of a batch; after ``probe``."""
        return any(one.compares for one in self._functions)

    @property
    def _functions(self) -> list[UserFunction]:
        each = [
            (one.user_loss, *(getattr(x, "function", None) for x in one.metrics.values())) for one in self.objectives
        ]
        return [function for functions in each for function in functions if function]

    def __call__(self, outputs: Any, labels: Mapping[str, Tensor], weights: Tensor, scale: Any = None) -> Any:
        """Return the loss to minimize, and the vector of sums (length,) float64.

        outputs: (n, ...) or {name: (n, ...)}; labels: {name: (n, ...)}; weights (n,): 1, or 0 for padding. ``scale``: a
        number for each loss, by which its S is multiplied; None: no loss is needed.
        """
        return self._summed(outputs, labels, weights, scale)[:2]

    def scores(self, outputs: Any, labels: Mapping[str, Tensor], weights: Tensor) -> Tensor:
        """Return the vector of sums of an evaluation's batch.

        Behind it, for each of ``ranked``: the number of places m, their scores (m,), and marks (m,): 0 where a place
        does not count, 1 where its label says no, 2 where it says yes. ``rank`` takes it.
        """
        ops = self._ops
        _, sums, predictions = self._summed(outputs, labels, weights, None)
        parts = [sums]
        for k in self.ranked:
            score, yes, w = scores(predictions[k])
            marks = w * (1 + ops.cast(yes, "float64"))
            parts += [ops.reshape(ops.sum(w * 0 + 1, 0), (1,)), score, marks]
        return ops.concat(parts) if len(parts) > 1 else sums

    def rank(self, rows: np.ndarray, rankings: Mapping[int, Ranking]) -> None:
        """Add to ``rankings`` what ``scores`` gives behind the sums, {objective: its ranking}."""
        for k in self.ranked:
            end = 1 + 2 * int(rows[0])
            rankings[k].add(*rows[1:end].reshape(2, -1))
            rows = rows[end:]

    def _summed(self, outputs: Any, labels: Any, weights: Tensor, scale: Any) -> tuple[Any, Tensor, list[Predictions]]:
        """Return what ``__call__`` does, and the predictions of each objective."""
        ops, loss = self._ops, None
        scalars, predictions = [], []
        for k, objective in enumerate(self.objectives):
            (total, *count), of_objective = objective.losses(outputs, labels, weights)
            predictions.append(of_objective)
            scalars += [ops.stop_gradient(total), *count]
            if scale is not None:
                loss = total * scale[k] if loss is None else loss + total * scale[k]
        # Numbers of all losses and means are stacked and cast at once: each operation costs microseconds a step.
        for entry in self._means:
            scalars += entry.metric.totals(predictions[entry.objective])
        vectors = [ops.stack([*scalars, ops.sum(weights, 0)])]
        vectors += [entry.metric.sums(predictions[entry.objective]) for entry in self._others]
        sums = [ops.cast(x, "float64") for x in vectors]
        return loss, ops.concat(sums) if len(sums) > 1 else sums[0], predictions

    def counts(self, labels: Mapping[str, Tensor], weights: Tensor) -> Tensor:
        """Compute the W of each loss, (losses,) float64, from labels alone: no model is asked."""
        ops, counts = self._ops, []
        for objective in self.objectives:
            place_weights = objective.place_weights(labels, weights, partial(self._zeros, weights))
            counts.append(ops.sum(weights if place_weights is None else flat_weights(place_weights, weights, ops), 0))
        return ops.cast(ops.stack(counts), "float64")

    def _zeros(self, weights: Tensor) -> Any:
        """Make outputs of zeros in the shapes of the model's, for as many samples as there are weights."""
        rows, ops = int(weights.shape[0]), self._ops
        return for_each(lambda like: ops.cast(ops.from_numpy(np.zeros((rows, *like[0]))), like[1]), self._output_shapes)

    def check(self, sums: np.ndarray, counts: np.ndarray) -> None:
        """Compare W with ``counts``, which labels alone gave before the steps: gradients were divided by those."""
        for objective, (_, place), count in zip(self.objectives, self.entries, counts.tolist(), strict=True):
            if not math.isclose(sums[place], count, rel_tol=1e-3):
                what = f"the weights add up to {sums[place]:g}, and for outputs of zeros to {count:g}"
                fix = "let weights follow from the labels alone; what outputs change belongs into the values"
                raise ConfigError(what, where=f"task.loss: {objective.loss}", fix=fix, common=True)

    def finite(self, sums: np.ndarray) -> bool:
        """Return whether the losses are finite. One in which no label counts is nan, but no sign of a wrong model."""
        return all(math.isfinite(sums[value]) for value, _ in self.entries)

    def results(self, sums: np.ndarray, rankings: Mapping[int, Ranking] | None = None) -> dict[str, float]:
        """Compute {"loss", each loss of several, each metric, "samples"} from sums over all ranks.

        ``rankings``: those of an evaluation, by objective, over all ranks; without, sums stand for them.
        A value is nan where nothing counts in it: no sample, or no place that has a label.
        """
        samples, losses = float(sums[self.samples]), {}
        for objective, (value, count) in zip(self.objectives, self.entries, strict=True):
            losses[f"{objective.output}_loss"] = share(*sums[[value, count]].tolist())
        values: dict[str, float] = {"loss": sum(losses.values()), **(losses if len(losses) > 1 else {})}
        metrics: tuple[Entry[Any], ...] = (*self._means, *self._others)
        if not samples:
            return dict.fromkeys([*values, *(entry.title for entry in metrics)], math.nan) | {"samples": 0}
        for entry in metrics:
            if rankings and entry.metric.ranked:
                values[entry.title] = entry.metric.exact(rankings[entry.objective])
            else:
                values[entry.title] = entry.metric.result(sums[entry.sums])
        return values | {"samples": round(samples)}

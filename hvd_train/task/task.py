"""The losses and metrics of a training as one vector of sums, the same for every framework.

A loss or metric returns values v with weights w, per sample or per position (token, pixel), never a mean. S = sum of
w v and W = sum of w are added over positions, micro-batches and ranks, and divided once. If all positions have a
label, a sample counts by the mean over its positions, and W is the number of samples, which is known in advance.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
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
from hvd_train.protocol import Batch, Communicator, Ops, Sample, Tensor
from hvd_train.task.gathered import Gathered, Gathering, shape_of
from hvd_train.task.objective import Objective, StepObjective
from hvd_train.task.step import StepResult, UserStep
from hvd_train.task.user_functions import UserFunction, for_each

M = TypeVar("M", bound=Metric)


@dataclass(frozen=True)
class MetricEntry(Generic[M]):
    """A metric with its title, the index of its objective, and the indices of its sums in the vector."""

    title: str
    objective: int
    metric: M
    sums: list[int]


class Task:
    """The objectives of a training, and the vector of their sums.

    The vector holds S of each loss, and W if it depends on the data; the sums of metrics that are means; the number of
    samples; the sums of all other metrics. This order is part of the checkpoint format.
    """

    def __init__(self, config: TaskConfig, sample: Sample, ops: Ops, training: bool = False) -> None:
        """``training``: models of this framework are told by an argument that they are training."""
        self._ops, self._labels = ops, sample.labels
        self.step = UserStep(config.step, [*config.terms], training) if config.step else None
        self._remark = ""
        # What the front-end finds in the model: a layer whose mask reaches the outputs, and a loss of its own.
        self.masking_layer = self.own_loss = ""
        self.about_model: list[str] = []  # further remarks
        kind = StepObjective if config.step else Objective
        self.objectives = [
            kind(name, *names, sample, config.ignore_index, ops, config.class_weights)
            for name, names in config.terms.items()
        ]
        # What each loss counts in their sum.
        self.factors = [(config.loss_weights or {}).get(name, 1.0) for name in config.terms]
        self.has_user_functions = config.has_user_functions
        # For users' losses that return weights.
        self._output_shapes: Any = None
        self._lay_out()

    def _lay_out(self) -> None:
        """Assign each sum its index in the vector."""
        titled = [
            (k, title_of(objective.prefix, name), metric)
            for k, objective in enumerate(self.objectives)
            for name, metric in objective.metrics.items()
        ]
        # Whether the W of any loss depends on the data, and must be summed over ranks before the step.
        self.weighted_by_data = any(objective.weighted_by_data for objective in self.objectives)
        end = sum(1 + objective.weighted_by_data for objective in self.objectives)
        self._means: list[MetricEntry[Mean]] = []
        for k, title, metric in titled:
            if isinstance(metric, Mean):
                self._means.append(MetricEntry(title, k, metric, [*range(end, end + metric.length)]))
                end += metric.length
        self.samples = end  # the index of the number of samples
        for entry in self._means:
            # A mean over all positions: its W is the number of samples.
            if entry.metric.length == 1:
                entry.sums.append(self.samples)
        end += 1
        self._others: list[MetricEntry[Metric]] = []
        for k, title, metric in titled:
            if not isinstance(metric, Mean | Gathered):
                self._others.append(MetricEntry(title, k, metric, [*range(end, end + metric.length)]))
                end += metric.length
        self.length = end
        # {objective with a ranking metric such as AUC: its number of binary labels}
        self.gathered: dict[int, list[MetricEntry[Gathered]]] = {}
        for k, title, metric in titled:
            if isinstance(metric, Gathered):
                self._check_gathered(self.objectives[k].label, metric)
                self.gathered.setdefault(k, []).append(MetricEntry(title, k, metric, []))
        self.ranked = {entry.objective: entry.metric.ranked for entry in self._others if entry.metric.ranked}

    @property
    def entries(self) -> list[tuple[int, int]]:
        """Return (index of S, index of W) of each loss."""
        pairs, end = [], 0
        for objective in self.objectives:
            pairs.append((end, end + 1 if objective.weighted_by_data else self.samples))
            end += 1 + objective.weighted_by_data
        return pairs

    def probe(self, outputs: Any, labels: Mapping[str, Tensor], weights: Tensor) -> None:
        """Call the user's functions on made-up samples; ``length`` and the layout are final only afterwards."""
        for objective in self.objectives:
            objective.probe(outputs, labels, weights)
        if self.step is None:
            self._output_shapes = for_each(lambda x: (tuple(x.shape)[1:], self._ops.dtype(x)), outputs)
        self._lay_out()

    def probe_step(self, results: Callable[[np.ndarray], StepResult], rows: int) -> None:
        """Try the user's step on made-up samples, together and one by one. ``results`` runs it on these of ``rows``."""
        assert self.step
        self._remark = self.step.check_alone(results, rows, self._ops)

    @property
    def remarks(self) -> list[str]:
        """Return remarks on the model's mask and loss, and on functions that compare samples; after ``probe``."""
        of_step = [f"{self.step.where}: {self._remark}"] if self.step and self._remark else []
        built_in = [one for one in self.objectives if not one.user_loss]
        of_model = [*self.about_model]
        if self.masking_layer and (counting := [one.loss for one in built_in if not one.masked]):
            what = (
                f"the model masks some of its outputs (layer '{self.masking_layer}'), and {counting[0]} counts them all"
            )
            of_model.append(f"{what}, where Keras leaves them out: a loss of yours may return (values, weights)")
        if self.own_loss and built_in:
            what = f"the model's {self.own_loss} is not used: its loss here is {built_in[0].loss}"
            of_model.append(f"{what}; what it computes belongs in a loss (task.loss) or a step (task.step) of yours")
        return of_model + of_step + [f"{one.where}: {one.remark}" for one in self._functions if one.remark]

    @property
    def compares_samples(self) -> bool:
        """Return whether any user function's value for a sample depends on the batch; after ``probe``."""
        return bool(self._remark) or any(one.compares for one in self._functions)

    @property
    def functions(self) -> list[Any]:
        """Return the user's functions: losses, metrics and the step."""
        return [*(one.function for one in self._functions), *([self.step.function] if self.step else [])]

    @property
    def _functions(self) -> list[UserFunction]:
        each = [
            (one.user_loss, *(getattr(x, "function", None) for x in one.metrics.values())) for one in self.objectives
        ]
        return [function for functions in each for function in functions if function]

    def __call__(self, outputs: Any, labels: Mapping[str, Tensor], weights: Tensor, scale: Any = None) -> Any:
        """Return the loss to minimize, and the vector of sums (length,) float64.

        outputs: (n, ...) or {name: (n, ...)}; labels: {name: (n, ...)}; weights (n,): 1, or 0 for padding. ``scale``: a
        factor for the S of each loss; None: no loss is needed.
        """
        return self._summed(outputs, labels, weights, scale)[:2]

    def scores(self, outputs: Any, labels: Mapping[str, Tensor], weights: Tensor) -> Tensor:
        """Return the vector of sums of a batch in an evaluation.

        For each of ``ranked`` three parts follow: the number of scores m, the scores (m,), and marks (m,): 0 for no
        label, 1 for the label no, 2 for yes. For each of ``gathered`` follow the number of rows, that of the axes of a
        row, their lengths, and all outputs. ``rank`` and ``gather`` read them.
        """
        ops = self._ops
        _, sums, predictions = self._summed(outputs, labels, weights, None)
        parts = [sums]
        for k in self.ranked:
            score, yes, w = scores(predictions[k])
            marks = w * (1 + ops.cast(yes, "float64"))
            parts += [ops.reshape(ops.sum(w * 0 + 1, 0), (1,)), score, marks]
        for k, (entry, *_) in self.gathered.items():
            outputs = predictions[k].raw[0]
            shape = shape_of(outputs, entry.metric.where)
            rows = ops.cast(ops.sum(weights * 0 + 1, 0), "float64")
            head = ops.from_numpy(np.array([len(shape), *shape], np.float64))
            parts += [ops.reshape(rows, (1,)), head, ops.reshape(ops.cast(outputs, "float64"), (-1,))]
        return ops.concat(parts) if len(parts) > 1 else sums

    def _check_gathered(self, label: str, metric: Gathered) -> None:
        """Refuse labels that the model's outputs are not compared with as the data store them."""
        fields = {name: field for name, field in self._labels.items() if label in ("", name)}
        if any(field.image or field.divisor != 1 for field in fields.values()):
            what = f"labels {', '.join(fields)} are images, which are gathered as stored, beside what the model gives"
            fix = "give a metric with a value for each sample, or data.images: false"
            raise ConfigError(what, where=metric.where, fix=fix)

    def gatherings(self) -> dict[int, Gathering]:
        """Return what an evaluation fills: an empty gathering for each objective with gathered metrics."""
        return {k: Gathering(self.objectives[k].label, one.metric.where) for k, (one, *_) in self.gathered.items()}

    def rank(self, rows: np.ndarray, rankings: Mapping[int, Ranking]) -> np.ndarray:
        """Add the scores and marks of ``scores`` to ``rankings`` {objective: its ranking}. Return the rest."""
        for k in self.ranked:
            end = 1 + 2 * int(rows[0])
            rankings[k].add(*rows[1:end].reshape(2, -1))
            rows = rows[end:]
        return rows

    def gather(self, rows: np.ndarray, gatherings: Mapping[int, Gathering], batch: Batch) -> None:
        """Add the outputs that ``scores`` appends for a batch to ``gatherings``, by objective; after ``rank``."""
        for gathering in gatherings.values():
            start = 2 + int(rows[1])
            shape = rows[[0, *range(2, start)]].astype(int).tolist()
            end = start + math.prod(shape)
            gathering.add(rows[start:end].reshape(shape), batch)
            rows = rows[end:]

    def _summed(self, outputs: Any, labels: Any, weights: Tensor, scale: Any) -> tuple[Any, Tensor, list[Predictions]]:
        """Return the results of ``__call__`` and the predictions of each objective."""
        ops, loss = self._ops, None
        scalars, predictions = [], []
        for k, objective in enumerate(self.objectives):
            (total, *count), of_objective = objective.losses(outputs, labels, weights)
            predictions.append(of_objective)
            scalars += [ops.stop_gradient(total), *count]
            if scale is not None:
                part = total * scale[k] if self.factors[k] == 1 else total * scale[k] * self.factors[k]
                loss = part if loss is None else loss + part
        if self.step and scale is not None and outputs.penalty is not None:
            loss = loss + outputs.penalty * scale[-1] * ops.sum(weights, 0)  # by samples: a loss may have no label
        # All scalars are stacked and cast together: each operation takes microseconds a step.
        for entry in self._means:
            scalars += entry.metric.totals(predictions[entry.objective])
        vectors = [ops.stack([*scalars, ops.sum(weights, 0)])]
        vectors += [entry.metric.sums(predictions[entry.objective]) for entry in self._others]
        sums = [ops.cast(x, "float64") for x in vectors]
        return loss, ops.concat(sums) if len(sums) > 1 else sums[0], predictions

    def counts(self, labels: Mapping[str, Tensor], weights: Tensor) -> Tensor:
        """Compute the W of each loss, (losses,) float64, from labels alone, without running the model."""
        ops, counts = self._ops, []
        for objective in self.objectives:
            each = objective.position_weights(labels, weights, partial(self._zeros, weights))
            counts.append(ops.sum(weights if each is None else flat_weights(each, weights, ops), 0))
        return ops.cast(ops.stack(counts), "float64")

    def counts_of(self, result: StepResult, weights: Tensor) -> Tensor:
        """Compute the W of each loss, (losses,) float64, from what the user's step returned."""
        ops, each = self._ops, [result.losses[objective.output][1] for objective in self.objectives]
        counts = [ops.sum(weights if w is None else flat_weights(w, weights, ops), 0) for w in each]
        return ops.cast(ops.stack(counts), "float64")

    def _zeros(self, weights: Tensor) -> Any:
        """Make outputs of zeros in the model's shapes, one row per weight."""
        rows, ops = int(weights.shape[0]), self._ops
        return for_each(lambda like: ops.cast(ops.from_numpy(np.zeros((rows, *like[0]))), like[1]), self._output_shapes)

    def check(self, sums: np.ndarray, counts: np.ndarray) -> None:
        """Check that W equals ``counts``, computed from labels before the step, by which gradients were divided."""
        for objective, (_, index), count in zip(self.objectives, self.entries, counts.tolist(), strict=True):
            if not math.isclose(sums[index], count, rel_tol=1e-3):
                of_step = self.step is not None
                other = "in an evaluation of the same samples" if of_step else "for outputs of zeros"
                what = f"the weights add up to {sums[index]:g}, but {other} to {count:g}"
                fix = "compute weights from the labels alone; what depends on outputs belongs in the values"
                where = f"task.{'step' if of_step else 'loss'}: {objective.loss}"
                raise ConfigError(what, where=where, fix=fix, common=True)

    def finite(self, sums: np.ndarray) -> bool:
        """Return whether S of each loss is finite. (Without any label the loss S / W is nan, which is no error.)"""
        return all(math.isfinite(sums[value]) for value, _ in self.entries)

    def of_gathered(self, gatherings: Mapping[int, Gathering], ranks: Communicator) -> dict[str, float]:
        """Return the gathered metrics of an evaluation; all ranks call it, and get the values of rank 0."""
        values: dict[str, float] = {}
        for k, gathering in gatherings.items():
            whole = gathering.joined(ranks)
            for entry in self.gathered[k]:
                own = math.nan if whole is None else entry.metric.value(*whole)
                values[entry.title] = float(ranks.allgather_bytes(repr(own).encode(), "gathered value")[0])
        return values

    def results(self, sums: np.ndarray, rankings: Mapping[int, Ranking] | None = None) -> dict[str, float]:
        """Compute {"loss", each loss if there are several, each metric, "samples"} from sums over all ranks.

        ``rankings``: {objective: ranking over all ranks} of an evaluation; without them, such metrics are approximated
        from sums. A value is nan if there is no sample, or no label in it.
        """
        samples, losses = float(sums[self.samples]), {}
        for objective, (value, count) in zip(self.objectives, self.entries, strict=True):
            losses[f"{objective.output}_loss"] = share(*sums[[value, count]].tolist())
        together = sum(factor * x for factor, x in zip(self.factors, losses.values(), strict=True))
        values: dict[str, float] = {"loss": together, **(losses if len(losses) > 1 else {})}
        # A training step has no value for them.
        gathered = [one for entries in self.gathered.values() for one in entries] if rankings is not None else []
        metrics: tuple[MetricEntry[Any], ...] = (*self._means, *self._others, *gathered)
        if not samples:
            return dict.fromkeys([*values, *(entry.title for entry in metrics)], math.nan) | {"samples": 0}
        for entry in metrics:
            if rankings and entry.metric.ranked:
                values[entry.title] = entry.metric.exact(rankings[entry.objective])
            else:
                values[entry.title] = entry.metric.result(sums[entry.sums])
        return values | {"samples": round(samples)}

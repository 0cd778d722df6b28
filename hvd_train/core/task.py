"""What is trained for and told: losses and metrics as sums, once for every framework.

A loss or metric gives values, one per sample or place, never a mean: S = sum of w v and W = sum of w are added over
places, micro-batches and ranks, and divided once. n is the number of samples, T of places, C of classes. Where no
place is left out, a sample counts by the mean over its places, and W is the number of samples, known beforehand.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from hvd_train.config.keys import AVERAGED, TaskConfig, title_of
from hvd_train.config.own import own_function
from hvd_train.errors import ConfigError
from hvd_train.protocol import Field, Ops, Sample, Tensor, one_or_all

BINS = 1000  # of the histogram from which AUC is taken
# Bins of the sigmoid itself end at 7: of a class of one in a thousand, AUC was wrong by 0.02, now by 0.00002.
SPREAD = 8.0
Given = tuple[Tensor, Tensor | None]  # values, and their weights where not all count alike


def _cross_entropy(z: Tensor, y: Tensor, ops: Ops) -> Tensor:
    return ops.cross_entropy(z, y)


def _mse(z: Tensor, y: Tensor, ops: Ops) -> Tensor:
    return (z - y) ** 2


def _mae(z: Tensor, y: Tensor, ops: Ops) -> Tensor:
    return abs(z - y)


def _huber(z: Tensor, y: Tensor, ops: Ops) -> Tensor:
    """Huber (1964), with 1 as the border between the square and the line."""
    far = abs(z - y)
    return ops.where(far <= 1.0, 0.5 * far**2, far - 0.5)


def _bce(z: Tensor, y: Tensor, ops: Ops) -> Tensor:
    """-y log s(z) - (1 - y) log(1 - s(z)) for the sigmoid s; no term cancels another."""
    return y * ops.softplus(-z) + (1.0 - y) * ops.softplus(z)


def _accuracy(z: Tensor, y: Tensor, ops: Ops) -> Tensor:
    """The largest logit's class; without an axis of classes, whether z > 0 where y is 1."""
    if len(z.shape) == len(y.shape):
        return ops.cast((z > 0) == (y > 0.5), ops.dtype(z))
    return ops.cast(ops.argmax(z) == y, ops.dtype(z))


def _top5(z: Tensor, y: Tensor, ops: Ops) -> Tensor:
    """Fewer than 5 logits are larger than the label's."""
    own = ops.reshape(ops.pick(z, y), (*_shape(y), 1))
    return ops.cast(ops.add_last(ops.cast(z > own, ops.dtype(z))) < 5, ops.dtype(z))


LOSSES: dict[str, Callable[[Tensor, Tensor, Ops], Tensor]] = {
    "cross_entropy": _cross_entropy, "mse": _mse, "mae": _mae, "huber": _huber, "bce": _bce,
}  # fmt: skip
MEANS = LOSSES | {"rmse": _mse, "accuracy": _accuracy, "top5": _top5}


def _shape(x: Tensor) -> tuple[int, ...]:
    """For ``reshape``: the first axis may be unknown while a graph is traced."""
    return (-1, *(int(k) for k in tuple(x.shape)[1:]))


# ---- metrics that are no mean: sums of fixed length, and what becomes of them


def _r2_sums(z: Tensor, y: Tensor, w: Tensor, length: int, ops: Ops) -> Tensor:
    """[W, sum of y, of y^2, of (z - y)^2]; in 64 bits, for the squares cancel where the labels' mean is large."""
    z, y, w = (ops.cast(x, "float64") for x in (z, y, w))
    return ops.stack([ops.add_rows(w * x) for x in (w * 0 + 1, y, y**2, (z - y) ** 2)])


def _r2(sums: np.ndarray) -> float:
    count, first, second, residual = map(float, sums)
    spread = second - first**2 / count if count else 0.0
    return 1 - residual / spread if spread > 0 else math.nan


def _class_sums(z: Tensor, y: Tensor, w: Tensor, length: int, ops: Ops) -> Tensor:
    """Per class: rightly found, found, there. Of outputs (n, C) the largest is found, of (n,) class 1 where z > 0."""
    there = ops.cast(y, "int64")
    classes, found = length // 3, ops.argmax(z) if len(z.shape) > 1 else ops.cast(z > 0, "int64")
    right, known = w * ops.cast(found == there, ops.dtype(w)), found < classes  # there may be more logits
    told = ops.scatter(classes, ops.where(known, found, 0), ops.where(known, w, 0.0))
    return ops.join([ops.scatter(classes, there, right), told, ops.scatter(classes, there, w)])


def _label_sums(z: Tensor, y: Tensor, w: Tensor, length: int, ops: Ops) -> Tensor:
    """Per label of several, which are yes or no: rightly found, found, there."""
    z, y, w = (ops.reshape(x, (-1, length // 3)) for x in (z, y, w))
    found, there = ops.cast(z > 0, ops.dtype(w)), ops.cast(y > 0.5, ops.dtype(w))
    return ops.join([ops.add_rows(w * x) for x in (found * there, found, there)])


def _rates(kind: str, counts: np.ndarray) -> np.ndarray:
    """(3, K) -> (K,); 0 where there is nothing to divide by, as scikit-learn has it."""
    right, found, there = counts
    above, below = {"f1": (2 * right, found + there), "precision": (right, found), "recall": (right, there)}[kind]
    return np.divide(above, below, out=np.zeros_like(below, dtype=float), where=below > 0)


def _of_counts(kind: str, average: str, form: str, sums: np.ndarray) -> float:
    """``average`` "one": class 1 alone."""
    counts = sums.reshape(3, -1)
    _, found, there = counts
    if form == "classes" and not counts.any():  # no place had a label
        return math.nan
    if average == "micro":
        return float(_rates(kind, counts.sum(1, keepdims=True))[0])
    rates = _rates(kind, counts)
    if average == "one":
        return float(rates[1])
    if average == "weighted":
        return float(rates @ there / there.sum()) if there.any() else 0.0
    return float(rates[found + there > 0].mean() if form == "classes" else rates.mean())


def _auc_sums(z: Tensor, y: Tensor, w: Tensor, length: int, ops: Ops) -> Tensor:
    """Per label: histograms of sigmoid(z / SPREAD), of the class 0 and of the class 1."""
    labels = length // (2 * BINS)
    score = z[:, 1] - z[:, 0] if len(z.shape) > 1 else z
    place = ops.clip(ops.sigmoid(score / SPREAD) * BINS, BINS - 1.0)
    at = ops.cast(ops.where(score == score, place, 0.0), "int64")  # nan has no place, and the loss tells it
    if labels > 1:
        at = ops.reshape(ops.reshape(at, (-1, labels)) + ops.from_numpy(np.arange(labels) * BINS), (-1,))
    one = ops.cast(y > 0.5, ops.dtype(w))
    return ops.join([ops.scatter(length // 2, at, w * (1 - one)), ops.scatter(length // 2, at, w * one)])


def _of_bins(average: str, sums: np.ndarray) -> float:
    """The chance that a sample of class 1 lies above one of class 0; within a bin it is a half."""
    zero, one = sums.reshape(2, -1, BINS)
    if average == "micro":
        zero, one = zero.sum(0, keepdims=True), one.sum(0, keepdims=True)
    below = np.cumsum(zero, 1) - zero / 2
    pairs, there = zero.sum(1) * one.sum(1), one.sum(1)
    both = pairs > 0  # of a label that all or none have, there is no AUC
    if not both.any():
        return math.nan
    areas = (below * one).sum(1)[both] / pairs[both]
    return float(np.average(areas, weights=there[both] if average == "weighted" else None))


# ---- the task


SUMS = ("r2", *AVERAGED)  # metrics that are no mean
OF_CLASSES = ("cross_entropy", "top5", "accuracy", *AVERAGED)  # metrics that may see a number for each class


@dataclass(frozen=True)
class Form:
    """The kind of labels: one of ``size`` "classes" (yes or no is one of two), or ``size`` "labels" of yes or no."""

    kind: str
    size: int

    @classmethod
    def of(cls, outputs: Sequence[int], labels: Sequence[int]) -> Form:
        """Tell it from a sample's shapes. One axis holds several labels, more axes (masks) the places of one label."""
        if len(outputs) == len(labels) + 1 and outputs[-1] > 1:
            return cls("classes", outputs[-1])
        several = len(labels) == 1 and labels[0] > 1
        return cls("labels", labels[0]) if several else cls("classes", 2)


def _sums_of(kind: str, form: Form) -> tuple[Callable[..., Tensor], Callable[[np.ndarray], float], int]:
    """Return a metric that is not a mean: (function of its sums, function of its result, number of sums)."""
    if kind == "r2":
        return _r2_sums, _r2, 4
    what, average = AVERAGED[kind]
    if what == "auc":
        return _auc_sums, partial(_of_bins, average), 2 * BINS * (form.size if form.kind == "labels" else 1)
    usual = "one" if form == Form("classes", 2) else "macro"
    counts = _class_sums if form.kind == "classes" else _label_sums
    return counts, partial(_of_counts, what, average or usual, form.kind), 3 * form.size


@dataclass(frozen=True)
class Metric:
    """``function`` gives values, or, where there is a ``result``, what adds up to ``length`` entries of the vector from
    ``begin``."""

    title: str
    kind: str
    function: Callable[..., Any]
    result: Callable[[np.ndarray], float] | None
    length: int
    begin: int

    @property
    def own(self) -> bool:
        return ":" in self.kind

    @property
    def where(self) -> str:
        return f"task.metrics: {self.kind}"


class Term:
    """A loss and the metrics of one output. ``output`` "": all that the model gives."""

    def __init__(self, output: str, loss: str, metrics: Sequence[str], sample: Sample, ignore: int) -> None:
        self.output, self.loss, self.metrics = output, loss, tuple(metrics)
        self.own = ":" in loss
        where = f"task.loss: {loss}"
        if output and output not in sample.labels:
            fix = f"the data have {', '.join(sample.labels)}"
            raise ConfigError(f"there are no labels '{output}'", where=where, fix=fix)
        if not output and not self.own and len(sample.labels) != 1:
            fix = f"give a loss for each: {{{', '.join(f'{name}: {loss}' for name in sample.labels)}}}"
            raise ConfigError(f"one loss for the labels {', '.join(sample.labels)}", where=where, fix=fix)
        alone = output or (next(iter(sample.labels)) if len(sample.labels) == 1 else "")
        self.field: Field | None = sample.labels[alone] if alone else None
        self.function = own_function(loss, where) if self.own else LOSSES[loss]
        # Whether some places have no label: then W is data.
        self.masked = loss == "cross_entropy" and bool(self.field and self.field.masked)
        self.ignore = ignore
        self.counted = self.masked
        self.check_classes(self.field.classes or 0 if self.field and loss == "cross_entropy" else 0)

    def check_classes(self, count: int) -> None:
        """Check that metrics fit classes or numbers; of more than two classes there is not one AUC."""
        for kind in self.metrics:
            if not self.own and ":" not in kind and not self.sees(kind):
                which, other = ("numbers", "classes") if self.loss == "cross_entropy" else ("classes", "numbers")
                fix = f"leave it out: it is of {which}, and the loss {self.loss} of {other}"
                raise refused("the metric does not fit the loss", f"task.metrics: {kind}", fix)
            if kind.startswith("auc") and ":" not in kind and count > 2:
                fix = "leave it out, or give a metric of your own"
                raise refused(f"{count} classes, and it is of two", f"task.metrics: {kind}", fix)

    def sees(self, kind: str) -> bool:
        """Return whether a built-in metric can look at what a built-in loss looks at."""
        return kind in OF_CLASSES if self.loss == "cross_entropy" else kind not in ("cross_entropy", "top5")

    @property
    def form(self) -> Form:
        """The form that the data have; with a user's loss, the outputs tell more."""
        if self.loss == "cross_entropy" and self.field:
            return Form("classes", self.field.classes or 1)
        return Form.of((), self.field.shape if self.field else ())

    def part(self, given: Any) -> Any:
        """What of the outputs or labels belongs to this term."""
        if not self.output:
            if isinstance(given, Mapping) and len(given) > 1 and not self.own:
                fix = f"give a loss for each: {{{', '.join(f'{name}: {self.loss}' for name in given)}}}"
                raise refused(f"the model gives {', '.join(given)}", f"task.loss: {self.loss}", fix)
            return one_or_all(given) if isinstance(given, Mapping) else given
        if not isinstance(given, Mapping) or self.output not in given:
            has = f"gives {', '.join(given)}" if isinstance(given, Mapping) else "gives one output"
            fix = "return a dict with a name for each loss"
            raise refused(f"the model {has}, and task.loss names '{self.output}'", "model.name", fix)
        return given[self.output]


def refused(what: str, where: str, fix: str) -> ConfigError:
    return ConfigError(what, where=where, fix=fix)


class Task:
    """The sums of a batch and what becomes of them. The vector of sums: of each loss S, and W where that is counted;
    of each metric its own; then the number of samples, and after it the metrics of more than two entries."""

    def __init__(self, config: TaskConfig, sample: Sample, ops: Ops) -> None:
        self._ops = ops
        self.terms = [Term(name, *each, sample, config.ignore_index) for name, each in config.terms.items()]
        self._shapes: Any = None  # of the outputs, where own losses must be asked for their weights
        self._own_lengths: dict[tuple[int, str], int] = {}  # of own metrics, which only made-up samples tell
        self._forms = [term.form for term in self.terms]
        self.own = config.own
        self._place()

    def _place(self) -> None:
        """Gives every sum its entry."""
        self._metrics: list[tuple[int, Metric]] = []
        at = sum(1 + term.counted for term in self.terms)
        wide: list[tuple[int, str, int]] = []
        for k, term in enumerate(self.terms):
            for kind in term.metrics:
                if kind in SUMS:
                    wide.append((k, kind, _sums_of(kind, self._forms[k])[2]))
                    continue
                own = _own_metric(kind) if ":" in kind else None
                length = self._own_lengths.get((k, kind), 1) if own else 1 + term.masked
                if hasattr(own, "result"):
                    wide.append((k, kind, length))
                    continue
                function = own or MEANS[kind]
                title = title_of(term.output, kind)
                self._metrics.append((k, Metric(title, kind, function, None, length, at)))
                at += length
        self.samples = at  # its entry
        at += 1
        for k, kind, length in wide:
            title = title_of(self.terms[k].output, kind)
            own = _own_metric(kind) if ":" in kind else None
            function, result = (own, own.result) if own else _sums_of(kind, self._forms[k])[:2]
            self._metrics.append((k, Metric(title, kind, function, result, length, at)))
            at += length
        self.length = at

    @property
    def counted(self) -> bool:
        """Whether the W of some loss is data, and must be joined over ranks before the step."""
        return any(term.counted for term in self.terms)

    @property
    def entries(self) -> list[tuple[int, int]]:
        """Of each loss, where S and W stand."""
        found, at = [], 0
        for term in self.terms:
            found.append((at, at + 1 if term.counted else self.samples))
            at += 1 + term.counted
        return found

    def probe(self, outputs: Any, labels: Mapping[str, Tensor], weights: Tensor) -> None:
        """Made-up samples show what functions of the user's own give; only then ``length`` and the like are final."""
        for k, term in enumerate(self.terms):
            z, y = term.part(outputs), term.part(labels)
            if term.own:
                term.counted = self._probed(term.function, "task.loss", term.loss, z, y, weights)
                if any(kind in SUMS for kind in term.metrics):
                    self._forms[k] = Form.of(*(tuple(x.shape)[1:] for x in self._beside(term, z, y)))
            for kind in term.metrics:
                if ":" in kind:
                    function = _own_metric(kind)
                    weighted = self._probed(function, "task.metrics", kind, z, y, weights)
                    self._own_lengths[k, kind] = 1 + weighted
                    if hasattr(function, "result"):
                        sums = self._ops.to_numpy(self._own_sums(function, kind, z, y, weights, None))
                        self._own_lengths[k, kind] = len(sums)
                        _result(function.result, kind, sums)
        self._shapes = _map(lambda x: (tuple(x.shape)[1:], self._ops.dtype(x)), outputs)
        self._place()

    def _probed(self, function: Callable[..., Any], key: str, name: str, z: Any, y: Any, weights: Tensor) -> bool:
        """Whether it has weights. Outputs (n, 1) less labels (n,) are (n, n), a sample compared with all others."""
        values, own = self._own(function, key, name, z, y, weights)
        first, _ = _called(function, f"{key}: {name}", _map(lambda x: x[:1], z), _map(lambda x: x[:1], y))
        alone = tuple(first.shape)
        if alone[1:] != tuple(values.shape)[1:]:
            shapes = " and ".join(str(_map(lambda x: tuple(x.shape), x)) for x in (z, y))
            what = f"the function gives {tuple(values.shape)} for 2 samples and {alone} for one, of outputs and labels"
            fix = "bring both to one shape: of outputs or labels (n, 1), outputs[:, 0] and labels[:, 0] are (n,)"
            raise refused(f"{what} {shapes}", f"{key}: {name}", fix)
        return own is not None

    def _own(
        self,
        function: Callable[..., Any],
        key: str,
        name: str,
        z: Any,
        y: Any,
        weights: Tensor,
        counted: bool | None = None,
    ) -> Given:
        """What a function of the user's own gives, held to its contract; ``counted``: whether it has weights."""
        where = f"{key}: {name}"
        values, own = _called(function, where, z, y)
        fix = "give a value for each sample or place (in PyTorch losses: reduction='none')"
        fix += "; of class weights w give (values without weights, w[labels]): their mean divides by the sum of weights"
        if counted is not None and counted != (own is not None):
            raise refused("the function gives weights for some batches and none for others", where, "give them always")
        for x in (values,) if own is None else (values, own):
            if not hasattr(x, "shape"):
                raise refused(f"the function gives {type(x).__name__}, and no tensor", where, fix)
            shape = tuple(x.shape)
            if not shape:
                what = "the function gives one number for a batch: a mean over parts of unequal size is no mean of all"
                raise refused(what, where, fix)
            if None not in (shape[0], weights.shape[0]) and shape[0] != weights.shape[0]:
                raise refused(f"the function gives {shape} for {weights.shape[0]} samples", where, fix)
        if own is not None and tuple(own.shape) != tuple(values.shape):
            what = f"the function gives values {tuple(values.shape)} and weights {tuple(own.shape)}"
            raise refused(what, where, "give both the same shape")
        return values, own

    def _own_sums(
        self, function: Callable[..., Any], kind: str, z: Any, y: Any, weights: Tensor, length: int | None
    ) -> Tensor:
        """(k,) float64: of an own metric with a ``result``, the sums over the samples that count."""
        ops, where = self._ops, f"task.metrics: {kind}"
        values, own = self._own(function, "task.metrics", kind, z, y, weights)
        wide = tuple(values.shape)[1:]
        if own is not None or len(wide) > 1 or (length is not None and (*wide, 1)[0] != length):
            what = "(values, weights)" if own is not None else str(tuple(values.shape))
            fix = f"a metric with a result gives (samples, {length or 'k'}): of each sample the numbers that are added"
            raise refused(f"the function gives {what}", where, fix)
        count = ops.reshape(ops.cast(weights, "float64"), (-1, 1))
        values = ops.reshape(ops.cast(values, "float64"), (-1, *(wide or (1,))))
        return ops.add_rows(ops.where(count > 0, values, 0.0) * count)

    def __call__(self, outputs: Any, labels: Mapping[str, Tensor], weights: Tensor, scale: Any = None) -> Any:
        """(what is to be minimized, the vector of sums in float64); ``scale``: a number for each loss, None: no need.

        outputs: (n, ...) or {name: (n, ...)}; labels: {name: (n, ...)}; weights (n,): 1, or 0 for padding.
        """
        ops, scalars, wide, loss = self._ops, [], [], None
        prepared = []
        for k, term in enumerate(self.terms):
            given = term.part(outputs), term.part(labels)
            if term.own:
                values, own = self._own(term.function, "task.loss", term.loss, *given, weights, term.counted)
                z, y = self._beside(term, *given)
            else:
                z, y, own = self._fitting(term, *given)
                values = term.function(z, y, ops) if own is None else ops.cross_entropy(z, y, own)
            total, count = self._sum(values, own, weights, term.own)
            # What is only told needs no graph for gradients.
            scalars += [ops.constant(total)] if count is None else [ops.constant(total), count]
            told = _map(ops.constant, z), y, own if term.masked else None
            prepared.append((told, (_map(ops.constant, given[0]), given[1])))
            if scale is not None:
                part = total * scale[k]
                loss = part if loss is None else loss + part
        for k, metric in self._metrics:
            (z, y, own), given = prepared[k]
            if metric.result and metric.own:
                wide.append(self._own_sums(metric.function, metric.kind, *given, weights, metric.length))
                continue
            if metric.result:
                wide.append(metric.function(*self._flat(z, y, own, weights), metric.length, ops))
                continue
            if metric.own:
                counted = metric.length == 2
                values, own = self._own(metric.function, "task.metrics", metric.kind, *given, weights, counted)
            else:
                values = metric.function(z, y, ops)
            scalars += [x for x in self._sum(values, own, weights, metric.own) if x is not None]
        sums = [ops.cast(x, "float64") for x in (ops.stack([*scalars, ops.add_rows(weights)]), *wide)]
        return loss, ops.join(sums) if wide else sums[0]

    def _fitting(self, term: Term, z: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Outputs and labels of shapes that belong together, and the weights of places if some do not count."""
        ops, own = self._ops, None
        if term.masked:
            own = ops.cast(y != term.ignore, ops.dtype(z))
            y = ops.where(y == term.ignore, 0, y)
        logits, labels = tuple(z.shape), tuple(y.shape)
        if term.loss == "cross_entropy":
            classes = (term.field.classes if term.field else None) or 1
            if not fits(logits, labels, classes):
                raise unfit(logits, labels, classes)
            return z, y, own
        return *self._numbers(f"task.loss: {term.loss}", z, y), None

    def _numbers(self, where: str, z: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """A number for each number of the labels."""
        y = self._without_column(z, y)
        if len(z.shape) == len(y.shape) + 1 and z.shape[-1] == 1:
            z = self._ops.reshape(z, _shape(y))
        if tuple(z.shape)[1:] != tuple(y.shape)[1:]:
            what = f"the model gives outputs of shape {tuple(z.shape)} for labels of shape {tuple(y.shape)}"
            raise refused(what, where, "a model for it gives a number for each number of the labels")
        return z, self._ops.cast(y, self._ops.dtype(z))

    def _without_column(self, z: Tensor, y: Tensor) -> Tensor:
        """Labels (n, 1) are (n,) for outputs (n,) and (n, C)."""
        column = len(y.shape) == 2 and y.shape[-1] == 1 and tuple(z.shape)[1:] != (1,)
        return self._ops.reshape(y, (-1,)) if column else y

    def _beside(self, term: Term, z: Any, y: Any) -> tuple[Any, Any]:
        """What built-in metrics look at where the loss is the user's own, which may take anything."""
        for kind in [name for name in term.metrics if ":" not in name]:
            where = f"task.metrics: {kind}"
            if isinstance(z, Mapping) or isinstance(y, Mapping):
                fix = "give a loss for each output, or a metric of your own"
                raise refused("the loss takes several outputs or labels together", where, fix)
            y = self._without_column(z, y)
            classes = z.shape[-1] > 1 and len(z.shape) == len(y.shape) + 1
            term.check_classes(z.shape[-1] if classes else 0)
            if kind in ("cross_entropy", "top5") and not classes:
                raise unfit(tuple(z.shape), tuple(y.shape), 2)
            if kind not in OF_CLASSES or not classes:
                z, y = self._numbers(where, z, y)
        return z, y

    def _sum(self, values: Tensor, own: Tensor | None, weights: Tensor, foreign: bool) -> tuple[Tensor, Tensor | None]:
        """(S, W); W None: the number of samples. What does not count may be no number in a ``foreign`` function."""
        ops = self._ops
        values = ops.cast(values, ops.dtype(weights)) if foreign else values
        if own is None:
            values = values if len(values.shape) == 1 else ops.row_means(values)
            return ops.dot(ops.where(weights > 0, values, 0.0) if foreign else values, weights), None
        w = self._flat_weights(own, weights)
        values = ops.reshape(values, (-1,))
        return ops.dot(ops.where(w != 0, values, 0.0), w), ops.add_rows(w)

    def _flat_weights(self, own: Tensor, weights: Tensor) -> Tensor:
        each = self._ops.reshape(weights, (-1, *[1] * (len(own.shape) - 1)))
        return self._ops.reshape(self._ops.cast(own, self._ops.dtype(weights)) * each, (-1,))

    def _flat(self, z: Tensor, y: Tensor, own: Tensor | None, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Places one after the other: outputs (places,) or (places, C), labels and weights (places,)."""
        ops, kind = self._ops, self._ops.dtype(weights)
        w = self._flat_weights(ops.cast(y == y, kind) if own is None else own, weights)
        last = (int(z.shape[-1]),) if len(z.shape) > len(y.shape) else ()
        return ops.reshape(z, (-1, *last)), ops.cast(ops.reshape(y, (-1,)), kind), w

    def counts(self, labels: Mapping[str, Tensor], weights: Tensor) -> Tensor:
        """(losses,) float64: the W of each loss. Weights follow from labels alone: no model is asked."""
        ops, found = self._ops, []
        for term in self.terms:
            own, y = None, term.part(labels)
            if term.masked:
                own = ops.cast(y != term.ignore, ops.dtype(weights))
            elif term.counted:
                zeros = term.part(_map(partial(self._zeros, int(weights.shape[0])), self._shapes))
                own = self._own(term.function, "task.loss", term.loss, zeros, y, weights, True)[1]
            found.append(ops.add_rows(weights if own is None else self._flat_weights(own, weights)))
        return ops.cast(ops.stack(found), "float64")

    def check(self, sums: np.ndarray, counts: np.ndarray) -> None:
        """``counts``: the W that labels told before the steps of these sums, by which the gradients were divided."""
        for term, (_, at), count in zip(self.terms, self.entries, counts.tolist(), strict=True):
            if not math.isclose(sums[at], count, rel_tol=1e-3):
                what = f"the weights add up to {sums[at]:g}, and for outputs of zeros to {count:g}"
                fix = "let weights follow from the labels alone; what outputs change belongs into the values"
                raise ConfigError(what, where=f"task.loss: {term.loss}", fix=fix, common=True)

    def _zeros(self, rows: int, like: tuple[tuple[int, ...], str]) -> Tensor:
        return self._ops.cast(self._ops.from_numpy(np.zeros((rows, *like[0]))), like[1])

    def results(self, sums: np.ndarray) -> dict[str, float]:
        """{"loss", each loss of several, each metric, "samples"} of sums over all ranks; nan where no sample counts."""
        samples, found = float(sums[self.samples]), {}
        for term, (value, count) in zip(self.terms, self.entries, strict=True):
            found[f"{term.output}_loss"] = float(sums[value]) / (float(sums[count]) or 1.0)
        values: dict[str, float] = {"loss": sum(found.values()), **(found if len(found) > 1 else {})}
        if not samples:
            return dict.fromkeys([*values, *(metric.title for _, metric in self._metrics)], math.nan) | {"samples": 0}
        for _, metric in self._metrics:
            own = sums[metric.begin : metric.begin + metric.length]
            if metric.result:
                values[metric.title] = _result(metric.result, metric.kind, own)
                continue
            number = float(own[0]) / ((float(own[1]) if metric.length == 2 else samples) or 1.0)
            values[metric.title] = math.sqrt(number) if metric.kind == "rmse" else number
        return values | {"samples": round(samples)}


def _shapes(x: Any) -> str:
    """(32, 10), or {price: (32, 1), sold: (32, 2)}."""
    if isinstance(x, Mapping):
        return f"{{{', '.join(f'{name}: {_shapes(value)}' for name, value in x.items())}}}"
    return str(tuple(getattr(x, "shape", ())))


def _called(function: Callable[..., Any], where: str, z: Any, y: Any) -> Given:
    try:
        given = function(z, y)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        fix = f"it is called with outputs {_shapes(z)} and labels {_shapes(y)}"
        raise refused(f"the function failed: {reason}", where, fix) from error
    values, own = given if isinstance(given, tuple | list) and len(given) == 2 else (given, None)
    return values, own


def _own_metric(kind: str) -> Any:
    """A function, or an object that can be called; with a ``result`` its values are sums of several numbers."""
    found = own_function(kind, f"task.metrics: {kind}")
    return found() if isinstance(found, type) else found


def _result(result: Callable[[np.ndarray], float], kind: str, sums: np.ndarray) -> float:
    """What a metric makes of its sums: a number, nan where there is none."""
    try:
        with np.errstate(divide="ignore", invalid="ignore"):
            return float(result(sums))
    except Exception as error:
        reason, where = f"{type(error).__name__}: {error}".splitlines()[0], f"task.metrics: {kind}"
        fix = f"it is called with the {len(sums)} sums and gives a number, math.nan where there is none"
        raise ConfigError(f"its result failed: {reason}", where=where, fix=fix, common=True) from error


def _map(function: Callable[[Any], Any], outputs: Any) -> Any:
    return {name: function(x) for name, x in outputs.items()} if isinstance(outputs, Mapping) else function(outputs)


def fits(logits: Sequence[int | None], labels: Sequence[int | None], num_classes: int) -> bool:
    """Whether logits (n, ..., at least ``num_classes``) belong to labels (n, ...)."""
    pairs = zip(logits[:-1], labels, strict=False)
    same = len(logits) == len(labels) + 1 and all(a is None or b is None or a == b for a, b in pairs)
    return same and (logits[-1] is None or logits[-1] >= num_classes)


def unfit(logits: Sequence[int | None], labels: Sequence[int | None], num_classes: int) -> ConfigError:
    """Logits (n, ..., classes) belong to labels (n, ...): these do not."""
    wanted = ", ".join(str(size) for size in (*labels, "num_classes"))
    return refused(
        f"the model gives logits of shape {tuple(logits)} for labels of shape {tuple(labels)} in {num_classes} classes",
        "model.name, data.name",
        f"choose a model that gives ({wanted}), a number for each class before any softmax or sigmoid",
    )

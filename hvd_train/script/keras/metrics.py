"""Correct metrics that Keras averages over batches, where a batch is only a rank's part of a global one.

These are the losses of several outputs, functions and losses that return one number for a batch, classes that count
batches, and means in a user's ``train_step``. Keras gives every batch equal weight, whatever its size. Law: each rank's
value is weighted by its share of the global batch's samples, so that the sums over ranks are those of one process.
Functions with a value for each sample, and classes that add up over samples, need no correction.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection
from typing import Any

import keras
import numpy as np

from hvd_train.protocol import Communicator, allgather_json
from hvd_train.script.keras.eval_window import tensor_of
from hvd_train.script.keras.gradients import Reduction
from hvd_train.script.keras.losses import (
    KINDS,
    TOGETHER,
    agreed,
    kind_of_parts,
    kind_over_samples,
    of_samples,
    whole_and_parts,
)
from hvd_train.script.keras.model_state import to_numpy
from hvd_train.script.keras.patches import Patches

FIX = "return one value per sample to get their mean"
SUMS_FIX = "keep sums and counts of samples in its variables, and divide in result()"


class Replaced:
    """Stands in for a metric's ``update_state``, for one model.

    A metric that several models share has one for each. The last one gets all calls, and hands those in a step of
    another model on to that model's.
    """

    def __init__(self, metric: Any, reduction: Reduction) -> None:
        self.metric, self._reduction = metric, reduction
        before = metric.update_state
        self._before = before if isinstance(before, Replaced) else None
        self._update: Any = self._before._update if self._before else before
        self.probing = False

    def _of_another(self) -> Any:
        """Return the stand-in of the model whose step runs, if that is another model than this one's."""
        other = self._before
        while other and not self.probing and not self._reduction.in_step():
            if other._reduction.in_step():
                return other
            other = other._before
        return None


class BatchMean(Replaced):
    """Replaces ``update_state`` of a function that may return one number for a batch. ``kind``: see ``probe``."""

    def __init__(self, metric: Any, reduction: Reduction) -> None:
        super().__init__(metric, reduction)
        self.kind = "mean"
        self.reduces = False  # whether it gives other values than one for each sample, as found by ``probe``

    def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        if other := self._of_another():
            other(y_true, y_pred, sample_weight)
            return
        metric, function = self.metric, self.metric._fn
        values = function(y_true, y_pred, **metric._fn_kwargs)
        if not hasattr(values, "shape"):  # a function that runs eagerly may give Python's number
            values = keras.ops.convert_to_tensor(values)
        weighted = sample_weight is not None or getattr(y_pred, "_keras_mask", None) is not None
        if self.probing:
            self.reduces = not of_samples(values, y_true)
            mean = keras.ops.mean  # also if it seems to return one value a sample
            self.kind = kind_over_samples(lambda *batch: mean(function(*batch, **metric._fn_kwargs)), y_true, y_pred)
        if (tuple(values.shape) and not self.reduces) or weighted:
            metric._fn = lambda *args, **kwargs: values  # not computed twice
            try:
                self._update(y_true, y_pred, sample_weight)
            finally:
                metric._fn = function
        else:
            _add(metric, keras.ops.mean(values), self._reduction)


class BatchSums(Replaced):
    """Replaces ``update_state`` of a user's class, some of whose variables may add up means over batches.

    ``kinds``: how each variable's growth by a batch combines samples, as found by ``probe``; empty before.
    """

    def __init__(self, metric: Any, reduction: Reduction) -> None:
        super().__init__(metric, reduction)
        self.kinds: list[str] = []

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        if other := self._of_another():
            other(*args, **kwargs)
            return
        if self.probing:
            self.kinds = self._kinds(*args, **kwargs)
        counted = self.counted()
        before = [keras.ops.copy(tensor_of(v)) for v in counted]
        self._update(*args, **kwargs)
        if counted and not self.probing:
            self._weigh(counted, before)

    def counted(self) -> list[Any]:
        """Return the variables that grow by one mean, or one number, a batch."""
        floats = all("float" in v.dtype for v, kind in self._pairs() if kind == "mean")
        # What is no mean over samples counts with the batches, if the metric counts them.
        kinds = ("mean", "neither", "unknown") if "mean" in self.kinds and floats else ()
        return [v for v, kind in self._pairs() if kind in kinds and "float" in v.dtype]

    def wrong(self) -> bool:
        """Return whether ``result`` is not that of one process."""
        means = [v for v, kind in self._pairs() if kind == "mean"]
        return "neither" in self.kinds or len(means) > len(self.counted())

    def _pairs(self) -> list[tuple[Any, str]]:
        return list(zip(self.metric.variables, self.kinds, strict=True)) if self.kinds else []

    def _weigh(self, counted: list[Any], before: list[Any]) -> None:
        """Replace what the batch has added to the variables by this rank's part of the global batch's mean."""
        grown = [
            keras.ops.cast(tensor_of(v), "float64") - keras.ops.cast(x, "float64")
            for v, x in zip(counted, before, strict=True)
        ]
        for v, x in zip(counted, before, strict=True):
            v.assign(x)

        def add(total: Any, count: Any) -> None:
            start = 0
            for v in counted:
                size = int(np.prod(v.shape))
                v.assign_add(keras.ops.cast(keras.ops.reshape(total[start : start + size], v.shape), v.dtype))
                start += size

        flat = keras.ops.concatenate([keras.ops.reshape(x, (-1,)) for x in grown])
        self._reduction.batch_mean(keras.ops.stop_gradient(flat), add)

    def _kinds(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> list[str]:
        metric = self.metric

        def grown(*batch: Any) -> list[np.ndarray]:
            metric.reset_state()
            start = [to_numpy(v).astype(np.float64) for v in metric.variables]
            self._update(*batch[:2], sample_weight=batch[2])
            return [to_numpy(v).astype(np.float64) - x for v, x in zip(metric.variables, start, strict=True)]

        try:
            (whole, first, last), share = whole_and_parts(grown, y_true, y_pred, sample_weight)
        except Exception:  # it may need pairs of samples or a fixed batch size
            return ["neither"] * len(metric.variables)
        dtypes = [str(x.dtype) for x in keras.tree.flatten(y_pred)] + [str(v.dtype) for v in metric.variables]
        bound = 1e-2 if any("float16" in x for x in dtypes) else 1e-4
        return [kind_of_parts(*parts, share, bound) for parts in zip(whole, first, last, strict=True)]


def share_means(model: Any, reduction: Reduction, patches: Patches, main: bool) -> None:
    """Patch the metrics of ``model`` that count batches, as soon as Keras has built them.

    ``main``: this is rank 0, which warns of metrics that cannot be corrected.
    """
    losses, metrics = model._compile_loss, model._compile_metrics

    def put_losses() -> None:
        for tracker in losses.metrics:
            patches.put(tracker, "update_state", _tracking(tracker, reduction))

    def put_metrics() -> None:
        for metric in {id(x): x for x in metrics.metrics}.values():
            if _is_function(model, metric):
                patches.put(metric, "update_state", BatchMean(metric, reduction))
            elif _is_own(metric):
                patches.put(metric, "update_state", BatchSums(metric, reduction))
            elif main and getattr(metric, "_fn_kwargs", {}).get("axis") == 0:
                # Keras' correlations over the samples of a batch.
                what = f"the metric {metric.name} with axis=0 compares the samples of a batch"
                warnings.warn(f"{what}: each rank computes it for its own part of a batch", stacklevel=2)

    for tracker in _means(model):
        patches.put(tracker, "update_state", _of_batches(tracker, reduction))
    for owner, put in ((losses, put_losses), (metrics, put_metrics)):
        if owner is None:
            continue
        if owner.built:
            put()
        else:
            patches.put(owner, "build", _then(owner.build, put))


def counts_batches(model: Any) -> bool:
    """Return whether a metric may count batches, so that evaluation must use global batches."""
    losses = model._compile_loss
    if losses is None or losses.built:
        several = losses is not None and bool(losses.metrics)
    else:
        several = len(getattr(model, "outputs", None) or (None, None)) > 1  # None: unknown before the first batch
    user_step = not str(type(model).test_step.__module__).startswith("keras.")
    own = any(each.counted() for each in _put(model, BatchSums))
    # ``metrics`` of the user's class may leave Keras' own mean of the loss out.
    means = any(x is not getattr(model, "_loss_tracker", None) for x in _means(model))
    return several or user_step or means or _has_functions(model) or own


def _means(model: Any) -> list[Any]:
    """Return the mean of the total loss, and the user's ``Mean`` metrics."""
    outputs = model._compile_loss.metrics if model._compile_loss is not None else []
    mean = keras.metrics.Mean.update_state  # also of the user's subclasses that keep it
    return [x for x in model.metrics if type(x).update_state is mean and not any(x is y for y in outputs)]


def needs_probe(model: Any) -> bool:
    """Return whether ``compile`` got functions or classes of the user as metrics."""
    return _has_functions(model) or any(map(_is_own, _given(model)))


def _given(model: Any) -> list[Any]:
    names = ("_user_metrics", "_user_weighted_metrics")
    return keras.tree.flatten([getattr(model._compile_metrics, name, None) for name in names])


def _is_own(metric: Any) -> bool:
    return isinstance(metric, keras.metrics.Metric) and not type(metric).__module__.startswith("keras.")


def _has_functions(model: Any) -> bool:
    """Return whether ``compile`` got a metric that is a function, and may return one number for a whole batch."""
    flat = _may_be_flat(model)
    return any(
        _is_function(model, x)
        if isinstance(x, keras.metrics.Metric)
        else (isinstance(x, str) and flat) or (callable(x) and (flat or _may_reduce(x)))
        for x in _given(model)
    )


def _may_reduce(function: Any) -> bool:
    """Return whether it is the user's, or one of Keras that gives a batch one number, as losses do."""
    keras_own = str(getattr(function, "__module__", "")).startswith("keras.")
    return not keras_own or isinstance(function, keras.losses.Loss) or function in TOGETHER


def _put(model: Any, kind: Any) -> list[Any]:
    """Return what ``share_means`` has put into the metrics of ``compile``, of this class."""
    metrics = {id(x): x for x in getattr(model._compile_metrics, "metrics", ())}.values()
    return [x for x in (vars(m).get("update_state") for m in metrics) if isinstance(x, kind)]


def probe(model: Any, communicator: Communicator, *batch: Any) -> None:
    """Warn on rank 0 of functions whose mean over a batch is no mean over its samples, and of classes without sums.

    On all ranks together. ``batch``: labels, predictions and weights of a few samples.
    """
    owner = model._compile_metrics
    if owner is None or not needs_probe(model):
        return
    owner.update_state(*batch)  # builds it, if it was not built before
    means, classes = _put(model, BatchMean), _put(model, BatchSums)
    for each in classes:
        each.kinds = []  # of an earlier probe
    owner.reset_state()
    names = _without_sums(owner, *batch)
    for each in (*means, *classes):
        each.probing = True
    try:
        owner.update_state(*batch)
    finally:
        for each in (*means, *classes):
            each.probing = False
        # The probe has counted its samples: reset, because they are trained on later.
        owner.reset_state()
    everyone = allgather_json(communicator, [[x.kind for x in means], names, [x.kinds for x in classes]])
    without_sums = {name for _, names, _ in everyone for name in names}
    for each, kinds in zip(means, zip(*(kinds for kinds, _, _ in everyone), strict=True), strict=True):
        each.kind = max(kinds, key=KINDS.index)
    for each, ranks in zip(classes, zip(*(kinds for _, _, kinds in everyone), strict=True), strict=True):
        known = each.metric.name in without_sums
        each.kinds = [] if known else [agreed(kinds) for kinds in zip(*ranks, strict=True)]
    if communicator.rank == 0:
        _warn(without_sums, means, classes)
        for metric in owner.metrics:
            if _is_own(metric) and not metric.variables:
                what = f"the metric {metric.name} keeps its state outside of Keras' variables"
                warnings.warn(f"{what}: each rank has the value of its own samples ({SUMS_FIX})", stacklevel=2)


def _warn(without_sums: Collection[str], means: list[BatchMean], classes: list[BatchSums]) -> None:
    for name in sorted(without_sums):
        what = f"the variables of the metric {name} are no sums over samples, so its value over all ranks is wrong"
        warnings.warn(f"{what} (keep sums and counts in them, and divide in result())", stacklevel=3)
    for each in means:
        if each.kind == "unknown":
            what = (
                f"the metric {each.metric.name} is 0 or not a number for the first samples: it is taken as their mean"
            )
            warnings.warn(f"{what}, and would be wrong if it is a sum ({FIX})", stacklevel=3)
    for own in classes:
        if any(kind == "unknown" for v, kind in own._pairs() if any(v is x for x in own.counted())):
            what = (
                f"a variable of the metric {own.metric.name} is 0 for the first samples: it is taken as a sum of means"
            )
            warnings.warn(f"{what}, and would be wrong if it counts ({SUMS_FIX})", stacklevel=3)
    wrong = [(x.metric.name, FIX) for x in means if x.kind in ("sum", "neither")]
    for name, fix in wrong + [(x.metric.name, SUMS_FIX) for x in classes if x.wrong()]:
        what = f"the metric {name} is not a mean over the samples of a batch"
        warnings.warn(f"{what}: each rank computes it for its own part of a batch ({fix})", stacklevel=3)


def _without_sums(owner: Any, *batch: Any) -> list[str]:
    """Return the names of the user's metrics that a batch, given twice, does not change twice as much as once."""
    own, states = [metric for metric in owner.metrics if _is_own(metric)], []
    for _ in range(2 if own else 0):
        owner.update_state(*batch)
        states.append([[to_numpy(v).astype(np.float64) for v in metric.variables] for metric in own])
    owner.reset_state()

    def doubled(once: list[np.ndarray], twice: list[np.ndarray]) -> bool:
        return all(np.allclose(b, 2 * a, 1e-4, equal_nan=True) for a, b in zip(once, twice, strict=True))

    return [metric.name for metric, *both in zip(own, *states, strict=True) if not doubled(*both)]


def _is_function(model: Any, metric: Any) -> bool:
    if type(metric) is keras.metrics.MeanMetricWrapper and _may_reduce(metric._fn):
        return True
    return isinstance(metric, keras.metrics.MeanMetricWrapper) and not _is_own(metric) and _may_be_flat(model)


def _may_be_flat(model: Any) -> bool:
    """Return whether an output may have the shape (samples,).

    Keras' own functions take the mean over the last axis, so they give one number for such a batch. The outputs of a
    subclassed model are not known, so it may.
    """
    shapes = [getattr(x, "shape", ()) for x in keras.tree.flatten(getattr(model, "outputs", None) or [None])]
    return any(len(shape) < 2 for shape in shapes)


def _tracking(tracker: Any, reduction: Reduction) -> Any:
    """Make ``update_state`` for Keras' mean of one output's loss."""
    update = tracker.update_state

    def updated(value: Any, sample_weight: Any = None) -> None:
        # Eagerly Keras counts samples, which needs no correction. In a graph it counts samples or batches, depending on
        # whether this rank's batches have one length.
        if sample_weight is None or not reduction.eager():
            _add(tracker, value, reduction)
        else:
            update(value, sample_weight=sample_weight)

    return updated


def _of_batches(tracker: Any, reduction: Reduction) -> Any:
    """Make ``update_state`` for a mean that counts a batch if it gets one number without a weight."""
    update = tracker.update_state

    def updated(values: Any, sample_weight: Any = None) -> None:
        if sample_weight is None and not tuple(keras.ops.shape(values)):
            _add(tracker, values, reduction)
        else:
            update(values, sample_weight=sample_weight)

    return updated


def _add(metric: Any, value: Any, reduction: Reduction) -> None:
    """Add ``value``, the mean over a batch, to ``metric``."""

    def add(total: Any, count: Any) -> None:
        metric.total.assign_add(keras.ops.cast(total, metric.dtype))
        metric.count.assign_add(keras.ops.cast(count, metric.dtype))

    value = keras.ops.stop_gradient(keras.ops.convert_to_tensor(value))
    # In 64 bits: shares are added and corrected later, and must cancel.
    reduction.batch_mean(keras.ops.cast(value, "float64"), add)


def _then(build: Any, put: Any) -> Any:
    def built(*args: Any) -> None:
        build(*args)
        put()

    return built

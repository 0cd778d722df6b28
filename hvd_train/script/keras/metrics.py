"""Correct metrics that Keras averages over batches, where a batch is only a rank's part of a global one.

These are the losses of several outputs, functions that return one number for a batch, and means in a user's
``train_step``. Keras gives every batch equal weight, whatever its size. Law: each rank's value is weighted by its share
of the global batch's samples, so that the sums over ranks are those of one process. Functions with a value for each
sample need no correction.
"""

from __future__ import annotations

import warnings
from typing import Any

import keras
import numpy as np

from hvd_train.protocol import Communicator, allgather_json
from hvd_train.script.keras.gradients import Reduction
from hvd_train.script.keras.losses import KINDS, kind_over_samples
from hvd_train.script.keras.model_state import to_numpy
from hvd_train.script.keras.patches import Patches

FIX = "return one value per sample to get their mean"


class BatchMean:
    """Replaces ``update_state`` of a function that may return one number for a batch. ``kind``: see ``probe``."""

    def __init__(self, metric: Any, reduction: Reduction) -> None:
        self.metric, self._reduction = metric, reduction
        self._update = metric.update_state
        self.kind, self.probing = "mean", False

    def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        metric, function = self.metric, self.metric._fn
        values = function(y_true, y_pred, **metric._fn_kwargs)
        weighted = sample_weight is not None or getattr(y_pred, "_keras_mask", None) is not None
        if self.probing:
            mean = keras.ops.mean  # also if it seems to return one value a sample
            self.kind = kind_over_samples(lambda *batch: mean(function(*batch, **metric._fn_kwargs)), y_true, y_pred)
        if tuple(values.shape) or weighted:
            metric._fn = lambda *args, **kwargs: values  # not computed twice
            try:
                self._update(y_true, y_pred, sample_weight)
            finally:
                metric._fn = function
        else:
            _add(metric, values, self._reduction)


def share_means(model: Any, reduction: Reduction, patches: Patches, main: bool) -> None:
    """Patch the metrics of ``model`` that count batches, as soon as Keras has built them.

    ``main``: this is rank 0, which warns of metrics that cannot be corrected.
    """
    losses, metrics = model._compile_loss, model._compile_metrics

    def put_losses() -> None:
        for tracker in losses.metrics:
            patches.put(tracker, "update_state", _tracking(tracker, reduction))

    def put_metrics() -> None:
        for metric in metrics.metrics:
            if _is_function(metric):
                patches.put(metric, "update_state", BatchMean(metric, reduction))
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
    return several or user_step or len(_means(model)) > 1 or bool(functions(model))


def _means(model: Any) -> list[Any]:
    """Return the mean of the total loss, and the user's ``Mean`` metrics."""
    outputs = model._compile_loss.metrics if model._compile_loss is not None else []
    mean = keras.metrics.Mean.update_state  # also of the user's subclasses that keep it
    return [x for x in model.metrics if type(x).update_state is mean and not any(x is y for y in outputs)]


def needs_probe(model: Any) -> bool:
    """Return whether ``compile`` got functions or classes of the user as metrics."""
    return bool(functions(model)) or any(map(_is_own, _given(model)))


def _given(model: Any) -> list[Any]:
    names = ("_user_metrics", "_user_weighted_metrics")
    return keras.tree.flatten([getattr(model._compile_metrics, name, None) for name in names])


def _is_own(metric: Any) -> bool:
    return isinstance(metric, keras.metrics.Metric) and not type(metric).__module__.startswith("keras.")


def functions(model: Any) -> list[Any]:
    """Return the user's functions among the metrics of ``compile``."""
    metrics = _given(model)
    callables = [x for x in metrics if callable(x) and not isinstance(x, keras.metrics.Metric)]
    callables += [x._fn for x in metrics if _is_function(x)]
    return [x for x in callables if not str(getattr(x, "__module__", "")).startswith("keras.")]


def probe(model: Any, communicator: Communicator, *batch: Any) -> None:
    """Warn on rank 0 of functions whose mean over a batch is no mean over its samples, and of classes without sums.

    On all ranks together. ``batch``: labels, predictions and weights of a few samples.
    """
    owner = model._compile_metrics
    if owner is None or not needs_probe(model):
        return
    owner.update_state(*batch)  # builds it, if it was not built before
    means = [x for x in (vars(m).get("update_state") for m in owner.metrics) if isinstance(x, BatchMean)]
    for each in means:
        each.probing = True
    try:
        owner.update_state(*batch)
    finally:
        for each in means:
            each.probing = False
        # The probe has counted its samples: reset, because they are trained on later.
        owner.reset_state()
    everyone = allgather_json(communicator, [[x.kind for x in means], _without_sums(owner, *batch)])
    for name in sorted({name for _, names in everyone for name in names} if communicator.rank == 0 else ()):
        what = f"the variables of the metric {name} are no sums over samples, so its value over all ranks is wrong"
        warnings.warn(f"{what} (keep sums and counts in them, and divide in result())", stacklevel=2)
    for each, kinds in zip(means, zip(*(kinds for kinds, _ in everyone), strict=True), strict=True):
        each.kind = max(kinds, key=KINDS.index)
        if each.kind in ("sum", "neither") and communicator.rank == 0:
            what = f"the metric {each.metric.name} is not a mean over the samples of a batch"
            warnings.warn(f"{what}: each rank computes it for its own part of a batch ({FIX})", stacklevel=2)


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


def _is_function(metric: Any) -> bool:
    wrapped = type(metric) is keras.metrics.MeanMetricWrapper
    return wrapped and not str(getattr(metric._fn, "__module__", "")).startswith("keras.")


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

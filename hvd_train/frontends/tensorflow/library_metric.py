"""Keras' metric objects, computed from sums over samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvd_train.task.user_functions import for_each, no_comparison


class KerasMetric:
    """A ``keras.metrics.Metric`` whose variables are sums.

    ``sums``: the concatenated variables of one batch. ``result`` assigns the sums of all batches and ranks to them and
    calls the object's ``result``, which computes in their dtype.
    """

    def __init__(self, metric: keras.metrics.Metric) -> None:
        if type(metric) in (keras.metrics.Mean, keras.metrics.Sum):
            raise no_comparison(type(metric).__name__)
        self._metric = metric

    def sums(self, outputs: Any, labels: Any, weights: tf.Tensor) -> tf.Tensor:
        metric, counts = self._metric, weights > 0

        def update() -> tf.Tensor:
            # Some of Keras' functions, such as top-k, need the metric's dtype. Those of intersection over union count
            # in integers, which outputs are not.
            kind = tf.as_dtype(keras.backend.standardize_dtype(metric.dtype))
            of_type = for_each(lambda x: tf.cast(x, kind) if kind.is_floating else x, _rows(outputs, counts))
            metric.update_state(_rows(labels, counts), of_type)
            return tf.constant(0)

        metric.reset_state()
        # Some metrics reject an empty batch, which a rank has if its part is all padding.
        tf.cond(tf.reduce_any(counts), update, lambda: tf.constant(0))
        return tf.concat([tf.reshape(tf.cast(v.value, tf.float64), (-1,)) for v in metric.variables], 0)

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        return [tuple(variable.shape) for variable in self._metric.variables]

    def result(self, states: Sequence[np.ndarray]) -> float:
        for variable, total in zip(self._metric.variables, states, strict=True):
            variable.assign(total)
        return float(self._metric.result())


def library_metric(metric: Any, logits: bool) -> KerasMetric | None:
    """Wrap the metric; None if it is not one of Keras. The user sets whether it takes ``logits``."""
    return KerasMetric(metric) if isinstance(metric, keras.metrics.Metric) else None


def _rows(x: Any, counts: tf.Tensor) -> Any:
    return for_each(lambda one: tf.boolean_mask(one, counts), x)

"""Precision, recall, F1, intersection over union and balanced accuracy, from counts per class or label.

The *predicted* class is the largest output, or class 1 if there is a single output and it is above 0. For a single
output, labels above 0.5 are class 1 (``says_yes``). A prediction is *right* if it equals the label.
"""

from __future__ import annotations

import math
from typing import Literal

import numpy as np

from hvd_train.errors import ConfigError
from hvd_train.metrics.metric import LabelForm, Metric, Predictions, says_yes
from hvd_train.protocol import Tensor


class Counts(Metric):
    """A metric computed from three counts for each of K classes or labels: right, predicted and actual.

    ``rate``: precision is right / predicted, recall is right / actual, f1 is their harmonic mean (van Rijsbergen 1979;
    for masks Dice 1945), iou is right / (predicted or actual) (Jaccard 1912).
    ``average``: how the K rates are averaged, as in scikit-learn; "": class 1 alone for two classes, else macro.
    """

    binary = "threshold"

    def __init__(
        self, form: LabelForm, masked: bool = False, *, rate: Literal["f1", "precision", "recall", "iou"], average: str
    ) -> None:
        super().__init__(form, masked)
        self.rate = rate
        self.average = average or ("class 1" if form == LabelForm("classes", 2) else "macro")
        self.length = 3 * form.size

    def sums(self, predictions: Predictions) -> Tensor:
        return self._class_sums(predictions) if self.form.kind == "classes" else self._label_sums(predictions)

    def _class_sums(self, predictions: Predictions) -> Tensor:
        ops, classes = predictions.ops, self.form.size
        z, y, w = predictions.flat()  # (positions,) or (positions, C); (positions,); (positions,)
        # A float32 count stops at 2^24, which a batch of large masks reaches.
        w = ops.cast(w, "float64")
        by_class = len(z.shape) > 1
        actual = ops.cast(y if by_class else says_yes(y), "int64")
        predicted = ops.argmax(z) if by_class else ops.cast(z > 0, "int64")
        right = w * ops.cast(predicted == actual, ops.dtype(w))

        def add(of: Tensor, values: Tensor) -> Tensor:
            # A model may have more outputs than there are classes, for example a padded vocabulary. ``result`` reports
            # labels that are not classes.
            known = (of >= 0) & (of < classes)
            # The order of additions may vary: ranks exchange the sums, so all get the same result.
            return ops.scatter(classes, ops.where(known, of, 0), ops.where(known, values, 0.0), same_bits=False)

        return ops.concat([add(actual, right), add(predicted, w), add(actual, w)])

    def _label_sums(self, predictions: Predictions) -> Tensor:
        ops = predictions.ops
        z, y, w = (ops.reshape(x, (-1, self.form.size)) for x in predictions.flat())  # (n, K) each
        # (n, K): 1 if the output or the label is yes.
        predicted, actual = ops.cast(z > 0, ops.dtype(w)), ops.cast(says_yes(y), ops.dtype(w))
        return ops.concat([ops.sum(w * x, 0) for x in (predicted * actual, predicted, actual)])

    def result(self, sums: np.ndarray) -> float:
        counts = self._counts(sums)
        _, predicted, actual = counts
        if self.form.kind == "classes" and not counts.any():  # no labels
            return math.nan
        if self.average == "micro":
            return float(self._rates(counts.sum(1, keepdims=True))[0])
        rates = self._rates(counts)
        if self.average == "class 1":
            return float(rates[1])
        if self.average == "weighted":
            return float(rates @ actual / actual.sum()) if actual.any() else 0.0
        # As in scikit-learn: classes that never occur nor are predicted are left out, but no label is.
        return float(rates[predicted + actual > 0].mean() if self.form.kind == "classes" else rates.mean())

    def _counts(self, sums: np.ndarray) -> np.ndarray:
        """Reshape the sums to counts (3, K). Raises ConfigError if some labels are not classes."""
        counts = sums.reshape(3, -1)
        _, predicted, actual = counts.sum(1).tolist()
        if self.form.kind == "classes" and predicted > actual * (1 + 1e-9):
            what = (
                f"{predicted - actual:g} labels are none of the {self.form.size} classes that the model has outputs for"
            )
            fix = f"number the classes from 0 to {self.form.size - 1}, or give a metric of your own"
            raise ConfigError(what, where="task.metrics", fix=fix, common=True)
        return counts

    def _rates(self, counts: np.ndarray) -> np.ndarray:
        """Compute the rates (K,) from counts (3, K); 0 if the denominator is 0, as in scikit-learn."""
        right, predicted, actual = counts
        above, below = {
            "f1": (2 * right, predicted + actual),
            "precision": (right, predicted),
            "recall": (right, actual),
            "iou": (right, predicted + actual - right),
        }[self.rate]
        return np.divide(above, below, out=np.zeros_like(below, dtype=float), where=below > 0)


class BalancedAccuracy(Counts):
    """The mean recall over classes that occur in the labels (Brodersen et al. 2010)."""

    one_label_only = True

    def __init__(self, form: LabelForm, masked: bool = False) -> None:
        super().__init__(form, masked, rate="recall", average="macro")

    def result(self, sums: np.ndarray) -> float:
        counts = self._counts(sums)
        there = counts[2] > 0
        return float(self._rates(counts)[there].mean()) if there.any() else math.nan

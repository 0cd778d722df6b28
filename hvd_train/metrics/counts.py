"""Precision, recall, F1, intersection over union and balanced accuracy, from counts for each class or label.

A place is *predicted* as a class by its largest output, or as class 1 where its only output is above 0. Of labels for
one output those above a half are class 1 (``says_yes``). A class is *right* where it is predicted and the label is it.
"""

from __future__ import annotations

import math
from typing import Literal

import numpy as np

from hvd_train.errors import ConfigError
from hvd_train.metrics.metric import LabelForm, Metric, Predictions, says_yes
from hvd_train.protocol import Tensor


class Counts(Metric):
    """A rate of three counts for each of K classes or labels: right, predicted, and actual, which the labels say.

    ``rate``: precision is right / predicted, recall is right / actual, f1 is their harmonic mean (van Rijsbergen 1979;
    of masks it is Dice 1945), iou is right / (predicted or actual) (Jaccard 1912).
    ``average``: how the K rates become one number, as in scikit-learn; "": of two classes that of class 1, else macro.
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
        z, y, w = predictions.flat()  # (places,) or (places, C); (places,); (places,)
        # In 32 bits a count stands still at 2^24, which one batch of large masks has.
        w = ops.cast(w, "float64")
        by_class = len(z.shape) > 1
        actual = ops.cast(y if by_class else says_yes(y), "int64")
        predicted = ops.argmax(z) if by_class else ops.cast(z > 0, "int64")
        right = w * ops.cast(predicted == actual, ops.dtype(w))

        def add(of: Tensor, values: Tensor) -> Tensor:
            # A model may have more outputs than there are classes, as with a vocabulary that is rounded up. Labels that
            # are no class are found by ``result``.
            known = (of >= 0) & (of < classes)
            # All ranks are told one sum of theirs.
            return ops.scatter(classes, ops.where(known, of, 0), ops.where(known, values, 0.0), same_bits=False)

        return ops.concat([add(actual, right), add(predicted, w), add(actual, w)])

    def _label_sums(self, predictions: Predictions) -> Tensor:
        ops = predictions.ops
        z, y, w = (ops.reshape(x, (-1, self.form.size)) for x in predictions.flat())  # (n, K) each
        # (n, K), 1 where the output or the label says yes.
        predicted, actual = ops.cast(z > 0, ops.dtype(w)), ops.cast(says_yes(y), ops.dtype(w))
        return ops.concat([ops.sum(w * x, 0) for x in (predicted * actual, predicted, actual)])

    def result(self, sums: np.ndarray) -> float:
        counts = self._counts(sums)
        _, predicted, actual = counts
        if self.form.kind == "classes" and not counts.any():  # no place had a label
            return math.nan
        if self.average == "micro":
            return float(self._rates(counts.sum(1, keepdims=True))[0])
        rates = self._rates(counts)
        if self.average == "class 1":
            return float(rates[1])
        if self.average == "weighted":
            return float(rates @ actual / actual.sum()) if actual.any() else 0.0
        # As scikit-learn: a class that neither labels nor predictions hold is not averaged, but every label is.
        return float(rates[predicted + actual > 0].mean() if self.form.kind == "classes" else rates.mean())

    def _counts(self, sums: np.ndarray) -> np.ndarray:
        """Return the counts (3, K). Raises ConfigError for labels that are none of the classes."""
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
        """(3, K) -> (K,); 0 where the denominator is 0, as in scikit-learn."""
        right, predicted, actual = counts
        above, below = {
            "f1": (2 * right, predicted + actual),
            "precision": (right, predicted),
            "recall": (right, actual),
            "iou": (right, predicted + actual - right),
        }[self.rate]
        return np.divide(above, below, out=np.zeros_like(below, dtype=float), where=below > 0)


class BalancedAccuracy(Counts):
    """The mean of the recalls of the classes that labels hold (Brodersen et al. 2010)."""

    one_label_only = True

    def __init__(self, form: LabelForm, masked: bool = False) -> None:
        super().__init__(form, masked, rate="recall", average="macro")

    def result(self, sums: np.ndarray) -> float:
        counts = self._counts(sums)
        there = counts[2] > 0
        return float(self._rates(counts)[there].mean()) if there.any() else math.nan

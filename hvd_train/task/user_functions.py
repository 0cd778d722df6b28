"""Losses and metrics of the user: called, and held to their contract.

A function gets (outputs, labels) as the model and the data give them. It gives a value for each sample or place, or
(values, weights) of one shape. A mean is refused: a mean over parts of unequal size is not the mean of all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from operator import itemgetter
from typing import Any

import numpy as np

from hvd_train.config.user_code import user_function
from hvd_train.errors import ConfigError, named_reason
from hvd_train.metrics.metric import LabelForm, Mean, Metric, Predictions
from hvd_train.protocol import LibraryMetric, Ops, Tensor

MADE_UP = 5  # samples that differ


def for_each(function: Callable[[Any], Any], outputs: Any) -> Any:
    """Apply the function to each of several named tensors, or to the only one."""
    return {name: function(x) for name, x in outputs.items()} if isinstance(outputs, Mapping) else function(outputs)


class UserFunction:
    """A loss or metric of the user, ``package.module:function``; ``key``: the configuration's, for messages."""

    def __init__(self, key: str, name: str, function: Callable[..., Any] | None = None) -> None:
        self.where = f"{key}: {name}"
        self._function = function or user_function(name, self.where)
        self._labels_first = _is_of_keras(self._function)
        # After ``probe``: a line for the user, and whether the value of a sample depends on the others of its batch.
        self.remark, self.compares = "", False

    def checked_values(
        self, outputs: Any, labels: Any, weights: Tensor, weighted: bool | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Call the function and check what it gives: values (n, ...), and their weights of the same shape or None.

        ``weights``: (n,), of the samples. ``weighted``: whether it gave weights before; None: not known yet.
        """
        values, place_weights = self._call(outputs, labels)
        fix = "give a value for each sample or place (losses of PyTorch: reduction='none', of Keras: reduction=None)"
        fix += "; of class weights w give (values without weights, w[labels]): their mean divides by the sum of weights"
        if weighted is not None and weighted != (place_weights is not None):
            what = "the function gives weights for some batches and none for others"
            raise ConfigError(what, where=self.where, fix="give them always")
        for x in (values,) if place_weights is None else (values, place_weights):
            if not hasattr(x, "shape"):
                what = f"the function gives {type(x).__name__}, and no tensor"
                raise ConfigError(what, where=self.where, fix=fix)
            shape = tuple(x.shape)
            if not shape:
                what = "the function gives one number for a batch: a mean over parts of unequal size is no mean of all"
                raise ConfigError(what, where=self.where, fix=fix)
            # A size is None while a graph is traced.
            if None not in (shape[0], weights.shape[0]) and shape[0] != weights.shape[0]:
                what = f"the function gives {shape} for {weights.shape[0]} samples"
                raise ConfigError(what, where=self.where, fix=fix)
        if place_weights is not None and tuple(place_weights.shape) != tuple(values.shape):
            what = f"the function gives values {tuple(values.shape)} and weights {tuple(place_weights.shape)}"
            raise ConfigError(what, where=self.where, fix="give both the same shape")
        return values, place_weights

    def probe(self, outputs: Any, labels: Any, weights: Tensor, ops: Ops) -> bool:
        """Call the function for two samples and for one; return whether it gives weights.

        Outputs (n, 1) less labels (n,) are (n, n), each sample compared with all others: the two calls show it.
        """
        values, place_weights = self.checked_values(outputs, labels, weights)
        first, _ = self._call(for_each(lambda x: x[:1], outputs), for_each(lambda x: x[:1], labels))
        # Of one sample, a function that compares samples with one another gives another shape.
        alone = tuple(first.shape)
        if alone[1:] != tuple(values.shape)[1:]:
            shapes = " and ".join(str(for_each(lambda x: tuple(x.shape), x)) for x in (outputs, labels))
            what = f"the function gives {tuple(values.shape)} for 2 samples and {alone} for one, of outputs and labels"
            fix = "bring both to one shape: of outputs or labels (n, 1), outputs[:, 0] and labels[:, 0] are (n,)"
            raise ConfigError(f"{what} {shapes}", where=self.where, fix=fix)
        self.compares = self._compares(outputs, labels, ops)
        if self.compares:
            what = "the value of a sample depends on the others of its batch"
            self.remark = (
                f"{what}: each rank compares those of its part, so another number of ranks gives other numbers"
            )
        elif place_weights is None and self._weighs_classes(labels, ops):
            what = "its values have the weights of their classes, and their mean divides by the number of samples"
            self.remark = f"{what}, where PyTorch's own divides by the sum of weights (task.class_weights does so)"
        return place_weights is not None

    def _weighs_classes(self, labels: Any, ops: Ops) -> bool:
        """Return whether it is a loss of PyTorch with weights of classes, whose own mean divides by their sum."""
        weighs = self.ignored is not None and getattr(self._function, "weight", None) is not None
        return weighs and not isinstance(labels, Mapping) and ops.to_numpy(labels).dtype.kind in "iu"

    @property
    def ignored(self) -> int | None:
        """Return the label for which a loss of PyTorch or Keras gives 0, and which its own mean leaves out."""
        number = getattr(self._function, "ignore_index", getattr(self._function, "ignore_class", None))
        return number if isinstance(number, int) else None

    def _compares(self, outputs: Any, labels: Any, ops: Ops) -> bool:
        """Return whether the values of some samples are others than those of each alone; False if it cannot be tried.

        It cannot with labels that the function does not take, nor where it draws random numbers.
        """
        raw = varied(outputs, labels, ops, True)

        def values(rows: slice) -> np.ndarray:
            answer, _ = self._call(*(for_each(itemgetter(rows), x) for x in raw))
            # NumPy has no bfloat16. Of one sample some functions give a number.
            return np.atleast_1d(ops.to_numpy(ops.cast(answer, "float64")))

        try:
            together, again = values(slice(0, MADE_UP)), values(slice(0, MADE_UP))
            alone = [values(slice(k, k + 1)) for k in range(MADE_UP)]
        except ConfigError:
            return False
        random = not np.array_equal(together, again, equal_nan=True)
        # Of another shape: functions that are checked when they are called.
        if random or {x.shape for x in alone} != {(1, *together.shape[1:])} or len(together) != MADE_UP:
            return False
        # Rounding in a network within a loss depends on the number of samples, above all in 16 bits.
        return not np.allclose(together, np.concatenate(alone), rtol=1e-2, atol=1e-6, equal_nan=True)

    def _call(self, outputs: Any, labels: Any) -> tuple[Tensor, Tensor | None]:
        try:
            answer = self._function(labels, outputs) if self._labels_first else self._function(outputs, labels)
        except Exception as error:
            fix = f"it is called with outputs {_shapes(outputs)} and labels {_shapes(labels)}"
            raise ConfigError(f"the function failed: {named_reason(error)}", where=self.where, fix=fix) from error
        values, place_weights = answer if isinstance(answer, tuple | list) and len(answer) == 2 else (answer, None)
        return values, place_weights


class UserMean(Mean):
    """A metric of the user that is a mean of values. What has no label does not count, whatever it gives there."""

    by_user = True

    def __init__(self, function: UserFunction, form: LabelForm) -> None:
        super().__init__(form)
        self.function = function
        self._gives_weights, self._of_labels = False, False  # ``_of_labels``: a value for each label

    def values(self, predictions: Predictions) -> tuple[Tensor, Tensor | None]:
        values, weights = self.function.checked_values(*predictions.raw, predictions.weights, self._gives_weights)
        ops, present = predictions.ops, predictions.present
        if not self._of_labels or present is None:
            return values, weights
        return values, present if weights is None else ops.cast(weights, ops.dtype(present)) * present

    def probe(self, predictions: Predictions) -> None:
        """Learn from made-up samples whether the function gives weights, and whether it gives a value for each label.

        ``predictions`` say which labels are present where some are not.
        """
        self._gives_weights = self.function.probe(*predictions.raw, predictions.weights, predictions.ops)
        values, _ = self.values(predictions)
        present = predictions.present
        self._of_labels = present is not None and tuple(values.shape) == tuple(present.shape)
        self.masked = self._gives_weights or self._of_labels
        self.length = 2 if self.masked else 1


class UserLibraryMetric(Metric):
    """A metric object of TorchMetrics or Keras that the user names.

    ``at_places``: labels are classes at each place, or some samples have none. Then it is given a row for each label.
    """

    def __init__(self, name: str, sums: LibraryMetric, form: LabelForm, at_places: bool) -> None:
        super().__init__(form)
        self.where, self._sums, self.length, self._at_places = f"task.metrics: {name}", sums, 1, at_places

    def sums(self, predictions: Predictions) -> Tensor:
        (outputs, labels), weights = predictions.raw, predictions.weights
        if self._at_places:
            outputs, labels, weights = predictions.flat()  # (places, C), (places,), (places,)
            labels = predictions.ops.cast(labels, "int64")
        try:
            return self._sums.sums(outputs, labels, weights)
        except Exception as error:
            fix = f"it is given outputs {_shapes(outputs)} and labels {_shapes(labels)}"
            raise ConfigError(f"the metric failed: {named_reason(error)}", where=self.where, fix=fix) from error

    def result(self, sums: np.ndarray) -> float:
        if not sums.any():  # it was given no row, of which some metrics make a 0
            return math.nan
        shapes = self._sums.shapes
        parts = np.split(sums, np.cumsum([math.prod(shape) for shape in shapes])[:-1])
        try:
            return self._sums.result([x.reshape(shape) for x, shape in zip(parts, shapes, strict=True)])
        except Exception as error:
            fix = "it must give one number, for example a macro average"
            raise ConfigError(
                f"its result failed: {named_reason(error)}", where=self.where, fix=fix, common=True
            ) from error

    def probe(self, predictions: Predictions) -> None:
        """Learn the number of sums from made-up samples, and check that they are sums."""
        ops = predictions.ops
        raw = varied(*predictions.raw, ops, self.form.size > 1)
        weights = ops.cast(ops.from_numpy(np.ones(MADE_UP)), ops.dtype(predictions.weights))

        def sums_of(rows: slice) -> np.ndarray:
            z, y = (for_each(itemgetter(rows), x) for x in raw)
            return ops.to_numpy(self.sums(Predictions(z, y, weights[rows], None, (z, y), ops)))

        together = sums_of(slice(0, MADE_UP))
        self.length = len(together)
        each = sum(sums_of(slice(k, k + 1)) for k in range(MADE_UP))
        if not np.allclose(together, each, rtol=1e-4, atol=1e-6, equal_nan=True):
            what = "what it keeps of some samples is not the sum of what it keeps of each"
            fix = "write a function that gives a value for each sample, or one with a result"
            raise ConfigError(what, where=self.where, fix=fix)
        self.result(together)


def varied(outputs: Any, labels: Any, ops: Ops, labelled: bool) -> tuple[Any, Any]:
    """Make ``MADE_UP`` outputs and labels that differ, in the shapes of these: of zeros, nearly everything is a sum.

    ``labelled``: 1 is a label. The numbers are such that a metric shows which takes the largest of a batch.
    """
    rng = np.random.default_rng(0)

    def of_model(z: Tensor) -> Tensor:
        # They may stand for logits and for probabilities.
        numbers = np.sort(rng.uniform(0.05, 0.45, (MADE_UP, *tuple(z.shape)[1:])), 0)
        if numbers.ndim > 1:
            numbers[:-1, ..., 0] += 0.5  # of nearly all samples, the first class is the largest
        return ops.cast(ops.from_numpy(numbers), ops.dtype(z))

    def of_data(y: Tensor) -> Tensor:
        numbers = np.zeros((MADE_UP, *tuple(y.shape)[1:]))
        numbers[[1, 2, 4]] = labelled
        return ops.cast(ops.from_numpy(numbers), ops.dtype(y))

    return for_each(of_model, outputs), for_each(of_data, labels)


class UserSums(Metric):
    """A metric of the user with a ``result``: of each sample it gives the numbers that are added, (n, length)."""

    def __init__(self, function: UserFunction, result: Callable[[np.ndarray], Any], form: LabelForm) -> None:
        super().__init__(form)
        self.function, self._result = function, result
        self.length, self._probed = 1, False

    def sums(self, predictions: Predictions) -> Tensor:
        ops, weights, function = predictions.ops, predictions.weights, self.function
        values, place_weights = function.checked_values(*predictions.raw, weights)
        columns = tuple(values.shape)[1:]  # () or (length,)
        length = self.length if self._probed else None
        if place_weights is not None or len(columns) > 1 or (length is not None and (*columns, 1)[0] != length):
            shape = "(values, weights)" if place_weights is not None else str(tuple(values.shape))
            fix = f"a metric with a result gives (samples, {length or 'k'}): of each sample the numbers that are added"
            raise ConfigError(f"the function gives {shape}", where=function.where, fix=fix)
        # In 64 bits: squares of numbers far from zero cancel.
        count = ops.reshape(ops.cast(weights, "float64"), (-1, 1))  # (n, 1)
        values = ops.reshape(ops.cast(values, "float64"), (-1, *(columns or (1,))))  # (n, length)
        return ops.sum(ops.where(count > 0, values, 0.0) * count, 0)

    def result(self, sums: np.ndarray) -> float:
        try:
            with np.errstate(divide="ignore", invalid="ignore"):
                return float(self._result(sums))
        except Exception as error:
            fix = f"it is called with the {len(sums)} sums and gives a number, math.nan where there is none"
            where = self.function.where
            raise ConfigError(f"its result failed: {named_reason(error)}", where=where, fix=fix, common=True) from error

    def probe(self, predictions: Predictions) -> None:
        """Learn the number of sums from made-up samples, and try the result."""
        self.function.probe(*predictions.raw, predictions.weights, predictions.ops)
        self._probed = False
        sums = predictions.ops.to_numpy(self.sums(predictions))
        self.length, self._probed = len(sums), True
        self.result(sums)


def user_metric(
    name: str, form: LabelForm, ops: Ops, logits: bool, at_places: bool
) -> UserMean | UserSums | UserLibraryMetric:
    """Return the metric of this name: a function or an object that can be called; a class is called first.

    ``logits``: the outputs are such; ``at_places``: each place of a sample has a class, or some samples have none.
    """
    key = "task.metrics"
    where = f"{key}: {name}"
    named = user_function(name, where)
    try:
        metric = named() if isinstance(named, type) else named
    except TypeError as error:
        fix = f"make it in a file of yours and name it there: metrics: ['mine:metric'], metric = {named.__name__}(...)"
        raise ConfigError(
            f"it cannot be made without arguments: {named_reason(error)}", where=where, fix=fix
        ) from error
    try:
        library = ops.library_metric(metric, logits)
    except ConfigError as error:
        raise ConfigError(error.what, where=where, fix=error.fix) from error
    if library is not None:
        return UserLibraryMetric(name, library, form, at_places)
    modules = type(metric).__module__.split(".")
    for of_library, framework in (("torchmetrics", "pytorch"), ("keras", "tensorflow")):
        if modules[0] == of_library and "losses" not in modules:  # a loss of Keras is a function
            raise ConfigError(f"metrics of {of_library} are for framework: {framework}", where=where)
    function = UserFunction(key, name, metric)
    return UserSums(function, metric.result, form) if hasattr(metric, "result") else UserMean(function, form)


def no_comparison(title: str) -> ConfigError:
    """Make the error for an object of a library that is the mean of numbers and gets no labels."""
    fix = "name the function of which it is the mean: it is called with (outputs, labels)"
    return ConfigError(f"{title} compares no outputs with labels", fix=fix)


def _is_of_keras(function: Any) -> bool:
    """Return whether it is a loss or metric of Keras, or derived from one: they take (labels, outputs)."""
    function = getattr(function, "func", function)  # of a partial
    kinds = (function,) if hasattr(function, "__qualname__") else type(function).__mro__
    modules = [str(one.__module__).split(".") for one in kinds]
    return any(parts[0] == "keras" and {"losses", "metrics"} & {*parts} for parts in modules)


def _shapes(x: Any) -> str:
    """Write a shape as text: (32, 10), or {price: (32, 1), sold: (32, 2)}."""
    if isinstance(x, Mapping):
        return f"{{{', '.join(f'{name}: {_shapes(value)}' for name, value in x.items())}}}"
    return str(tuple(getattr(x, "shape", ())))

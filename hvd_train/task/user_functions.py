"""Call a user's losses and metrics, and check their results.

A function gets (outputs, labels) from the model and the data. It returns a value for each sample or position, or
(values, weights) of the same shape. A mean is refused: means over parts of unequal size do not add up to the mean.
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

MADE_UP = 5  # random samples to try a function on


def for_each(function: Callable[[Any], Any], outputs: Any) -> Any:
    """Apply the function to a tensor, or to each of a dict of tensors."""
    return {name: function(x) for name, x in outputs.items()} if isinstance(outputs, Mapping) else function(outputs)


class UserFunction:
    """A user's loss or metric ``package.module:function``; ``key``: the key of the configuration, for messages."""

    def __init__(self, key: str, name: str, function: Callable[..., Any] | None = None) -> None:
        self.where = f"{key}: {name}"
        self.function = function or user_function(name, self.where)
        if isinstance(self.function, type):
            fix = "name a function, or an object of it that a module of yours makes"
            raise ConfigError(f"{self.function.__name__} is a class, not a function", where=self.where, fix=fix)
        self._labels_first = _is_of_keras(self.function)
        # Set by ``probe``: a remark, and whether the value of a sample depends on others in its batch.
        self.remark, self.compares = "", False

    def checked_values(
        self, outputs: Any, labels: Any, weights: Tensor, weighted: bool | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Call the function and check its result: values (n, ...), and weights of the same shape or None.

        ``weights``: (n,), of the samples. ``weighted``: whether it returned weights before; None: not known yet.
        """
        values, position_weights = self._call(outputs, labels)
        fix = "return a value for each sample or position (PyTorch's losses: reduction='none', Keras': reduction=None)"
        fix += "; with class weights w return (unweighted values, w[labels]): their mean divides by the sum of weights"
        if weighted is not None and weighted != (position_weights is not None):
            what = "the function gives weights for some batches and none for others"
            raise ConfigError(what, where=self.where, fix="give them always")
        for x in (values,) if position_weights is None else (values, position_weights):
            if not hasattr(x, "shape"):
                what = f"the function gives {type(x).__name__}, not a tensor"
                raise ConfigError(what, where=self.where, fix=fix)
            shape = tuple(x.shape)
            if not shape:
                what = "the function gives one number for a batch, but means of unequal parts cannot be averaged"
                raise ConfigError(what, where=self.where, fix=fix)
            # A size is None while a graph is traced.
            if None not in (shape[0], weights.shape[0]) and shape[0] != weights.shape[0]:
                what = f"the function gives {shape} for {weights.shape[0]} samples"
                raise ConfigError(what, where=self.where, fix=fix)
        if position_weights is not None and tuple(position_weights.shape) != tuple(values.shape):
            what = f"the function gives values {tuple(values.shape)} and weights {tuple(position_weights.shape)}"
            raise ConfigError(what, where=self.where, fix="give both the same shape")
        return values, position_weights

    def probe(self, outputs: Any, labels: Any, weights: Tensor, ops: Ops) -> bool:
        """Call the function for two samples and for one; return whether it returns weights.

        Two calls detect broadcasting errors: outputs (n, 1) minus labels (n,) would be (n, n).
        """
        values, position_weights = self.checked_values(outputs, labels, weights)
        first, _ = self._call(for_each(lambda x: x[:1], outputs), for_each(lambda x: x[:1], labels))
        # A function that broadcasts over samples returns another shape for one sample.
        alone = tuple(first.shape)
        if alone[1:] != tuple(values.shape)[1:]:
            shapes = " and ".join(str(for_each(lambda x: tuple(x.shape), x)) for x in (outputs, labels))
            what = f"the function gives {tuple(values.shape)} for 2 samples and {alone} for one, of outputs and labels"
            fix = "give both the same shape: outputs[:, 0] and labels[:, 0] turn (n, 1) into (n,)"
            raise ConfigError(f"{what} {shapes}", where=self.where, fix=fix)
        if told := _broadcast(outputs, labels, values):
            self.remark = told
        self.compares = self._compares(outputs, labels, ops)
        if self.compares:
            what = "the value of a sample depends on the others of its batch"
            self.remark = (
                f"{what}: each rank compares its own part of the batch, so the value depends on the number of ranks"
            )
        elif position_weights is None and self._weighs_classes(labels, ops):
            what = "its values have the weights of their classes, and their mean divides by the number of samples"
            self.remark = f"{what}, where PyTorch's own divides by the sum of weights (task.class_weights does so)"
        return position_weights is not None

    def _weighs_classes(self, labels: Any, ops: Ops) -> bool:
        """Return whether it is a PyTorch loss with class weights, whose own mean divides by the sum of weights."""
        weighs = self.ignored is not None and getattr(self.function, "weight", None) is not None
        return weighs and not isinstance(labels, Mapping) and ops.to_numpy(labels).dtype.kind in "iu"

    @property
    def ignored(self) -> int | None:
        """Return the label that a PyTorch or Keras loss ignores (it returns 0 there), or None."""
        number = getattr(self.function, "ignore_index", getattr(self.function, "ignore_class", None))
        return number if isinstance(number, int) else None

    def _compares(self, outputs: Any, labels: Any, ops: Ops) -> bool:
        """Return whether the values in a batch differ from those of each sample alone.

        Return False if that cannot be tested: the function refuses such labels, or draws random numbers.
        """
        raw = varied(outputs, labels, ops, True)

        def values(rows: slice) -> np.ndarray:
            answer, _ = self._call(*(for_each(itemgetter(rows), x) for x in raw))
            # NumPy has no bfloat16. Some functions return a scalar for one sample.
            return np.atleast_1d(ops.to_numpy(ops.cast(answer, "float64")))

        try:
            together, again = values(slice(0, MADE_UP)), values(slice(0, MADE_UP))
            alone = [values(slice(k, k + 1)) for k in range(MADE_UP)]
        except ConfigError:
            return False
        random = not np.array_equal(together, again, equal_nan=True)
        # Wrong shapes are reported when the function is called.
        if random or {x.shape for x in alone} != {(1, *together.shape[1:])} or len(together) != MADE_UP:
            return False
        # If a loss contains a network, its rounding depends on the batch size, above all in 16 bits.
        return not np.allclose(together, np.concatenate(alone), rtol=1e-2, atol=1e-6, equal_nan=True)

    def _call(self, outputs: Any, labels: Any) -> tuple[Tensor, Tensor | None]:
        try:
            answer = self.function(labels, outputs) if self._labels_first else self.function(outputs, labels)
        except Exception as error:
            fix = f"it is called with outputs {_shapes(outputs)} and labels {_shapes(labels)}"
            raise ConfigError(f"the function failed: {named_reason(error)}", where=self.where, fix=fix) from error
        values, position_weights = answer if isinstance(answer, tuple | list) and len(answer) == 2 else (answer, None)
        return values, position_weights


class UserMean(Mean):
    """A user's metric that is a mean of values; values at positions without a label are left out."""

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
        """Call the function on made-up samples to find whether it returns weights, and a value for each label."""
        self._gives_weights = self.function.probe(*predictions.raw, predictions.weights, predictions.ops)
        values, _ = self.values(predictions)
        present = predictions.present
        self._of_labels = present is not None and tuple(values.shape) == tuple(present.shape)
        self.masked = self._gives_weights or self._of_labels
        self.length = 2 if self.masked else 1


class UserLibraryMetric(Metric):
    """A user's metric object from TorchMetrics or Keras.

    ``per_position``: labels are classes per position, or some are missing. Then it gets a row for each label.
    """

    def __init__(self, name: str, sums: LibraryMetric, form: LabelForm, per_position: bool) -> None:
        super().__init__(form)
        self.where, self._sums, self.length, self.per_position = f"task.metrics: {name}", sums, 1, per_position

    def sums(self, predictions: Predictions) -> Tensor:
        (outputs, labels), weights = predictions.raw, predictions.weights
        if self.per_position:
            outputs, labels, weights = predictions.flat()  # (positions, C), (positions,), (positions,)
            labels = predictions.ops.cast(labels, "int64")
        ops = predictions.ops
        try:
            sums = self._sums.sums(outputs, labels, weights)
        except Exception as error:
            fix = f"it is given outputs {_shapes(outputs)} and labels {_shapes(labels)}"
            raise ConfigError(f"the metric failed: {named_reason(error)}", where=self.where, fix=fix) from error
        # The last sum is the number of rows: a state of zeros may be that of many, such as of no false positive.
        rows = ops.sum(ops.cast(weights > 0, ops.dtype(sums)), 0)
        return ops.concat([sums, ops.reshape(rows, (1,))])

    def result(self, sums: np.ndarray) -> float:
        if not sums[-1]:  # without any row, some metrics would return 0
            return math.nan
        shapes = self._sums.shapes
        parts = np.split(sums[:-1], np.cumsum([math.prod(shape) for shape in shapes])[:-1])
        try:
            return self._sums.result([x.reshape(shape) for x, shape in zip(parts, shapes, strict=True)])
        except Exception as error:
            fix = "it must give one number, for example a macro average"
            raise ConfigError(
                f"its result failed: {named_reason(error)}", where=self.where, fix=fix, common=True
            ) from error

    def probe(self, predictions: Predictions) -> None:
        """Find the number of sums with made-up samples, and check that they add up over samples."""
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
            what = "its state after several samples is not the sum of its states after each"
            fix = "write a function that gives a value for each sample, or one with a result"
            shapes = [None if isinstance(x, Mapping) else tuple(x.shape) for x in raw]
            if shapes[1] and shapes[0] == (*shapes[1], 1):  # they broadcast to (n, n)
                fix = f"give labels the shape of the outputs, (n, 1) for (n,); or {fix}"
            raise ConfigError(what, where=self.where, fix=fix)
        self.result(together)


def varied(outputs: Any, labels: Any, ops: Ops, labelled: bool) -> tuple[Any, Any]:
    """Make ``MADE_UP`` different outputs and labels in the shapes of these: with zeros, nearly everything adds up.

    ``labelled``: 1 is a valid label. The numbers reveal a metric that takes the maximum over a batch.
    """
    rng = np.random.default_rng(0)

    def of_model(z: Tensor) -> Tensor:
        # Valid both as logits and as probabilities.
        numbers = np.sort(rng.uniform(0.05, 0.45, (MADE_UP, *tuple(z.shape)[1:])), 0)
        if numbers.ndim > 1:
            numbers[:-1, ..., 0] += 0.5  # the first class is the largest in all samples but one
        return ops.cast(ops.from_numpy(numbers), ops.dtype(z))

    def of_data(y: Tensor) -> Tensor:
        numbers = np.zeros((MADE_UP, *tuple(y.shape)[1:]))
        numbers[[1, 2, 4]] = labelled
        return ops.cast(ops.from_numpy(numbers), ops.dtype(y))

    return for_each(of_model, outputs), for_each(of_data, labels)


class UserSums(Metric):
    """A user's metric with a ``result``: it returns numbers (n, length) per sample, which are summed."""

    def __init__(self, function: UserFunction, result: Callable[[np.ndarray], Any], form: LabelForm) -> None:
        super().__init__(form)
        self.function, self._result = function, result
        self.length, self._probed = 1, False

    def sums(self, predictions: Predictions) -> Tensor:
        ops, weights, function = predictions.ops, predictions.weights, self.function
        values, position_weights = function.checked_values(*predictions.raw, weights)
        columns = tuple(values.shape)[1:]  # () or (length,)
        length = self.length if self._probed else None
        if position_weights is not None or len(columns) > 1 or (length is not None and (*columns, 1)[0] != length):
            shape = "(values, weights)" if position_weights is not None else str(tuple(values.shape))
            fix = f"a metric with a result gives (samples, {length or 'k'}): the numbers of each sample that are summed"
            raise ConfigError(f"the function gives {shape}", where=function.where, fix=fix)
        # In 64 bits, as differences of large squares lose digits.
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
        """Find the number of sums with made-up samples, and try ``result``."""
        self.function.probe(*predictions.raw, predictions.weights, predictions.ops)
        self._probed = False
        sums = predictions.ops.to_numpy(self.sums(predictions))
        self.length, self._probed = len(sums), True
        self.result(sums)


def user_metric(
    name: str, form: LabelForm, ops: Ops, logits: bool, per_position: bool
) -> UserMean | UserSums | UserLibraryMetric:
    """Return a user's metric: a function, a callable object, or a class, which is instantiated.

    ``logits``: the outputs are logits; ``per_position``: labels are classes per position, or some are missing.
    """
    key = "task.metrics"
    where = f"{key}: {name}"
    named = user_function(name, where)
    try:
        metric = named() if isinstance(named, type) else named
    except TypeError as error:
        fix = f"create it in a file of yours and name it: metrics: ['mine:metric'], metric = {named.__name__}(...)"
        raise ConfigError(
            f"it cannot be made without arguments: {named_reason(error)}", where=where, fix=fix
        ) from error
    try:
        library = ops.library_metric(metric, logits)
    except ConfigError as error:
        raise ConfigError(error.what, where=where, fix=error.fix) from error
    if library is not None:
        return UserLibraryMetric(name, library, form, per_position)
    modules = type(metric).__module__.split(".")
    for of_library, framework in (("torchmetrics", "pytorch"), ("keras", "tensorflow")):
        if modules[0] == of_library and "losses" not in modules:  # a loss of Keras is a function
            raise ConfigError(f"metrics of {of_library} are for framework: {framework}", where=where)
    function = UserFunction(key, name, metric)
    return UserSums(function, metric.result, form) if hasattr(metric, "result") else UserMean(function, form)


def no_comparison(title: str) -> ConfigError:
    """Make the error for a library metric that averages numbers and takes no labels."""
    fix = "name the function that it averages; it is called with (outputs, labels)"
    return ConfigError(f"{title} does not compare outputs with labels", fix=fix)


def _is_of_keras(function: Any) -> bool:
    """Return whether it is a Keras loss or metric, or a subclass of one, which takes (labels, outputs)."""
    function = getattr(function, "func", function)  # of a partial
    kinds = (function,) if hasattr(function, "__qualname__") else type(function).__mro__
    modules = [str(one.__module__).split(".") for one in kinds]
    return any(parts[0] == "keras" and {"losses", "metrics"} & {*parts} for parts in modules)


def _shapes(x: Any) -> str:
    """Write a shape as text: (32, 10), or {price: (32, 1), sold: (32, 2)}."""
    if isinstance(x, Mapping):
        return f"{{{', '.join(f'{name}: {_shapes(value)}' for name, value in x.items())}}}"
    return str(tuple(getattr(x, "shape", ())))


def _broadcast(outputs: Any, labels: Any, values: Any) -> str:
    """Return a remark if the values compare each number of the outputs with several of the labels, or the reverse."""
    if any(isinstance(x, Mapping) or not hasattr(x, "shape") for x in (outputs, labels)):
        return ""
    z, y, made = (tuple(x.shape) for x in (outputs, labels, values))
    if None in (*z, *y, *made) or len(z) != len(y):
        return ""
    if made not in (z, y) and made == tuple(map(max, zip(z, y, strict=True))):
        return f"its values {made[1:]} compare outputs {z[1:]} with labels {y[1:]}, each with several of the others"
    return ""

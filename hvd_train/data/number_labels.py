"""Check the values of labels that are numbers: a mistake in them would not show in a loss or metric."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod

import numpy as np

from hvd_train.config import TaskConfig
from hvd_train.data.column import ROUNDING
from hvd_train.errors import DataError, noun_and_names
from hvd_train.metrics.table import METRICS
from hvd_train.protocol import Field, Source

FEW = 64  # samples checked of a source that cannot read labels without inputs
PIECE = 1 << 18  # values checked at once
MOST = 1 << 24  # values checked of a part at most: labels may be masks in a mapped file
OF_NUMBERS = ("mse", "mae", "huber")


def check_order(names: Sequence[str], loss: str, where: str) -> None:
    """Refuse more than two class names for a loss of numbers: words have no order. Two become 0 and 1."""
    if loss in OF_NUMBERS and len(names) > 2:
        what = f"{noun_and_names('class', names)} have no order that task.loss: {loss} could learn"
        fix = "list them in the order of 0, 1, 2, ...: data.classes; or call them by numbers, or set another task.loss"
        raise DataError(what, where=where, fix=fix)


def check_values(parts: Mapping[str, Source], task: TaskConfig, where: str, of_inputs: bool = False) -> None:
    """Refuse label values that do not suit the loss and metrics; ``of_inputs``: labels are the inputs."""
    for title, part in parts.items():
        for name, field in part.sample.labels.items():
            loss, metrics = task.term(name)
            part_name = f"{where}, {title}"
            if field.divisor != 1 and not of_inputs:
                _check_bytes(part, name, part_name)
            if loss == "bce":
                _check_yes_and_no(part, name, field, part_name)
            if loss in OF_NUMBERS:
                for metric in metrics:
                    _check_metric(part, name, field, loss, metric, part_name)


def remark_on_ignored(part: Source, name: str, ignored: int, loss: str) -> str:
    """Return a remark if labels seem to be classes and some are ``ignored``, but a user's loss counts them; else ""."""
    field, count, rest = part.sample.labels[name], 0, False
    if field.classes or field.dtype != "int64":
        return ""
    for _, values in _pieces(part, name):
        here = values == ignored
        if (values[~here] < 0).any():  # not classes
            return ""
        count, rest = count + int(here.sum()), rest or not here.all()
    if not count or not rest:
        return ""
    what = f"labels '{name}' hold {ignored}, but values of {loss} there count in its mean"
    return f"{what} (return (values, labels != {ignored}) to leave them out)"


def _check_bytes(part: Source, name: str, where: str) -> None:
    """Refuse bytes of 0 and 1: divided by 255 like an image, all would be nearly 0."""
    most = 0
    for _, values in _pieces(part, name):
        most = max(most, int(values.max(initial=0)))
        if most > 1:
            return
    if most == 1:
        what = f"labels '{name}' are uint8 of 0 and 1, and bytes of an image are divided by 255: 1 would be 0.004"
        raise DataError(what, where=where, fix="store masks as bool, as float32, or as bytes of 0 and 255")


def _check_yes_and_no(part: Source, name: str, field: Field, where: str) -> None:
    """Refuse labels outside of [0, 1], for which the loss bce has no lower bound."""
    for rows, values in _pieces(part, name):
        values = _as_model_sees(values, field)
        good = (values >= -ROUNDING) & (values <= 1 + ROUNDING)
        if not good.all():
            bad = np.argwhere(~good)[0]
            what = f"sample {rows[bad[0]]} has the label {values[tuple(bad)]:g}, and task.loss: bce takes 0 to 1"
            raise DataError(what, where=where, fix="store no as 0 and yes as 1; for other numbers set task.loss: mse")


def _check_metric(part: Source, name: str, field: Field, loss: str, metric: str, where: str) -> None:
    """Refuse a binary metric for labels that are not binary.

    Outputs above 0 count as yes. That suits labels of -1 and 1 with mse, mae or huber; 0 and 1 would need 0.5.
    """
    binary = METRICS[metric].metric_class.binary if metric in METRICS else ""
    if not binary:
        return
    pairs = [(-1, 1)] if binary == "threshold" else [(-1, 1), (0, 1)]
    for rows, values in _pieces(part, name):
        values = _as_model_sees(values, field)
        pairs = [pair for pair in pairs if np.isin(values, pair).all()]
        if not pairs:
            first = values.reshape(len(values), -1)[0, 0]
            what = f"the metric is for binary labels; with loss {loss} they are numbers (sample {rows[0]}: {first:g})"
            fix = "for labels of 0 and 1 set task.loss: bce; for numbers there are mae, rmse and r2"
            raise DataError(what, where=f"{where}, task.metrics: {metric}", fix=fix)


def _as_model_sees(values: np.ndarray, field: Field) -> np.ndarray:
    """Return labels as the loss gets them: divided by the divisor, and normalized like inputs."""
    if field.divisor == 1 and not field.mean:
        return values
    scaled = values / field.divisor
    return (scaled - np.array(field.mean)) / np.array(field.std) if field.mean else scaled


def _pieces(part: Source, name: str) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield (indices (k,), labels (k, ...)) of all samples, or of evenly spaced ones if there are too many."""
    read, field, n = getattr(part, "label", None), part.sample.labels[name], len(part)
    if read is None:
        ordered = getattr(part, "ordered", False)  # a stream would be read to its end
        rows = np.arange(min(n, FEW)) if ordered else np.unique(np.linspace(0, n - 1, FEW).astype(np.int64))
        yield rows, np.asarray(part.fetch(rows)[1][name])
        return
    each = max(1, prod(field.shape))
    size, most = max(1, PIECE // each), max(1, MOST // each)
    looked_at = np.arange(n) if n <= most else np.unique(np.linspace(0, n - 1, most).astype(np.int64))
    for start in range(0, len(looked_at), size):
        rows = looked_at[start : start + size]
        yield rows, np.asarray(read(name, rows))

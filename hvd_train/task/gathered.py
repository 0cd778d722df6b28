"""Metrics of all outputs of an evaluation at once, such as a median, a ranking or BLEU: ``gathered:mine:score``."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hvd_train.config.keys.task import GATHERED
from hvd_train.config.user_code import user_function
from hvd_train.errors import ConfigError, amount, named_reason
from hvd_train.metrics.metric import LabelForm, Metric, Predictions
from hvd_train.protocol import Batch, Communicator, Tensor, one_or_all

MOST_BYTES = 1 << 30  # of the outputs and labels of an evaluation, which every rank holds


class Gathered(Metric):
    """A user's function of all outputs (n, ...) float64 and labels (n, ...), as NumPy's arrays, that gives a number."""

    length = 0  # it has no sums

    def __init__(self, name: str, form: LabelForm) -> None:
        super().__init__(form)
        self.where = f"task.metrics: {name}"
        self._function = user_function(name.removeprefix(GATHERED), self.where)

    def sums(self, predictions: Predictions) -> Tensor:
        raise NotImplementedError

    def result(self, sums: np.ndarray) -> float:
        return math.nan  # only an evaluation has a value

    def value(self, outputs: np.ndarray, labels: Any) -> float:
        try:
            return float(self._function(outputs, labels))
        except Exception as error:
            what = f"the function failed: {named_reason(error)}"
            shape = {k: x.shape for k, x in labels.items()} if isinstance(labels, Mapping) else labels.shape
            fix = f"it is called with outputs {outputs.shape} and labels {shape}, and gives a number"
            raise ConfigError(what, where=self.where, fix=fix, common=True) from error


class Gathering:
    """The outputs and labels of one objective that this rank has evaluated. ``label``: its name; "": all labels."""

    def __init__(self, label: str, where: str) -> None:
        self._label, self._where = label, where
        self._parts: list[tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]] = []

    def add(self, outputs: np.ndarray, batch: Batch) -> None:
        """Add a batch: outputs (rows, ...), of which the first ``batch.count`` are samples."""
        labels = {k: np.asarray(x)[: batch.count] for k, x in batch.labels.items() if self._label in ("", k)}
        self._parts.append((batch.indices[: batch.count], outputs[: batch.count], labels))

    def joined(self, ranks: Communicator) -> tuple[np.ndarray, Any] | None:
        """Return outputs (n, ...) and labels of all ranks in the order of the samples; None if there is none.

        All ranks call it.
        """
        try:
            own = self._to_bytes()
            size = len(own)
        except ValueError:
            own, size = b"", -1
        sizes = [int(part) for part in ranks.allgather_bytes(str(size).encode(), "gathered sizes")]
        if min(sizes) < 0:
            what = "the outputs of batches have unequal shapes"
            fix = "give them one shape (data.lengths pads batches to other lengths), or leave the metric out"
            raise ConfigError(what, where=self._where, fix=fix, common=True)
        if sum(sizes) > MOST_BYTES:
            what = (
                f"all outputs and labels take {sum(sizes) / 2**30:.1f} GiB on each rank, and at most 1 may be gathered"
            )
            fix = "set limit_val_batches, or give a metric with a result, which adds up sums"
            raise ConfigError(what, where=self._where, fix=fix, common=True)
        parts = [
            np.load(io.BytesIO(part), allow_pickle=False) for part in ranks.allgather_bytes(own, "gathered") if part
        ]
        if not parts:
            return None
        whole = {name: np.concatenate([part[name] for part in parts]) for name in parts[0].files}
        order = np.argsort(whole.pop("indices"), kind="stable")
        outputs = whole.pop("outputs")[order]
        return outputs, one_or_all({name.removeprefix("label "): x[order] for name, x in whole.items()})

    def _to_bytes(self) -> bytes:
        """Serialize and release what was added. Raises ValueError if the outputs of two batches differ in shape."""
        if not self._parts:
            return b""
        indices, outputs, labels = zip(*self._parts, strict=True)
        arrays: dict[str, Any] = {"indices": np.concatenate(indices), "outputs": np.concatenate(outputs)}
        arrays |= {f"label {name}": np.concatenate([one[name] for one in labels]) for name in labels[0]}
        buffer = io.BytesIO()
        np.savez(buffer, **arrays)
        self._parts.clear()
        return buffer.getvalue()


def shape_of(outputs: Any, where: str) -> Sequence[int]:
    """Return the shape of a sample's outputs. Raises ConfigError for several outputs, and for unknown lengths."""
    if isinstance(outputs, Mapping):
        fix = "give a loss and the metric for each: {output: [...]}"
        raise ConfigError(f"the model gives {', '.join(outputs)}", where=where, fix=fix)
    shape = tuple(outputs.shape)[1:]
    if None in shape:
        what = f"the outputs are of unequal {amount(shape.count(None), 'length')}"
        raise ConfigError(what, where=where, fix="give a metric with a result, which adds up sums")
    return shape

"""Sources over arrays (in memory, mapped, or read by rows) and made-up samples."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from hvd_train.data.order import U64, mix, permute, stream
from hvd_train.errors import DataError

SPLIT_SEED = 20200101  # the held-out part is a property of the data, not of a run
SCAN = 1 << 20  # labels looked at together
EXACT = 1 << 24  # float32 holds every whole number up to here
NOISE = 0x5EED  # key of the synthetic noise


class Arrays:
    """Inputs (n, ...) and labels, in memory or mapped; ``rows`` chooses a subset.

    Labels are (n,) or (n, 1), or one for each place of the inputs: (n, T) for inputs (n, T) or (n, T, ...). uint8
    inputs are divided by 255, unless they are (n, T) with a label at each place: those are ids, as of text. Others are
    taken as they are; (n, h, w) gets a channel axis. ``numbers`` and ``note`` tell which. Labels are checked once,
    here; inputs when they are fetched. Inputs and labels need only ``shape``, ``dtype``, ``len`` and ``[rows]``.
    """

    def __init__(
        self, inputs: Any, labels: Any, where: str, num_classes: int | None = None, rows: np.ndarray | None = None
    ) -> None:
        self.inputs, self.labels, self.where, self.rows = inputs, labels, where, rows
        if not inputs.shape or not labels.shape or len(inputs) != len(labels):
            what = f"inputs {inputs.shape} and labels {labels.shape} differ in length"
            raise DataError(what, where=where, fix="give one label per input")
        if len(labels) == 0 or (rows is not None and len(rows) == 0):
            raise DataError("the data set is empty", where=where)
        kind = np.dtype(inputs.dtype)
        if kind.kind not in "fuib":
            raise DataError(f"inputs of type {kind}", where=where, fix="store them as uint8 or float32")
        shape = tuple(int(k) for k in inputs.shape[1:])
        self._grey = len(shape) == 2
        self.input_shape = (*shape, 1) if self._grey else shape
        own = tuple(int(k) for k in labels.shape[1:])
        if own not in ((), (1,)) and (own != shape[: len(own)] or 0 in own):
            fix = "store one whole number per sample, or one per place of the inputs"
            raise DataError(f"labels of shape {labels.shape} for inputs {inputs.shape}", where=where, fix=fix)
        self._label_shape = () if own == (1,) else own
        self._uint8 = kind == np.uint8 and not (len(shape) == 1 and own == shape and shape != (1,))
        self._wide = kind.kind in "iu" and kind.itemsize > 2
        self.numbers, self.note = "as the data hold them", ""
        if self._uint8:
            self.numbers = "from 0 to 1 (uint8 divided by 255)"
            self.note = "inputs are uint8 and are divided by 255 (ids, as of tokens, must be stored as int32)"
        elif kind == np.uint8:
            self.note = "inputs are uint8 with a label at each place: taken as ids, not divided by 255"
        elif kind.kind in "iu":
            self.note = f"inputs are {kind} and reach the model as float32: to look up ids it casts them (x.long())"
        self.num_classes = _check_labels(labels, where, num_classes) if rows is None else int(num_classes or 0)
        self.fingerprint = self._fingerprint()

    def __len__(self) -> int:
        return len(self.labels) if self.rows is None else len(self.rows)

    def fetch(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        rows = indices if self.rows is None else self.rows[indices]
        taken = self.inputs[rows]
        if self._uint8:
            inputs = np.divide(taken, np.float32(255), dtype=np.float32)
        else:
            with np.errstate(over="ignore"):  # what overflows becomes infinite and is found below
                inputs = taken.astype(np.float32, copy=False)
                whole = np.isfinite(np.sum(inputs))  # cheaper than looking at each; may overflow without a fault
            if not whole:
                self._check_finite(inputs, rows)
            if self._wide and np.abs(inputs).max(initial=0) >= EXACT:
                self._check_exact(taken, inputs, rows)
        labels = self.labels[rows].reshape(-1, *self._label_shape).astype(np.int64)
        return inputs[..., None] if self._grey else inputs, labels

    def _check_finite(self, inputs: np.ndarray, rows: np.ndarray) -> None:
        good = np.isfinite(inputs).reshape(len(inputs), -1).all(axis=1)
        if not good.all():
            bad = int(rows[int(np.argmin(good))])
            raise DataError(f"sample {bad} holds NaN or infinity", where=self.where, fix="mend or remove it")

    def _check_exact(self, taken: np.ndarray, inputs: np.ndarray, rows: np.ndarray) -> None:
        """Two ids must not become one."""
        same = (inputs.astype(np.float64) == taken) & (np.abs(inputs) < 2.0**63)
        good = same.reshape(len(inputs), -1).all(axis=1)
        if not good.all():
            at = int(np.argmin(good))
            bad, first = int(rows[at]), int(taken[at].reshape(-1)[int(np.argmin(same[at].reshape(-1)))])
            what = f"sample {bad} holds {first}: inputs travel in float32, which has whole numbers up to {EXACT:,} only"
            raise DataError(what, where=self.where, fix="number the ids anew from 0")

    def _fingerprint(self) -> str:
        """Over shape, types and evenly spread rows, first and last among them: milliseconds for any size."""
        n = len(self)
        text = f"{n} {self.input_shape} {np.dtype(self.inputs.dtype).str} {getattr(self.inputs, 'names', '')}"
        digest = hashlib.sha256(text.encode())
        for values, count in ((self.labels, 1024), (self.inputs, 64)):
            picked = np.unique(np.linspace(0, n - 1, count).astype(np.int64))
            rows = picked if self.rows is None else self.rows[picked]
            found = np.ascontiguousarray(values[rows])
            digest.update(f"{found.dtype.str} {found.shape}".encode() + found.tobytes())
        return digest.hexdigest()[:16]

    def split(self, fraction: float) -> tuple[Arrays, Arrays]:
        """A fixed, stratified split: the same share of each class is held out, whatever the run's seed.

        Samples with many labels are of one class here.
        """
        one = not self._label_shape
        labels = np.asarray(self.labels[:]).reshape(-1) if one else np.zeros(len(self.labels), np.int64)
        held = np.zeros(len(labels), bool)
        for label in np.unique(labels):
            members = np.flatnonzero(labels == label)
            shuffled = members[permute(np.arange(len(members)), len(members), SPLIT_SEED, int(label))]
            held[shuffled[: min(len(members) - 1, max(1, round(fraction * len(members))))]] = True
        if not held.any():
            fix = "give more samples, or a validation part"
            raise DataError("no class has two samples, so nothing can be held out", where=self.where, fix=fix)
        parts = [np.flatnonzero(~held), np.flatnonzero(held)]
        train, val = (Arrays(self.inputs, self.labels, self.where, self.num_classes, rows) for rows in parts)
        return train, val


def _check_labels(labels: Any, where: str, num_classes: int | None) -> int:
    """Whole numbers in [0, num_classes); returns num_classes, by default the largest label + 1."""
    kind = np.dtype(labels.dtype)
    if kind.kind not in "iu":
        fix = "store classes as whole numbers (int64); for regression take a script with hvd_train.torch or .keras"
        raise DataError(f"labels of type {kind}, and fit trains classes alone", where=where, fix=fix)
    most, rows = -1, max(1, SCAN // math.prod(labels.shape[1:]))
    for start in range(0, len(labels), rows):
        part = np.asarray(labels[start : start + rows])
        low, high = int(part.min()), int(part.max())
        if low < 0 or (num_classes is not None and high >= num_classes):
            bound = f"[0, {num_classes})" if num_classes is not None else "0, 1, 2, ..."
            bad = low if low < 0 else high
            at = start + int(np.argmax(part == bad)) * len(part) // part.size
            what = f"label {bad} of sample {at} is out of range: {bound} expected"
            raise DataError(what, where=where, fix="mend the labels or data.num_classes")
        most = max(most, high)
    return num_classes or most + 1


class Synthetic:
    """Sample i is a pure function of i: its class' pattern and noise, halved. Memory does not grow with n.

    ``start`` is the place of the first sample in the endless stream, so that training and validation never overlap.
    """

    def __init__(self, n: int, shape: Sequence[int], num_classes: int, start: int = 0) -> None:
        self.input_shape, self.num_classes, self._n, self._start = tuple(shape), num_classes, n, start
        self._size = int(np.prod(self.input_shape, dtype=np.int64))
        self._patterns = 0.5 * _noise(mix(NOISE, 1), np.arange(num_classes, dtype=U64), self._size)
        text = f"synthetic {n} {self.input_shape} {num_classes} {start}"
        self.fingerprint = hashlib.sha256(text.encode()).hexdigest()[:16]

    def __len__(self) -> int:
        return self._n

    def fetch(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        places = np.asarray(indices, np.int64) + self._start
        labels = places % self.num_classes
        inputs = _noise(mix(NOISE, 2), places.astype(U64), self._size)
        inputs *= np.float32(0.5)
        inputs += self._patterns[labels]
        return inputs.reshape(-1, *self.input_shape), labels


class Text:
    """Samples ``start`` to ``stop`` of text: i holds bytes [i T, i T + T), as numbers; its labels are the next ones."""

    CLASSES = 256  # bytes

    def __init__(self, found: np.ndarray, length: int, start: int, stop: int) -> None:
        self.input_shape: tuple[int, ...] = (length,)
        self.num_classes, self._length = self.CLASSES, length
        self._bytes, self._start, self._n = found, start, stop - start
        picked = np.unique(np.linspace(0, self._n - 1, 64).astype(np.int64))
        digest = hashlib.sha256(f"text {length} {start} {stop}".encode() + self._sample(picked).tobytes())
        self.fingerprint = digest.hexdigest()[:16]

    def __len__(self) -> int:
        return self._n

    def _sample(self, indices: np.ndarray) -> np.ndarray:
        """(k,) -> (k, T + 1) uint8."""
        first = (np.asarray(indices, np.int64) + self._start) * self._length
        return self._bytes[first[:, None] + np.arange(self._length + 1)]

    def fetch(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        taken = self._sample(indices)
        return taken[:, :-1].astype(np.float32), taken[:, 1:].astype(np.int64)


def _noise(key: int, places: np.ndarray, size: int) -> np.ndarray:
    """(k,) places -> (k, size) float32 in [0, 1]; 8 bits a value, so one hash makes eight."""
    words = -(-size // 8)
    bits = stream(key, places[:, None] * U64(words) + np.arange(words, dtype=U64)).astype("<u8")
    return np.divide(bits.view(np.uint8)[:, :size], np.float32(255), dtype=np.float32)

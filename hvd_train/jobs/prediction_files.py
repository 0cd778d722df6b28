"""The output files of ``hvd-train predict``, written in consecutive parts in any order."""

from __future__ import annotations

import csv
import errno
import io
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hvd_train.errors import ConfigError
from hvd_train.files import AtomicFile
from hvd_train.protocol import Source


class ArrayFile:
    """A .npy file, written in parts of consecutive rows.

    Only ``close`` raises, because until then the other ranks wait in collectives. Not memory-mapped, because on a full
    disk a write to mapped memory kills the process by a signal.
    """

    def __init__(self, output: Path, overwrite: bool) -> None:
        self.output, self._overwrite = output, overwrite
        self._file: AtomicFile | None = None
        self._failure: OSError | None = None
        self._start = self._width = 0

    def open(self, shape: tuple[int, ...], dtype: np.dtype) -> None:
        if self._file or self._failure:
            return
        try:
            # Not checked earlier, because the name depends on the model's outputs.
            if self.output.exists() and not self._overwrite:
                raise FileExistsError(errno.EEXIST, "the file exists already, and --overwrite is not given")
            self.output.parent.mkdir(parents=True, exist_ok=True)
            self._file = AtomicFile(self.output)
            self.header(shape, dtype)
            self._start, self._width = self._file.stream.tell(), dtype.itemsize * math.prod(shape[1:])
        except OSError as error:
            self._failure = error

    def put(self, indices: np.ndarray, rows: bytes) -> None:
        """Write the rows of consecutive ``indices``."""
        if self._file is None or self._failure or not len(indices):
            return
        try:
            self._file.stream.seek(self._start + int(indices[0]) * self._width)
            self._file.stream.write(rows)
        except OSError as error:
            self._failure = error

    def header(self, shape: tuple[int, ...], dtype: np.dtype) -> None:
        header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_2_0(self._file.stream, header)  # type: ignore[union-attr]

    def close(self) -> None:
        try:
            if self._failure:
                raise self._failure
            if self._file:
                self._file.close()
        except OSError as error:
            what = f"the predictions cannot be written: {error.strerror}"
            raise ConfigError(what, where=str(self.output)) from error

    def discard(self) -> None:
        if self._file:
            self._file.discard()


def softmax(logits: np.ndarray) -> np.ndarray:
    """Return the class probabilities (n, C) of logits (n, C)."""
    powers = np.exp(logits - logits.max(-1, keepdims=True))  # the largest is exp(0): no overflow
    return powers / powers.sum(-1, keepdims=True)


def sigmoid(logits: np.ndarray) -> np.ndarray:
    """Return the probabilities of logits, without overflow."""
    return 0.5 * (1 + np.tanh(0.5 * logits))


def sample_names(part: Source) -> Sequence[str] | np.ndarray:
    """Return the samples' names: their files, or their indices in the whole data set."""
    files, rows = getattr(part, "files", ()), getattr(part, "rows", None)
    return files or (np.arange(len(part)) if rows is None else rows)


class Table(ArrayFile):
    """A CSV file with a row for each sample of ``part``, in their order: what the model gives, (n,) or (n, k).

    ``titles``: of the k numbers; ``convert``: (n, k) in 64 bits -> the numbers that are written.
    """

    def __init__(
        self,
        output: Path,
        overwrite: bool,
        part: Source,
        titles: Sequence[str] = (),
        convert: Callable[[np.ndarray], np.ndarray] = lambda values: values,
    ) -> None:
        super().__init__(output, overwrite)
        self._titles, self._convert, self._samples = titles, convert, sample_names(part)
        self._column = "file" if getattr(part, "files", ()) else "sample"

    def header(self, shape: tuple[int, ...], dtype: np.dtype) -> None:
        self._shape, self._dtype = shape, dtype
        self._write([[self._column, *self._columns()]])

    def put(self, indices: np.ndarray, rows: bytes) -> None:
        if self._file is None or self._failure or not len(indices):
            return
        values = np.frombuffer(rows, self._dtype).reshape(len(indices), -1).astype(np.float64)  # (samples, k)
        try:
            cells = zip(indices.tolist(), self._cells(values), strict=True)
            self._write([self._samples[index], *row] for index, row in cells)
        except OSError as error:
            self._failure = error

    def _columns(self) -> Sequence[str]:
        return self._titles

    def _cells(self, values: np.ndarray) -> Iterable[Sequence[Any]]:
        return ([f"{x:.9g}" for x in row] for row in self._convert(values).tolist())  # 32 bits need 9 digits

    def _write(self, rows: Iterable[Sequence[Any]]) -> None:
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows(rows)
        self._file.stream.write(text.getvalue().encode())  # type: ignore[union-attr]


class ClassTable(Table):
    """A CSV file with the predicted class name of each sample and its softmax probability.

    ``names``: of the classes. ``every``: with the probabilities of all classes, too.
    """

    def __init__(self, output: Path, overwrite: bool, part: Source, names: Sequence[str], every: bool) -> None:
        super().__init__(output, overwrite, part)
        self._names, self._every = names, every

    def _columns(self) -> Sequence[str]:
        of_all = [f"probability of {self._title(k)}" for k in range(self._shape[1])] if self._every else []
        return ["class", "probability", *of_all]

    def _cells(self, values: np.ndarray) -> Iterable[Sequence[Any]]:
        for k, row in zip(values.argmax(-1).tolist(), softmax(values).tolist(), strict=True):
            yield [self._title(k), *(f"{p:.6f}" for p in [row[k], *(row if self._every else ())])]

    def _title(self, number: int) -> str | int:
        return self._names[number] if number < len(self._names) else number

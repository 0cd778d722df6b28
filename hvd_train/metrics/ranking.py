"""All scores of an evaluation with their binary labels, for metrics that depend on the order of scores."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

# Different scores kept at most: 32 bytes each, which every rank sends to all others.
MOST = 1 << 18
BATCHES = 4  # times as many may be unsorted

# Each row is (label, key of the score, number of samples with no, number of samples with yes).
Rows = np.ndarray  # (4, rows) uint64, sorted by label and key


class Ranking:
    """The counts of yes and no at each score, for each of ``labels``; exact up to ``most`` different scores.

    If there are more, as many low bits of all scores are dropped as necessary. So the result depends on the samples
    alone, not on batches and ranks.
    """

    def __init__(self, labels: int, most: int = MOST) -> None:
        self._labels, self._most = labels, most
        self._bits = 0  # the number of bits dropped
        self._rows: Rows = np.zeros((4, 0), np.uint64)
        self._waiting: list[Rows] = []
        self._count = 0  # the number of waiting rows

    def add(self, scores: np.ndarray, marks: np.ndarray) -> None:
        """Add a batch: scores (m,), by sample and then label, and marks (m,) as in ``Task.scores``."""
        label = np.arange(len(scores)) % self._labels
        rows = np.stack([label.astype(np.uint64), sortable(scores), marks == 1, marks == 2]).astype(np.uint64)
        self._wait(rows[:, marks > 0])

    def _wait(self, rows: Rows) -> None:
        self._waiting.append(rows)
        self._count += rows.shape[1]
        if self._count > BATCHES * self._most:  # sort rarely, as that takes time
            self._settle()

    def _settle(self) -> None:
        if not self._waiting:
            return
        self._rows = grouped(np.concatenate([self._rows, *self._waiting], 1), self._bits)
        self._waiting, self._count = [], 0
        while self._rows.shape[1] > self._most:
            self._bits += 1
            if different(self._rows, self._bits) <= self._most:
                self._rows = grouped(self._rows, self._bits)

    def to_bytes(self) -> bytes:
        self._settle()
        return np.append(np.uint64(self._bits), self._rows).tobytes()

    def joined(self, parts: Sequence[bytes]) -> Ranking:
        """Merge several rankings, given by their ``to_bytes``."""
        whole = Ranking(self._labels, self._most)
        arrays = [np.frombuffer(part, np.uint64) for part in parts]
        whole._bits = max(int(x[0]) for x in arrays)
        for x in arrays:
            whole._wait(x[1:].reshape(4, -1))
        return whole

    def histograms(self, together: bool) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return for each label the counts of no and of yes at each score, (scores,) each, lowest first.

        ``together``: treat all labels as one.
        """
        self._settle()
        rows = self._rows
        if together:
            rows = grouped(np.concatenate([rows[:1] * 0, rows[1:]]), self._bits)
        ends = np.searchsorted(rows[0], np.arange(1 if together else self._labels), side="right")
        return [(no.astype(float), yes.astype(float)) for _, _, no, yes in np.split(rows, ends, 1)[:-1]]


def sortable(scores: np.ndarray) -> np.ndarray:
    """Map float64 ``scores`` to uint64 keys (n,) of the same order; NaN is the lowest."""
    bits = (np.where(np.isnan(scores), -np.inf, scores) + 0.0).view(np.uint64)  # -0.0 + 0.0 is 0.0
    sign = np.uint64(1 << 63)
    return np.where(bits & sign, ~bits, bits | sign)


def grouped(rows: Rows, bits: int) -> Rows:
    """Drop the low ``bits`` of the keys, sort rows by label and key, and merge equal ones."""
    rows = rows.copy()
    rows[1] = rows[1] >> np.uint64(bits) << np.uint64(bits)
    rows = rows[:, np.lexsort((rows[1], rows[0]))]
    starts = np.flatnonzero(_changes(rows, bits))
    if not len(starts):
        return rows
    return np.concatenate([rows[:2, starts], np.add.reduceat(rows[2:], starts, axis=1)])


def different(rows: Rows, bits: int) -> int:
    """Count the rows that ``grouped`` would return for sorted rows."""
    return int(_changes(rows, bits).sum())


def _changes(rows: Rows, bits: int) -> np.ndarray:
    """Return for each sorted row whether its label or key differs from the row before, (rows,)."""
    label, key = rows[0], rows[1] >> np.uint64(bits)
    first = np.ones(min(1, len(key)), bool)
    return np.concatenate([first, (label[1:] != label[:-1]) | (key[1:] != key[:-1])])

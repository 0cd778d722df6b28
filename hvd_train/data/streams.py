"""A user's stream: samples that can only be iterated in order."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from hvd_train.data.column import check_alike, check_no_mask
from hvd_train.errors import DataError

END = object()
FEW = 32  # samples that are read twice: the first one alone often stays the first of a shuffle
ADVICE = "return the same samples in each iteration (fixed seeds); iterate(epoch, start) may use epoch"


class StreamSource:
    """Access by index to an iterable, or to an object with ``iterate(epoch, start)``."""

    # A later index is reached by skipping, an earlier one by starting again: cheap for a loader with rising indices.
    # So the position in the stream is the number of samples used, which every checkpoint holds.

    def __init__(self, user_stream: Any, where: str) -> None:
        self._user_stream, self._where = user_stream, where
        self._samples: Iterator[Any] = iter(())
        self._epoch: int | None = None
        # The index of the next sample; the end: nothing is open yet.
        self._position = len(user_stream)
        self.fingerprint = user_stream.fingerprint
        if hasattr(user_stream, "num_classes"):
            self.num_classes = user_stream.num_classes
        self.class_names = getattr(user_stream, "class_names", ())
        self._first = self.fetch(np.zeros(1, np.int64))
        # One sample first: an iterator that is used up has no others.
        same = all(self._anew(count) == self._anew(count) for count in (1, min(FEW, len(self))))
        self._epoch = None
        if not same:
            what = "a second iteration has other samples, so ranks and resumed runs would read different ones"
            fix = getattr(user_stream, "advice", ADVICE)
            raise DataError(what, where=where, fix=fix)

    def __len__(self) -> int:
        return len(self._user_stream)

    def _anew(self, count: int) -> list[bytes]:
        """Read the first samples from a new iterator, to compare them."""
        self._epoch = None
        return [_bytes(part) for k in range(count) for part in self._at(k, 0)]

    def fetch(self, indices: np.ndarray, epoch: int = 0) -> tuple[Any, Any]:
        """Return inputs and labels, each (k, ...) or a dict of such; indices (k,) must increase."""
        if epoch == self._epoch and self._position > 0 and len(indices) == 1 and indices[0] == 0:
            # A rank whose part of a batch is empty only needs the shapes.
            return self._first
        samples = [self._at(int(index), epoch) for index in indices]
        pair = [x for x, _ in samples], [y for _, y in samples]
        rows = np.asarray(indices).tolist()
        return _stacked(pair[0], rows, True, self._where), _stacked(pair[1], rows, False, self._where)

    def _at(self, index: int, epoch: int) -> tuple[Any, Any]:
        if epoch != self._epoch or index < self._position:
            self._open(epoch, index)
        sample = next(itertools.islice(self._samples, index - self._position, None), END)
        self._position = index + 1
        if sample is END:
            what = f"the stream ended before sample {index} of epoch {epoch}, and its length is {len(self)}"
            raise DataError(what, where=self._where, fix="let __len__ return how many samples an epoch has")
        if not isinstance(sample, tuple | list) or len(sample) != 2:
            what = f"the stream gives a {type(sample).__name__} as sample {index}"
            raise DataError(what, where=self._where, fix="it must give (inputs, label)")
        for name, part in zip(("inputs", "label"), sample, strict=True):
            for one in part.values() if isinstance(part, dict) else [part]:
                check_no_mask(one, f"{name} of sample {index}", self._where)
        return _copied(sample[0]), _copied(sample[1])  # the stream may reuse the array for the next sample

    def _open(self, epoch: int, start: int) -> None:
        jump = hasattr(self._user_stream, "iterate")
        self._samples = iter(self._user_stream.iterate(epoch, start) if jump else self._user_stream)
        self._epoch, self._position = epoch, start if jump else 0


def _bytes(part: Any) -> bytes:
    return b"".join(map(_bytes, part.values())) if isinstance(part, dict) else part.tobytes()


def _copied(part: Any) -> Any:
    return {name: _copied(x) for name, x in part.items()} if isinstance(part, dict) else np.asarray(part).copy()


def _stacked(samples: list[Any], rows: Sequence[int], is_input: bool, where: str) -> Any:
    if isinstance(samples[0], dict):
        return {name: _stacked([one[name] for one in samples], rows, is_input, where) for name in samples[0]}
    check_alike(samples, rows, is_input, where)
    return np.stack(samples)

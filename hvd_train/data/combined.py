"""Sources that combine or relabel other sources."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from typing import Any

import numpy as np

from hvd_train.data.column import INPUT, LABEL
from hvd_train.data.ragged import Varying
from hvd_train.data.wrapper import Wrapper, drawn
from hvd_train.protocol import Fields, Sample, Source


def joined_samples(parts: Iterable[Source]) -> Sample:
    """Merge the fields of all parts."""
    return reduce(Sample.joined, (part.sample for part in parts))


class Concatenated:
    """The concatenation of several parts of a data set."""

    def __init__(self, parts: Sequence[Source]) -> None:
        self._parts, self._ends = parts, np.cumsum([len(part) for part in parts])
        self.sample, self.note = joined_samples(parts), getattr(parts[0], "note", "")
        self.remarks = tuple(line for part in parts for line in getattr(part, "remarks", ()))
        self.files = [file for part in parts for file in getattr(part, "files", ())]
        self.fingerprint = " ".join(part.fingerprint for part in parts)
        varying = [one for part in parts if (one := getattr(part, "varying", None))]
        self.varying = Varying.joined(varying) if len(varying) == len(parts) else None
        self.ordered = any(getattr(part, "ordered", False) for part in parts)
        if all(hasattr(part, "label") for part in parts):
            self.label = self._label

    def __len__(self) -> int:
        return int(self._ends[-1])

    def _of_parts(self, indices: np.ndarray) -> tuple[list[tuple[Source, np.ndarray]], np.ndarray]:
        """Split indices by part; return (part, indices in it) for each, and the permutation that restores the order."""
        which = np.searchsorted(self._ends, indices, "right")
        numbers = np.unique(which).tolist()
        starts = self._ends - [len(part) for part in self._parts]
        found = [np.flatnonzero(which == k) for k in numbers]
        pieces = [(self._parts[k], np.asarray(indices)[at] - starts[k]) for k, at in zip(numbers, found, strict=True)]
        return pieces, np.argsort(np.concatenate(found))

    def _label(self, name: str, indices: np.ndarray) -> np.ndarray:
        """Return label ``name`` (k, ...) of the samples ``indices`` (k,) without reading their inputs."""
        pieces, back = self._of_parts(indices)
        return np.concatenate([part.label(name, rows) for part, rows in pieces])[back]  # type: ignore[attr-defined]

    def fetch(self, indices: np.ndarray) -> tuple[Fields, Fields]:
        parts, back = self._of_parts(indices)
        pieces = [part.fetch(rows) for part, rows in parts]
        inputs, labels = (
            {name: np.concatenate([fetched[kind][name] for fetched in pieces])[back] for name in pieces[0][kind]}
            for kind in (0, 1)
        )
        return inputs, labels


class InputsAsLabels(Wrapper):
    """A source that wraps another one and returns the inputs as labels (``data.target: inputs``)."""

    def __init__(self, source: Source) -> None:
        super().__init__(source, Sample(source.sample.inputs, self._labels(source.sample.inputs)))
        self.fingerprint = hashlib.sha256(f"itself {source.fingerprint}".encode()).hexdigest()[:16]

    def fetch(self, indices: np.ndarray) -> tuple[Fields, Fields]:
        inputs, _ = self._source.fetch(indices)
        return inputs, self._labels(inputs)

    def drawn(self, indices: np.ndarray, seed: int, epoch: int) -> tuple[Fields, Fields]:
        inputs, _ = drawn(self._source, indices, seed, epoch)
        return inputs, self._labels(inputs)

    def _labels(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        return {LABEL if name == INPUT else name: x for name, x in inputs.items()}

"""The base class of sources that wrap another one."""

from __future__ import annotations

import numpy as np

from hvd_train.protocol import Fields, Sample, Source


class Wrapper:
    """A source with the samples of another one. A subclass changes what it sets or overrides.

    Beside ``Source``: ``note``, ``remarks``: lines for the user; ``files``: one per sample; ``rows``: the samples' rows
    in the whole data set; ``varying``: the fields of variable length; ``ordered``: it is a stream.
    """

    def __init__(self, source: Source, sample: Sample | None = None) -> None:
        self._source, self.sample, self.fingerprint = source, sample or source.sample, source.fingerprint
        self.note, self.remarks = getattr(source, "note", ""), tuple(getattr(source, "remarks", ()))
        self.files, self.rows = getattr(source, "files", ()), getattr(source, "rows", None)
        self.varying, self.ordered = getattr(source, "varying", None), getattr(source, "ordered", False)

    def __len__(self) -> int:
        return len(self._source)

    def fetch(self, indices: np.ndarray) -> tuple[Fields, Fields]:
        return self._source.fetch(indices)

    def add_note(self, line: str) -> None:
        self.note = "\n".join(filter(None, [self.note, line]))


def drawn(source: Source, indices: np.ndarray, seed: int, epoch: int, *keys: np.ndarray) -> tuple[Fields, Fields]:
    """Fetch samples for training in this epoch; sources without randomness return the same in each epoch.

    ``keys`` (k,): what the random numbers of the samples are drawn by, if it is not the index: an index may repeat.
    """
    draw = getattr(source, "drawn", None)
    return draw(indices, seed, epoch, *keys) if draw else source.fetch(indices)

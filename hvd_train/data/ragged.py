"""Arrays of samples of different lengths, padded to one length when they are read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hvd_train.config.keys.lengths import LengthsConfig
from hvd_train.data.column import check_no_mask
from hvd_train.errors import DataError

LONGER = "raise data.lengths.max_length, or set data.lengths.truncate: true"


@dataclass(frozen=True)
class Varying:
    """The fields of variable length in a source, and the length (n,) of each sample."""

    lengths: np.ndarray
    inputs: tuple[str, ...]
    labels: tuple[str, ...]

    def part(self, rows: np.ndarray) -> Varying:
        return Varying(self.lengths[rows], self.inputs, self.labels)

    @classmethod
    def joined(cls, parts: Sequence[Varying]) -> Varying:
        return cls(np.concatenate([part.lengths for part in parts]), parts[0].inputs, parts[0].labels)


class RaggedRows:
    """Samples of different lengths, stored one after the other and read as padded rows (k, limit, ...).

    ``flat``: all samples, concatenated; ``starts``, ``lengths``: (n,) of each sample in it. ``padding``: the value
    after the end of a sample.
    """

    def __init__(self, flat: np.ndarray, starts: np.ndarray, lengths: np.ndarray, limit: int, padding: int = 0) -> None:
        self._flat, self._starts, self.lengths, self._padding = flat, starts, lengths, padding
        self.shape, self.dtype = (len(lengths), limit, *flat.shape[1:]), flat.dtype

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, rows: Any) -> np.ndarray:
        """Read rows (k,), or a slice."""
        lengths, positions = self.lengths[rows], np.arange(self.shape[1])
        there = positions < lengths[:, None]  # (k, limit)
        out = np.full((len(lengths), *self.shape[1:]), self._padding, self.dtype)
        out[there] = self._flat[(self._starts[rows][:, None] + positions)[there]]
        return out


def is_ragged(value: Any) -> bool:
    """Return whether a value is a list of arrays, which may have different lengths."""
    listed = isinstance(value, list | tuple) or (isinstance(value, np.ndarray) and value.dtype == object)
    return listed and len(value) > 0 and not isinstance(value[0], str | bytes) and np.ndim(value[0]) > 0


def ragged_rows(value: Iterable[Any], name: str, where: str, config: LengthsConfig, padding: int = 0) -> RaggedRows:
    """Concatenate a list of samples (length, ...), each cut to data.lengths.max_length."""
    samples = []
    for k, one in enumerate(value):
        try:
            check_no_mask(one, f"{name} of sample {k}", where)
            samples.append(np.asarray(one))
        except ValueError as error:
            raise DataError(f"{name} of sample {k} is not an array of numbers", where=where) from error
    kinds = {(x.shape[1:], x.dtype.kind) for x in samples if len(x)}
    if len(kinds) > 1:
        what = f"{name} differ in more than their lengths: {', '.join(f'{kind}' for kind in sorted(map(str, kinds)))}"
        raise DataError(what, where=where, fix="give each sample the same further axes, and one kind of numbers")
    lengths = np.array([len(x) for x in samples], np.int64)
    return joined_rows(np.concatenate(samples), lengths, name, where, config, padding)


def joined_rows(
    flat: np.ndarray, lengths: np.ndarray, name: str, where: str, config: LengthsConfig, padding: int = 0
) -> RaggedRows:
    """Make rows of samples that are concatenated in ``flat``; ``lengths``: (n,), cut to data.lengths.max_length."""
    check_lengths(lengths, name, where, config)
    if flat.dtype.kind in "iu" and not np.iinfo(flat.dtype).min <= padding <= np.iinfo(flat.dtype).max:
        flat = flat.astype(np.int64)
    limit = config.max_length
    return RaggedRows(flat, np.cumsum(lengths) - lengths, np.minimum(lengths, limit), limit, padding)


def check_lengths(lengths: np.ndarray, name: str, where: str, config: LengthsConfig) -> None:
    """Refuse samples that are empty, or longer than max_length unless ``truncate`` is set."""
    if not lengths.all():
        bad = int(np.argmin(lengths))
        raise DataError(f"{name} of sample {bad} has the length 0", where=where, fix="leave the sample out")
    if lengths.max(initial=0) > config.max_length and not config.truncate:
        bad, count = int(np.argmax(lengths)), int((lengths > config.max_length).sum())
        what = f"{name} of sample {bad} has the length {lengths[bad]:,}, over {config.max_length:,}"
        more = f" (and {count - 1:,} others)" if count > 1 else ""
        raise DataError(what + more, where=where, fix=LONGER)

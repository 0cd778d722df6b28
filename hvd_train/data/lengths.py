"""Batches of variable-length samples, padded to bucket lengths, with a mask (``data.lengths``)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hvd_train.config.keys.lengths import LengthsConfig
from hvd_train.data.order import mix, permute
from hvd_train.data.ragged import Varying
from hvd_train.data.wrapper import Wrapper, drawn
from hvd_train.errors import DataError
from hvd_train.protocol import Field, Fields, Sample, Source

WHERE = "data.lengths"
AUTO = 8  # buckets
CANDIDATES = 512  # lengths at most that are tried as a bucket
BLOCKS = 0x1E46  # the key that shuffles blocks
# Batches by tokens have a multiple of one of these samples, if at most a tenth is lost, so that ranks have equal parts.
MULTIPLES, KEPT = (8, 4, 2), 0.9


@dataclass(frozen=True)
class TokenBatches:
    """Where the batches of an epoch end, if each has as many tokens.

    ``ends``: (batches,) positions in the order of samples; ``full``: (batches,) samples of the bucket's largest batch.
    """

    ends: np.ndarray
    full: np.ndarray


class Lengths(Wrapper):
    """A source that wraps another one and pads each batch to a length that is the same on all ranks.

    That length is the bucket of the longest sample over all ranks, so N ranks compute the same as one. For training,
    all samples are permuted and split by bucket, each bucket is cut into blocks, and full blocks are permuted; the
    incomplete blocks come last. This order depends on lengths, seed and epoch, but not on the batch size, so a run can
    resume within an epoch on any number of ranks. With ``max_tokens`` the blocks are the batches, incomplete ones too.

    ``varying``: the lengths of the samples of ``source``; ``chosen(positions, seed, epoch)``: indices of samples for
    the positions of an epoch, if sampling is balanced.
    """

    def __init__(
        self, source: Source, varying: Varying, config: LengthsConfig, buckets: np.ndarray, chosen: Any = None
    ) -> None:
        super().__init__(source, with_lengths(source.sample, varying, config))
        self._config, self._chosen = config, chosen
        self._lengths, self._buckets = varying.lengths, buckets
        self._ragged = [
            {name for name, field in fields.items() if field.ragged}
            for fields in (self.sample.inputs, self.sample.labels)
        ]
        # The last one, with its (seed, epoch).
        self._orders: tuple[Any, np.ndarray, TokenBatches | None] = None, np.zeros(0, np.int64), None
        self.by_tokens = bool(config.max_tokens and len(buckets))

    def fetch(self, indices: np.ndarray) -> tuple[Fields, Fields]:
        return self._masked(self._source.fetch(indices), self._lengths[indices])

    def drawn(self, indices: np.ndarray, seed: int, epoch: int) -> tuple[Fields, Fields]:
        return self._masked(drawn(self._source, indices, seed, epoch), self._lengths_of(indices, seed, epoch))

    def _masked(self, fetched: tuple[Fields, Fields], lengths: np.ndarray) -> tuple[Fields, Fields]:
        inputs, labels = fetched
        if self._config.mask:
            inputs = {**inputs, self._config.mask: np.arange(self._config.max_length) < lengths[:, None]}
        return inputs, labels

    def _lengths_of(self, indices: np.ndarray, seed: int, epoch: int) -> np.ndarray:
        return self._lengths[self._chosen(indices, seed, epoch) if self._chosen else indices]

    def cut_length(self, indices: np.ndarray, seed: int, epoch: int | None) -> int:
        """Return the padded length of a batch of these samples; ``epoch`` None: in an evaluation."""
        lengths = self._lengths[indices] if epoch is None else self._lengths_of(indices, seed, epoch)
        longest = int(lengths.max(initial=1))
        if epoch is None or not len(self._buckets):  # an evaluation does not depend on buckets
            return longest
        return int(self._buckets[np.searchsorted(self._buckets, longest)])

    def shortened(self, fetched: tuple[Fields, Fields], length: int) -> tuple[Fields, Fields]:
        """Cut the fields of variable length from (k, max_length, ...) to (k, length, ...)."""
        inputs, labels = (
            {name: np.ascontiguousarray(x[:, :length]) if name in ragged else x for name, x in fields.items()}
            for fields, ragged in zip(fetched, self._ragged, strict=True)
        )
        return inputs, labels

    def order(self, positions: np.ndarray, seed: int, epoch: int) -> np.ndarray:
        """Map positions (k,) of an epoch to indices of samples (k,)."""
        return self._known(seed, epoch)[0][positions]

    def batches(self, seed: int, epoch: int) -> TokenBatches:
        """Return the batches of an epoch, if they are ``by_tokens``; each epoch has the same number of them."""
        batches = self._known(seed, epoch)[1]
        assert batches is not None
        return batches

    def _known(self, seed: int, epoch: int) -> tuple[np.ndarray, TokenBatches | None]:
        known, order, batches = self._orders
        if known != (seed, epoch):
            order, batches = self._order(seed, epoch)
            self._orders = (seed, epoch), order, batches  # one assignment: other threads read it
        return order, batches

    def _order(self, seed: int, epoch: int) -> tuple[np.ndarray, TokenBatches | None]:
        indices = permute(np.arange(len(self)), len(self), seed, epoch)
        if not len(self._buckets):
            return indices, None
        lengths, block, key = self._lengths_of(indices, seed, epoch), self._config.block, mix(seed, BLOCKS)
        buckets = np.searchsorted(self._buckets, lengths)
        of_buckets = [indices[buckets == k] for k in range(len(self._buckets))]
        if self.by_tokens:
            cut = [
                np.split(x, ends[:-1])
                for x, length in zip(of_buckets, self._buckets.tolist(), strict=True)
                if len(ends := self._ends(len(x), length))
            ]
            full = np.repeat([max(map(len, parts)) for parts in cut], [*map(len, cut)])
            parts = [part for batches in cut for part in batches]
            places = permute(np.arange(len(parts)), len(parts), key, epoch)
            parts = [parts[k] for k in places]
            return np.concatenate(parts), TokenBatches(np.cumsum([*map(len, parts)]), full[places])
        whole = [x[: len(x) // block * block].reshape(-1, block) for x in of_buckets]
        blocks, rest = np.concatenate(whole), [x[len(x) // block * block :] for x in of_buckets]
        if len(blocks):
            blocks = blocks[permute(np.arange(len(blocks)), len(blocks), key, epoch)]
        return np.concatenate([blocks.reshape(-1), *rest]), None

    def _ends(self, count: int, length: int) -> np.ndarray:
        """Return the ends of the batches by tokens that ``count`` samples of a bucket make, as equal as they can be."""
        most = (self._config.max_tokens or 0) // length
        unit = next((n for n in MULTIPLES if most // n * n >= KEPT * most), 1)
        units, batches = -(-count // unit), -(-count // (most // unit * unit))
        return np.minimum(np.arange(1, batches + 1) * units // batches * unit, count)

    def describe(self) -> str:
        """Write lengths, buckets and the share of padding as one line."""
        n, limit = self._lengths, self._config.max_length
        low, high = int(n.min()), int(n.max())
        if not len(self._buckets):
            return f"{WHERE}: {low:,} to {high:,} (max_length {limit:,}); each batch is padded to its longest sample"
        padded = self._buckets[np.searchsorted(self._buckets, n)]
        share, all_ = 1 - n.sum() / padded.sum(), 1 - n.mean() / high
        listed = ", ".join(map(str, self._buckets.tolist()))
        batches = ""
        if self.by_tokens:
            counts = np.diff(self.batches(0, 0).ends, prepend=0)
            batches = f"; {len(counts):,} batches of {counts.min():,} to {counts.max():,} samples"
        return (
            f"{WHERE}: {low:,} to {high:,} (max_length {limit:,}); buckets {listed}: "
            f"{share:.0%} padding ({all_:.0%} if all samples were padded to the longest){batches}"
        )


def with_lengths(sample: Sample, varying: Varying, config: LengthsConfig) -> Sample:
    """Mark the fields of variable length as ragged, and add the mask to the inputs."""

    def marked(fields: Any, names: tuple[str, ...]) -> dict[str, Field]:
        # A single field of a trained run may have another name than in the data.
        names = names if all(name in fields for name in names) else tuple(fields)[: len(names)]
        return {name: replace(field, ragged=name in names) for name, field in fields.items()}

    inputs = marked(sample.inputs, varying.inputs)
    if config.mask:
        if config.mask in inputs:
            what = f"the data have an input '{config.mask}' of their own"
            raise DataError(what, where=f"{WHERE}.mask", fix="give the mask another name")
        inputs[config.mask] = Field((config.max_length,), "bool", ragged=True)
    return replace(sample, inputs=inputs, labels=marked(sample.labels, varying.labels))


def buckets_of(lengths: np.ndarray, config: LengthsConfig) -> np.ndarray:
    """Return the sorted lengths to which batches are padded, or () to pad each batch to its longest sample.

    ``auto`` takes the 1/8, 2/8, ... quantiles of the training samples, and for batches by tokens the lengths with the
    least padding. The last bucket is max_length.
    """
    if config.buckets is None:
        return np.zeros(0, np.int64)
    if config.buckets == "auto" and config.max_tokens:
        bounds = _least_padding(lengths, AUTO)
    elif config.buckets == "auto":
        bounds = np.quantile(lengths, np.arange(1, AUTO + 1) / AUTO, method="higher")
    else:
        bounds = np.array(config.buckets)
    return np.unique(np.append(bounds.astype(np.int64), config.max_length))


def _least_padding(lengths: np.ndarray, count: int) -> np.ndarray:
    """Return at most ``count`` rising lengths, the last of them the longest, to which samples are padded by least."""
    values = np.unique(lengths)
    if len(values) > CANDIDATES:
        values = values[np.linspace(0, len(values) - 1, CANDIDATES).round().astype(int)]
    # below[k]: samples that are at most values[k - 1] long. Padded from below[i] to below[j], they take
    # (below[j] - below[i]) values[j - 1] places.
    below = np.append(0, np.searchsorted(np.sort(lengths), values, "right"))
    places = np.append(0, values) * (below - below[:, None]).astype(float)  # (from, to)
    places[np.tril_indices(len(below), -1)] = np.inf
    least, chosen = places[0], []
    for _ in range(count - 1):
        through = least[:, None] + places
        chosen.append(through.argmin(axis=0))
        least = through.min(axis=0)
    ends = [len(values)]
    for before in reversed(chosen):
        ends.append(int(before[ends[-1]]))
    return values[np.unique([end for end in ends if end]) - 1]

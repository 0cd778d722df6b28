"""Mixup and CutMix: mix each training sample with another one, and their losses as well."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from hvd_train.config import TransformConfig
from hvd_train.data.augment import RandomNumbers, as_stored, below
from hvd_train.data.order import mix
from hvd_train.data.wrapper import Wrapper
from hvd_train.errors import DataError
from hvd_train.protocol import PARTNER, SHARE, Fields, Sample, Source

FOR_BOTH = "training metrics compare with the class that has the larger share"


def _mixup(a: np.ndarray, b: np.ndarray, shares: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """share x sample + (1 - share) x another sample, and the same for the loss (Zhang et al. 2018); alpha: 1, p: 1"""
    of_place = shares.astype(np.float32).reshape(-1, *[1] * (a.ndim - 1))
    a[...] = as_stored(of_place * a + (1 - of_place) * b, a.dtype)
    return shares


def _cutmix(a: np.ndarray, b: np.ndarray, shares: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """a rectangle of another image, whose class is weighted by its area (Yun et al. 2019); alpha: 1, p: 1"""
    height, width = a.shape[1:3]
    halves = 0.5 * np.sqrt(1 - shares)[:, None] * [height, width]  # half the sides of the rectangles
    middles = (numbers * [height, width]).astype(np.int64)
    low = np.maximum(middles - halves.astype(np.int64), 0)
    high = np.minimum(middles + halves.astype(np.int64), [height, width])
    for image, other, (top, left), (bottom, right) in zip(a, b, low.tolist(), high.tolist(), strict=True):
        image[top:bottom, left:right] = other[top:bottom, left:right]
    # The area without what is cut off at the border.
    return 1 - np.prod(high - low, axis=1) / (height * width)


# Each mixes ``b`` into ``a`` (k, ...) in place, and returns the shares (k,) that ``a`` really keeps: CutMix cuts
# rectangles off at the border. ``shares`` (k,): the drawn ones; ``numbers``: (k, 2) in [0, 1).
MIXING: dict[str, Callable[[np.ndarray, np.ndarray, np.ndarray, np.ndarray], np.ndarray]] = {
    "mixup": _mixup,
    "cutmix": _cutmix,
}


def beta(alpha: float, numbers: np.ndarray) -> np.ndarray:
    """Turn uniform ``numbers`` (k, 3) into draws (k,) from Beta(alpha, alpha) (Devroye 1996, "one line of code")."""
    u, v, sign = numbers.T
    with np.errstate(over="ignore", divide="ignore"):  # a small alpha gives 0 or 1
        root = np.sqrt(1 + 1 / (((1 - u) ** (-1 / alpha) - 1) * np.cos(2 * np.pi * v) ** 2))
    return 0.5 + np.where(sign < 0.5, -0.5, 0.5) / root


class Mixed(Wrapper):
    """A source that wraps another one and mixes each training sample with a partner.

    The partner is a random position of the epoch, with its own transforms, so both have the same distribution of
    classes. All is a pure function of (seed, epoch, index), so 1 rank = N ranks. If there are several ``configs``, each
    sample uses a random one. The label is the class with the larger share; the other class and the share are added to
    the labels (``PARTNER``, ``SHARE``). ``number``: the number of transforms before, as a key of random numbers.
    """

    def __init__(self, source: Source, configs: Sequence[tuple[TransformConfig, str]], number: int) -> None:
        super().__init__(source)
        for config, where in configs:
            _check(self.sample, self.ordered, config, where)
        self._configs, self._number = [config for config, _ in configs], number
        (self._label,) = self.sample.labels
        names = " or ".join(config.name for config in self._configs)
        self.add_note(f"{names}: {FOR_BOTH}")

    def drawn(self, indices: np.ndarray, seed: int, epoch: int) -> tuple[Fields, Fields]:
        indices, count = np.asarray(indices), len(indices)
        draws = RandomNumbers(mix(mix(seed, epoch), self._number), indices)
        numbers = draws.uniform(8)
        partners = below(draws.bits(8)[:, 7], len(self))
        both = np.concatenate([indices, partners])
        inputs, labels = self._source.drawn(both, seed, epoch)  # type: ignore[attr-defined]
        shares = np.ones(count)
        which = (numbers[:, 0] * len(self._configs)).astype(np.int64)
        for k, config in enumerate(self._configs):
            rows = np.flatnonzero((which == k) & (numbers[:, 1] < (1.0 if config.p is None else config.p)))
            if len(rows):
                shares[rows] = _mix(inputs, rows, rows + count, numbers[rows, 2:7], config)
        first, second = labels[self._label][:count], labels[self._label][count:]
        larger = shares >= 0.5
        mixed = {
            self._label: np.where(larger, first, second),
            PARTNER: np.where(larger, second, first),
            SHARE: np.maximum(shares, 1 - shares).astype(np.float32),
        }
        return {name: x[:count] for name, x in inputs.items()}, mixed


def _mix(
    inputs: Mapping[str, np.ndarray], rows: np.ndarray, others: np.ndarray, numbers: np.ndarray, config: TransformConfig
) -> np.ndarray:
    """Mix samples ``others`` (k,) into samples ``rows`` (k,) in place; return the shares (k,) that rows keep."""
    drawn_shares = beta(config.alpha or 1.0, numbers[:, :3])
    kept = drawn_shares
    for x in inputs.values():
        a = x[rows]
        kept = MIXING[config.name](a, x[others], drawn_shares, numbers[:, 3:])
        x[rows] = a
    return kept


def _check(sample: Sample, ordered: bool, config: TransformConfig, where: str) -> None:
    """Refuse inputs or labels that cannot be mixed."""
    if ordered:
        what = "a stream is read in its own order, so there is no other sample to mix with"
        raise DataError(what, where=where, fix="leave it out, or give an object with fetch")
    fields = [*sample.labels.values()]
    # Whole numbers are classes, or a user's loss takes them: it is called with those of both samples.
    if len(fields) != 1 or fields[0].shape or fields[0].masked or not (fields[0].classes or fields[0].whole):
        listed = ", ".join(f"{name} {field}" for name, field in sample.labels.items())
        fix = "leave it out: it needs one class per sample (task.loss: cross_entropy, or a loss of yours)"
        raise DataError(f"the labels are not one class per sample: {listed}", where=where, fix=fix)
    for name, field in sample.inputs.items():
        if field.whole:
            what = f"{name} of {field} holds whole numbers, which cannot be averaged"
            raise DataError(what, where=where, fix="it is for numbers with a fraction and for bytes of images")
        if config.name == "cutmix" and (not field.image or len(sample.inputs) > 1):
            what = f"{name} of shape {field.shape} is not the only input, or not an image (height, width, channels)"
            raise DataError(what, where=where, fix="take mixup; or set data.images: true if it is one")

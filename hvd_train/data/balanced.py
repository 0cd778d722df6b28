"""Class-balanced sampling of the training data (``data.sampling: balanced``)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from hvd_train.data.classes import all_names
from hvd_train.data.order import mix, permute
from hvd_train.data.wrapper import Wrapper, drawn
from hvd_train.errors import DataError
from hvd_train.protocol import Field, Fields, Source

PIECE = 4096  # labels read at once
WHERE = "data.sampling: balanced"


class Balanced(Wrapper):
    """A source that wraps another one and draws equally many training samples of each class.

    An epoch keeps its length n: position q has class q mod C. Each class goes through a permutation of its samples,
    continues it in the next epoch, and draws a new one at its end. So samples of rare classes repeat, and two samples
    of a class have always been used equally often, up to one use. (Draws with replacement would miss a third of the
    rarest class in an epoch, by chance.) The order is a pure function of labels, seed and epoch.

    ``fetch`` is not balanced: an evaluation of the training part reads each sample once.
    """

    def __init__(self, source: Source, ignore: int) -> None:
        """Raises DataError if a class has no sample; ``ignore``: the label of unlabeled samples (``ignore_index``)."""
        name, field = _class_label(source)
        super().__init__(source)
        labels = np.concatenate([*labels_of(source, name)])
        # ignore_index is not a class, even if it lies in [0, C).
        taken = [k for k in range(field.classes or 0) if not (field.masked and k == ignore)]
        in_order = np.argsort(labels, kind="stable")
        bounds = (np.searchsorted(labels[in_order], taken, side) for side in ("left", "right"))
        # The samples of each class (n_c,), in the order of the data.
        self._members = [in_order[a:b] for a, b in zip(*bounds, strict=True)]
        self._counts = np.array([len(of_class) for of_class in self._members])
        if not self._counts.all():
            missing = [taken[k] for k in np.flatnonzero(self._counts == 0)[:10]]
            lacking = ", ".join(all_names(field.names, field.classes or 0)[k] for k in missing)
            fix = "leave the class out of data.classes and data.num_classes, or leave data.sampling out"
            raise DataError(f"no training sample is of class {lacking}", where=WHERE, fix=fix)
        self.add_note(self._described(len(labels) - self._counts.sum()))

    def _described(self, unlabelled: int) -> str:
        low, rest = divmod(len(self), len(self._counts))
        each = f"{low:,} or {low + 1:,}" if rest else f"{low:,}"
        there = f"{self._counts.min():,} to {self._counts.max():,}"
        what = f"{WHERE}: an epoch takes {each} samples of each class (classes have {there})"
        return what + f"; {unlabelled:,} samples without a class are left out" * bool(unlabelled)

    def drawn(self, indices: np.ndarray, seed: int, epoch: int) -> tuple[Fields, Fields]:
        # A sample that is drawn twice gets other random numbers.
        return drawn(self._source, self.chosen(indices, seed, epoch), seed, epoch, np.asarray(indices))

    def chosen(self, positions: np.ndarray, seed: int, epoch: int) -> np.ndarray:
        """Map ``positions`` (k,) in [0, n) of an epoch to indices of samples (k,)."""
        classes = len(self._counts)
        turns, labels = np.divmod(np.asarray(positions, np.int64), classes)
        # The samples of each class in an epoch: the first classes may have one more.
        each = (len(self) + classes - 1 - np.arange(classes)) // classes
        rounds, turns = np.divmod(epoch * each[labels] + turns, self._counts[labels])
        out = np.empty(len(labels), np.int64)
        pairs, which = np.unique(np.stack([labels, rounds]), axis=1, return_inverse=True)
        for number, (label, round_) in enumerate(pairs.T.tolist()):
            here = np.flatnonzero(which.reshape(-1) == number)
            members = self._members[label]
            out[here] = members[permute(turns[here], len(members), mix(seed, label), round_)]
        return out


def _class_label(source: Source) -> tuple[str, Field]:
    """Return the name and the field of the only label, which must be one class per sample."""
    if getattr(source, "ordered", False):
        raise DataError("a stream is read in its own order", where=WHERE, fix="leave it out")
    fields = source.sample.labels
    name, field = next(iter(fields.items()), ("", None))
    if len(fields) != 1 or field is None or not field.classes or field.shape:
        listed = ", ".join(f"{key} {one}" for key, one in fields.items()) or "none"
        fix = "leave it out: it needs one class per sample (task.loss: cross_entropy)"
        raise DataError(f"the labels are not one class per sample: {listed}", where=WHERE, fix=fix)
    return name, field


def labels_of(source: Source, name: str) -> Iterator[np.ndarray]:
    """Read the labels of all samples, (k,) int64 at a time."""
    # Sources without ``label`` cannot read labels alone: their samples are read completely, once.
    read = getattr(source, "label", None) or (lambda name, indices: source.fetch(indices)[1][name])
    for start in range(0, len(source), PIECE):
        yield np.asarray(read(name, np.arange(start, min(start + PIECE, len(source))))).reshape(-1).astype(np.int64)

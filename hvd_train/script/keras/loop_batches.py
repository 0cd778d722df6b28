"""Which batch of ``hk.shard`` a step of the script's loop belongs to, and the step's weight.

In a plain loop it is the batch that was taken last. Where the order of batches and steps does not tell (after a loop
that ended early, in lists of batches, with two data sets at once), it is known by its length: if the models' inputs of
the step have as many rows on all ranks as one of the rank's batches, each rank counts by these rows.
"""

from __future__ import annotations

import functools
import threading
import warnings
from typing import Any

import keras
import numpy as np

from hvd_train.script.shared.same_work import warn_of_same_work

MOST = 8  # lengths of batches that are kept, the latest first
# Positions in ``LoopBatches.values``; the lengths follow.
PART, OTHER, ORDERED, UNSEEN, UNFIT, UNIT, LENGTHS = range(7)
HEAD = 5  # numbers of a step, see ``of_step``
FIT, ROWS, DOUBT, KINDS = range(1, HEAD)


class LoopBatches:
    """The state of this process' loops over ``hk.shard``, also in a variable, which graphs read.

    ``PART``: the step's weight by the order of batches, samples of this rank over the usual number. ``OTHER``: the
    weight of inputs that are no such batch. ``ORDERED``: whether the order tells the batch. ``UNSEEN``, ``UNFIT``:
    whether to warn if it does not, and the inputs are not seen, or are no batch. ``UNIT``: the usual number of samples,
    equal on all ranks.
    """

    def __init__(self) -> None:
        self.values = np.ones(LENGTHS + MOST)
        self.values[LENGTHS:] = 0
        self.variable: Any = None  # on several ranks
        self._home = threading.get_ident()
        self._foreign = False  # whether another thread takes batches: ranks may differ in how far it is

    def add_variable(self) -> None:
        if self.variable is None:
            self.variable = keras.Variable(self.values, trainable=False, dtype="float64", name="loop_batches")

    def begins(self, unit: int) -> None:
        """Set the usual number of samples; on all ranks."""
        self._home = threading.get_ident()
        self._set(self._lengths(), unit=unit)

    def taken(self, samples: int, part: float, ordered: bool, early: bool, several: bool) -> None:
        """Record a batch. ``part``: of the step's batch. ``several``: of other data sets."""
        lengths = [samples, *(n for n in self._lengths() if n != samples)]
        self._foreign = self._foreign or threading.get_ident() != self._home
        if self._foreign:
            self._set(lengths, part=1.0, other=1.0, ordered=False, unseen=True, unfit=False)
        else:
            unseen = not (ordered or early)
            self._set(lengths, part=part, other=part, ordered=ordered, unseen=unseen, unfit=several)

    def ended(self, part: float, within: bool) -> None:
        """Record the end of a loop. Later steps may use other data.

        ``part``: of a batch whose step is still to come. ``within``: it is of another loop, around this one.
        """
        other = part if within else 1.0
        unseen = within or part == 1.0
        self._set(self._lengths(), part=part, other=other, ordered=False, unseen=unseen, unfit=within)

    def stepped(self, eager: bool) -> None:
        """Record a step: further ones may be on the same batch, or on other data while the loop is open."""
        if eager:
            v = self.values
            if v[ORDERED]:
                self._set(self._lengths(), other=v[PART], ordered=False, unseen=False, unfit=v[PART] != 1)
            return
        v = keras.ops.convert_to_tensor(self.variable.value)
        zero = keras.ops.zeros_like(v[PART])
        changed = {OTHER: v[PART], ORDERED: zero, UNSEEN: zero, UNFIT: keras.ops.cast(v[PART] != 1, "float64")}
        after = keras.ops.stack([changed.get(k, v[k]) for k in range(len(self.values))])
        self.variable.assign(keras.ops.where(v[ORDERED] > 0, after, v))

    def _lengths(self) -> list[float]:
        return self.values[LENGTHS:].tolist()

    def _set(self, lengths: list[float], **changed: Any) -> None:
        for name, value in changed.items():
            self.values[globals()[name.upper()]] = value
        self.values[LENGTHS:] = lengths[:MOST]
        if self.variable is not None:
            self.variable.assign(self.values)

    def of_step(self, rows: list[Any], eager: bool) -> Any:
        """Return (5,): the weight by order, whether ``rows``, of the inputs, are those of a batch, the weight by them,
        whether to warn, and the sum of the lengths, which differs if ranks' parts of a batch have differed."""
        if eager:
            return self._of_eager_step({int(n) for n in rows})
        v = keras.ops.convert_to_tensor(self.variable.value)
        unknown = 1 - v[ORDERED]
        if not rows:
            zero = keras.ops.zeros_like(unknown)
            return keras.ops.stack([v[PART], zero, zero, unknown * v[UNSEEN], keras.ops.sum(v[LENGTHS:])])
        given = keras.ops.stack([keras.ops.cast(n, "float64") for n in rows])
        found = keras.ops.any(keras.ops.expand_dims(v[LENGTHS:], 1) == given, axis=1)  # (MOST,)
        found = keras.ops.logical_and(found, v[LENGTHS:] > 0)
        fits = keras.ops.cast(keras.ops.any(found), "float64") * unknown
        several = keras.ops.cast(keras.ops.sum(keras.ops.cast(found, "int32")) > 1, "float64")
        by_rows = v[LENGTHS:][keras.ops.argmax(keras.ops.cast(found, "int32"))] / v[UNIT]
        by_order = keras.ops.where(unknown > 0, v[OTHER], v[PART])
        return keras.ops.stack(
            [by_order, fits, fits * by_rows, unknown * ((1 - fits) * v[UNFIT] + several), keras.ops.sum(v[LENGTHS:])]
        )

    def _of_eager_step(self, rows: set[int]) -> Any:
        v = self.values
        kinds = v[LENGTHS:].sum()
        fitting = [n / v[UNIT] for n in self._lengths() if n and n in rows]
        if v[ORDERED]:
            numbers = [v[PART], 0, 0, 0, kinds]
        elif fitting:  # if batches of several lengths do, it is doubtful
            numbers = [v[OTHER], 1, fitting[0], len(fitting) > 1, kinds]
        else:
            numbers = [v[OTHER if rows else PART], 0, 0, v[UNFIT if rows else UNSEEN], kinds]
        return keras.ops.convert_to_tensor(np.array(numbers, np.float64))


@functools.cache
def warn_of_unknown_batch() -> None:
    """Warn once that an uneven batch may have been counted wrongly."""
    what = "it is not known which batch a step belongs to, so where ranks' parts differ in length it may count wrongly"
    fix = "call the model on the batch within the tape, or take each batch in a for loop and make its step there"
    warnings.warn(f"{what}; hk.shard; {fix}", stacklevel=2)


@functools.cache
def warn_of_own_statistics() -> None:
    """Warn once that running statistics were not averaged, as a loop was left."""
    what = "a loop was left before its end, so running statistics are each rank's own"
    warnings.warn(f"{what}; hk.shard; call hk.barrier() after the loop on all ranks, which averages them", stacklevel=2)


@functools.cache
def warn_of_same_loop() -> None:
    """Warn once that all ranks made their first steps with the same gradients."""
    warn_of_same_work("hk.shard")

"""A named array of all samples, and its conversion to a field of a batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hvd_train.data.classes import Lookup
from hvd_train.errors import DataError
from hvd_train.protocol import Field

INPUT, LABEL = "input", "label"  # names of arrays that came without one
ROUNDING = 1e-3  # tolerance for labels in [0, 1]: masks that were resized
# Rounding errors above COARSE x (max - min) deserve a remark; spreads below SAME x the largest value count as none.
COARSE, SAME = 1e-3, 1e-12
# Not every framework computes with these types, so they become the next larger one.
TRAVEL = {"uint16": "int32", "uint32": "int64", "uint64": "int64"}


def is_uint64(dtype: np.dtype) -> bool:
    """Return whether these are unsigned integers of 64 bits, in either order of bytes."""
    return dtype.kind == "u" and dtype.itemsize == 8


def is_class(number: int, classes: int | None) -> bool:
    """Return whether ``number`` (such as ``task.ignore_index``) is in [0, classes)."""
    return 0 <= number < (classes or 0)


@dataclass(frozen=True)
class Column:
    """A named array of all samples: ``values`` needs only ``shape``, ``dtype``, ``len`` and ``[rows]``.

    ``title``: its name in messages; ``lookup``: values -> class numbers; ``yes_or_no``: labels of the loss bce, which
    has no lower bound for labels outside of [0, 1].
    """

    title: str
    values: Any
    field: Field
    where: str
    lookup: Lookup | None = None
    yes_or_no: bool = False

    @classmethod
    def of_inputs(
        cls, title: str, values: Any, ids: bool, alone: bool, where: str, images: bool | None = None
    ) -> Column:
        """Make the column of an input (n, ...).

        ``ids``: bytes are ids, else they are divided by 255. ``alone``: the only input and unnamed: if it is an image
        (height, width), it gets a channel axis. ``images``: as in ``is_image``.
        """
        kind, shape = np.dtype(values.dtype), tuple(int(k) for k in values.shape[1:])
        if kind.kind not in "fuib":
            fix = "give numbers, as uint8 or float32" + "; data.features names the columns to take" * ("'" in title)
            if kind.kind in "UO":
                fix += "; of texts the tokens ('hvd-train guide lengths'), or read a file of them by labeled_text"
            raise DataError(f"{title} are of type {kind}", where=where, fix=fix)
        dtype = "float32" if kind.kind == "f" else TRAVEL.get(kind.name, kind.name)
        # Bytes are copied to the device as bytes and divided there.
        divisor = 255.0 if kind == np.uint8 and not ids else 1.0
        image = is_image(shape, kind, alone, images)
        field = Field((*shape, 1) if image and len(shape) == 2 else shape, dtype, divisor, image=image)
        return cls(title, values, field, where)

    @classmethod
    def of_numbers(
        cls,
        title: str,
        values: Any,
        where: str,
        as_stored: bool,
        images: bool | None = None,
        inputs: Sequence[Field] = (),
    ) -> Column:
        """Make the column of labels (n, ...) that are not classes, but numbers or images.

        ``as_stored``: for a user's loss (n, 1) is kept, else it becomes (n,), and bytes are not divided. ``inputs``:
        the fields of the inputs. Labels may be images if an input is one; a label per pixel of it is.
        """
        kind, shape = np.dtype(values.dtype), tuple(int(k) for k in values.shape[1:])
        if len(shape) > (2 if as_stored else 1):
            pictures = [field for field in inputs if field.image]
            if images is None and (not pictures or any(field.shape[:2] == shape[:2] for field in pictures)):
                images = bool(pictures)
            column = cls.of_inputs(title, values, as_stored, True, where, images)
            whole = as_stored and kind == np.uint8  # as other whole numbers
            return replace(column, field=replace(column.field, dtype="int64")) if whole else column
        if kind.kind not in "fuib":
            raise DataError(f"{title} are of type {kind}", where=where, fix="give numbers")
        dtype = "float32" if kind.kind == "f" else "bool" if kind.kind == "b" else "int64"
        return cls(title, values, Field(() if shape == (1,) and not as_stored else shape, dtype), where)

    def of(self, values: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Convert values of the samples ``rows`` to the dtype and shape of the field."""
        if self.lookup:
            values = self.lookup(values)
        if self.field.dtype == "float32":
            # Values that overflow become infinite and are found below.
            with np.errstate(over="ignore"):
                values = values.astype(np.float32, copy=False)
                # Cheaper than a test of each value; the sum itself may overflow.
                finite = math.isfinite(np.sum(values))
            if not finite:
                self.check(np.isfinite(values), rows, "NaN or infinity")
        elif is_uint64(values.dtype):
            self.check(np.less(values, 1 << 63), rows, "a number of more than 63 bits")
        if self.yes_or_no and self.field.divisor == 1 and not self.field.classes:
            good = (values >= -ROUNDING) & (values <= 1 + ROUNDING)
            self.check(good, rows, "a label that is not from 0 to 1, as task.loss: bce requires")
        return values.astype(self.field.dtype, copy=False).reshape(len(rows), *self.field.shape)

    def check_kept(self, values: np.ndarray, rows: np.ndarray, is_input: bool) -> None:
        """Check that values can be cast to the dtype of sample 0 without loss, and have the same scale."""
        first = np.dtype(self.values.dtype)
        kinds = {first, values.dtype}
        divided = self.field.divisor != 1 or (first.kind == "f" and (is_input or len(self.field.shape) > 1))
        if np.dtype(np.uint8) in kinds and len(kinds) > 1 and divided:
            what = f"{self.title} of sample 0 are {first}, and those of sample {rows[0]} {values.dtype}"
            fix = "give all samples one type: bytes are divided by 255, and other numbers are not"
            raise DataError(what, where=self.where, fix=fix)
        if first.kind in "iub" and values.dtype.kind not in "fiub":
            odd = [
                row
                for row, x in zip(rows, values, strict=True)
                if np.asarray(np.asarray(x).tolist()).dtype.kind not in "fiub"
            ]
            if odd:
                what = f"{self.title} of sample 0 are {first}, and sample {odd[0]} holds a missing value or a word"
                raise DataError(what, where=self.where, fix="give all samples numbers of one type")
            values = np.asarray(values.tolist())
        if first.kind == "f" or values.dtype.kind not in "fiub" or np.can_cast(values.dtype, first):
            return
        with np.errstate(invalid="ignore"):
            good = values.astype(first) == values
        if not good.all():
            bad = np.argwhere(~good)[0]
            what = f"{self.title} of sample 0 are {first}, and sample {rows[bad[0]]} holds {values[tuple(bad)]}"
            raise DataError(what, where=self.where, fix="give all samples one type: np.asarray(x, np.float32)")

    def check(self, entries: np.ndarray, rows: np.ndarray, what: str) -> None:
        """Raise DataError unless all ``entries`` (k, ...) are True; ``what`` describes a bad one."""
        good = entries.reshape(len(entries), -1).all(axis=1)
        if not good.all():
            if entries.ndim == 2 and len(entries) > 1 and not (columns := entries.any(axis=0)).all():
                what = (
                    f"column {int(np.argmin(columns))} of the {self.title} holds {what} in each of {len(rows)} samples"
                )
                fix = "if it is text that was read as numbers, leave the column out"
                raise DataError(what, where=self.where, fix=fix)
            bad = int(rows[int(np.argmin(good))])
            raise DataError(f"sample {bad} holds {what}", where=self.where, fix="correct or remove it")

    def remark_on_rounding(self, values: np.ndarray) -> str:
        """Return a remark if float32 cannot tell 64-bit values (n, ...) apart, such as times and ids; else ""."""
        with np.errstate(over="ignore", invalid="ignore"):
            stored = values.astype(np.float32)
            whole = (values == np.rint(values)) & np.isfinite(values)
            lost = whole & (stored.astype(values.dtype) != values)
        # The same text for all parts of the data, so that it is printed once.
        if lost.any():
            return (
                f"{self.title} hold whole numbers above 2^24, which float32 rounds (leave out ids; count times from 0)"
            )
        if loses_differences(values, stored).any():
            return f"{self.title} hold numbers whose differences float32 rounds (count times from 0; subtract a mean)"
        return ""

    @property
    def note(self) -> str:
        """Return what is to be said about the dtype, after the title: bytes and integers are ambiguous."""
        kind = np.dtype(self.values.dtype)
        if self.field.divisor != 1:
            return "are uint8 and are divided by 255 (store ids, such as tokens, as int32)"
        if kind == np.uint8:
            return "are uint8 with a label per position: treated as ids, not divided by 255"
        if kind.kind in "iu":
            return f"are {kind} and reach the model as whole numbers (store quantities as float32)"
        return ""


def loses_differences(values: np.ndarray, stored: np.ndarray) -> np.ndarray:
    """Return for each column of float64 ``values`` (n, ...) if their float32 copy ``stored`` loses the differences.

    For example, float32 has steps of 128 for seconds since 1970.
    """
    rows = np.asarray(values, np.float64).reshape(len(values), -1)
    with np.errstate(invalid="ignore", over="ignore"):
        error = np.abs(stored.reshape(rows.shape) - rows).max(axis=0)
        spread, largest = np.ptp(rows, axis=0), np.abs(rows).max(axis=0)
        # A smaller spread is rounding noise of earlier sums: the values are equal.
        return (spread > SAME * largest) & (error > COARSE * spread)


def check_alike(values: Sequence[np.ndarray], rows: Sequence[int], is_input: bool, where: str) -> None:
    """Raise DataError if samples ``rows`` (k,) cannot be stacked without a change of their values or scale."""
    kinds = [x.dtype for x in values]
    numbers = [kind.kind in "fiub" for kind in kinds]
    fix = "give all samples numbers of one type"
    if len({*numbers}) > 1:
        # NumPy would turn the numbers beside a word into words, of which each is True.
        odd, even = numbers.index(False), numbers.index(True)
        what = f"sample {rows[odd]} holds {values[odd].tolist()!r}, and sample {rows[even]} a number"
        raise DataError(what, where=where, fix=f"{fix}, and leave out what is missing")
    if len({*kinds}) > 1 and np.dtype(np.uint8) in kinds and (is_input or values[0].ndim > 1):
        odd, even = kinds.index(np.dtype(np.uint8)), [kind != np.uint8 for kind in kinds].index(True)
        what = f"sample {rows[odd]} is of uint8, and sample {rows[even]} of {kinds[even]}"
        raise DataError(what, where=where, fix=f"{fix}: bytes are divided by 255, and other numbers are not")


def check_no_mask(value: Any, name: str, where: str) -> None:
    """Refuse a masked array with missing values: the numbers under its mask are arbitrary."""
    if np.ma.is_masked(value):
        missing = np.argwhere(np.ma.getmaskarray(value))
        first = ", ".join(map(str, missing[0].tolist()))
        what = f"{name} are a masked array, and {len(missing):,} values are missing, the first at [{first}]"
        raise DataError(what, where=where, fix="leave these samples out, or fill the values: x.filled(...)")


def is_image(shape: tuple[int, ...], kind: np.dtype, alone: bool, images: bool | None) -> bool:
    """Return whether samples of this shape are images: (height, width, channels), or (height, width) if ``alone``.

    ``images``: the configuration or the kind of data decides; None: uint8 is an image, and so are 1 or 3 channels.
    """
    if len(shape) not in ((2, 3) if alone else (3,)):
        return False
    return (kind == np.uint8 or (len(shape) == 3 and shape[-1] in (1, 3))) if images is None else images

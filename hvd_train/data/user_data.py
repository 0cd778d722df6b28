"""Data of the user: a function or an object that gives arrays, sources or streams."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from hvd_train.config import DataConfig, TaskConfig
from hvd_train.config.user_code import user_function
from hvd_train.data.arrays import Arrays
from hvd_train.data.classes import Known
from hvd_train.data.dataset import DataRequest, Parts, known
from hvd_train.data.streams import Stream
from hvd_train.errors import DataError
from hvd_train.protocol import Fields, Source


def user_parts(config: DataConfig, task: TaskConfig, request: DataRequest, user_data: Any) -> Parts:
    """Open (train, val), or (train, val, test), each of which is a source or a pair of arrays.

    ``user_data``: these, or a function(**data.options) that gives them; None: ``data.name`` names the function.
    """
    where = "data" if user_data is not None else f"data.name: {config.name}"
    made = user_data
    if user_data is None or callable(user_data):
        made = _call(user_data or imported(config.name, where), config, where)
    listed = isinstance(made, tuple | list) and len(made) in (2, 3)
    if not listed or (len(made) == 3 and any(hasattr(part, "__array__") for part in made)):
        fix = "it must return (train, val), or (train, val, test)"
        raise DataError(f"gave {_describe(made)}", where=where, fix=fix)
    classes, parts = known(config, request), dict[str, Source]()
    for name, part in zip(("train", "val", "test"), made, strict=False):
        if name == "test" and not request.reads_test:
            continue
        if part is None and request.split:  # there is none
            continue
        parts[name] = _source(part, config, task, f"{where}, {name}", classes, request.labels)
        classes = classes.after(parts[name]) if name == "train" else classes
    if not parts:
        raise DataError("gave no samples", where=where, fix="it must return (train, val)")
    return parts


def imported(name: str, where: str) -> Callable[..., Any]:
    """Import a function of the user; a DataError says why it cannot be."""
    return user_function(name, where, DataError)


def _call(function: Callable[..., Any], config: DataConfig, where: str) -> Any:
    try:
        return function(**config.options)
    except DataError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise DataError(f"the function failed: {reason}", where=where, fix="look at data.options too") from error


def _source(
    part: Any, config: DataConfig, task: TaskConfig, where: str, classes: Known, labelled: bool = True
) -> Source:
    """Make a source of one part of the user's data: arrays, an object with ``fetch``, or a stream."""
    if not isinstance(part, tuple | list | dict):
        iterated = hasattr(part, "__iter__") and not hasattr(part, "__array__")
        if hasattr(part, "fetch") or not (iterated or hasattr(part, "iterate")):
            return UserSource(part, task, where, classes, config.images, labelled)
        if config.workers > 1:
            raise DataError("a stream is read by one thread, in order", where="data.workers", fix="set it to 1")
        return UserStream(part, task, where, classes, config.images)
    if isinstance(part, dict) or len(part) != 2:
        raise DataError(
            f"gives {_describe(part)}", where=where, fix="give (inputs, labels): two arrays, or dicts of arrays"
        )
    if not labelled:
        return Arrays(_arrays(part[0], "inputs", where), {}, where, classes, task, images=config.images)
    labels = _arrays(part[1], "labels", where)
    count = np.shape(labels if isinstance(labels, np.ndarray) else next(iter(labels.values())))[:1]
    inputs = _arrays(part[0], "inputs", where, *count)
    return Arrays(inputs, labels, where, classes, task, images=config.images)


ATTRIBUTES = ("__len__", "fetch", "fingerprint", "num_classes")
WANTED = (
    "give (inputs, labels), or an object with __len__, fetch(indices) -> (inputs, labels), num_classes and fingerprint "
    "(a text, the same for the same data)"
)
STREAMED = (
    "a stream has __iter__ (or iterate(epoch, start)), __len__ (samples of an epoch), num_classes and fingerprint"
)


class UserSource:
    """A source that the user wrote. Its fields are those of its first sample, so that faults show at once."""

    def __init__(
        self,
        user_source: Any,
        task: TaskConfig,
        where: str,
        classes: Known,
        images: bool | None = None,
        labelled: bool = True,
    ) -> None:
        # ``num_classes`` is for labels that are classes.
        wanted = ATTRIBUTES if "cross_entropy" in [loss for loss, _ in task.terms.values()] else ATTRIBUTES[:-1]
        missing = [name for name in wanted if not hasattr(user_source, name)]
        if missing:
            raise DataError(f"{type(user_source).__name__} has no {', '.join(missing)}", where=where, fix=WANTED)
        if len(user_source) == 0:
            raise DataError("the data set is empty", where=where)
        self._user_source, self._where, self.fingerprint = user_source, where, user_source.fingerprint
        fetched = self._fetch(np.zeros(1, np.int64))
        if not isinstance(fetched, tuple | list) or len(fetched) != 2:
            raise DataError(f"fetch gives {_describe(fetched)}", where=where, fix="it must return (inputs, labels)")
        inputs = _arrays(fetched[0], "inputs of fetch", where)
        labels = _arrays(fetched[1], "labels of fetch", where) if labelled else {}
        if classes.default.auto:
            fix = "list the values in the order of their numbers"
            raise DataError("data.classes: auto looks at all labels, and fetch gives some", where=where, fix=fix)
        classes = classes.with_count(getattr(user_source, "num_classes", None))
        self._template = Arrays(inputs, labels, where, classes, task, images=images)
        # One sample does not show whether others have places without a label.
        fields = self._template.sample.labels
        labels = {name: replace(field, masked=bool(field.classes and field.shape)) for name, field in fields.items()}
        self.sample, self.note = replace(self._template.sample, labels=labels), self._template.note

    def __len__(self) -> int:
        return len(self._user_source)

    def fetch(self, indices: np.ndarray) -> tuple[Fields, Fields]:
        inputs, labels = self._fetch(indices)
        return self._template.convert(inputs, labels, indices)

    def _fetch(self, indices: np.ndarray, *epoch: int) -> Any:
        try:
            return self._user_source.fetch(indices, *epoch)
        except DataError:
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            raise DataError(f"fetch failed: {reason}", where=self._where) from error


class UserStream(UserSource):
    """A stream that the user wrote, whose order is that of its samples."""

    ordered = True

    def __init__(
        self, user_source: Any, task: TaskConfig, where: str, classes: Known, images: bool | None = None
    ) -> None:
        missing = [name for name in ("__len__", "fingerprint") if not hasattr(user_source, name)]
        if missing:
            raise DataError(f"{type(user_source).__name__} has no {', '.join(missing)}", where=where, fix=STREAMED)
        try:
            if len(user_source) == 0:
                raise DataError("the data set is empty", where=where)
            stream = Stream(user_source, where)
        except DataError:
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            raise DataError(f"the stream failed: {reason}", where=where) from error
        super().__init__(stream, task, where, classes, images)

    def drawn(self, indices: np.ndarray, seed: int, epoch: int) -> tuple[Fields, Fields]:
        inputs, labels = self._fetch(indices, epoch)
        return self._template.convert(inputs, labels, indices)


def _arrays(value: Any, name: str, where: str, count: int | None = None) -> Any:
    """Return one array, or a dict of them, whose names are the model's."""
    if not isinstance(value, dict):
        return _array(value, name, where, count)
    strange = [key for key in value if not (isinstance(key, str) and key.isidentifier())]
    if strange or not value:
        fix = "name them as the model's arguments are"
        raise DataError(f"{name} are {_describe(value)}: {strange or value} names no argument", where=where, fix=fix)
    return {key: _array(values, f"{name} '{key}'", where, count) for key, values in value.items()}


def _array(value: Any, name: str, where: str, count: int | None = None) -> np.ndarray:
    """Return one array of all (``count``) samples.

    Several arrays without names are refused: each model would take them for something else.
    """
    several = isinstance(value, dict)
    if isinstance(value, tuple | list) and len(value) != count:
        several = any(np.ndim(one) > 0 and len(one) == count for one in value)
    if several:
        raise DataError(f"{name} are {_describe(value)}", where=where, fix="give one array, or a dict of named inputs")
    try:
        array = np.asarray(value)
    except Exception as error:
        if lengths := _lengths(value):
            raise _ragged(name, lengths, where) from error
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise DataError(f"{name} are not an array of numbers: {reason}", where=where) from error
    if array.dtype == object and (lengths := _lengths(array)):
        raise _ragged(name, lengths, where)
    return array


def _lengths(value: Any) -> list[int]:
    """Return the lengths of samples if there are several."""
    try:
        lengths = sorted({len(sample) for sample in value if not isinstance(sample, str | bytes)})
    except TypeError:
        return []
    return lengths if len(lengths) > 1 else []


def _ragged(name: str, lengths: list[int], where: str) -> DataError:
    what = f"{name} have samples of different lengths, {lengths[0]} to {lengths[-1]}"
    fix = "pad them to one length, and tell the model which places are padding by a second input, a mask"
    return DataError(what, where=where, fix=fix)


def _describe(value: Any) -> str:
    """Describe a value in words: a dict with x, y; a tuple of 3; an int."""
    if isinstance(value, dict):
        return f"a dict with {', '.join(map(str, list(value)[:8])) or 'nothing'}"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    return type(value).__name__

"""A user's own data: arrays, sources or streams, or a function that returns them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np

from hvd_train.config import DataConfig, TaskConfig
from hvd_train.config.keys.lengths import LengthsConfig
from hvd_train.config.user_code import user_errors, user_function
from hvd_train.data.arrays import Arrays, float64_arrays
from hvd_train.data.batched import batched, gives_batches
from hvd_train.data.classes import Known
from hvd_train.data.column import LABEL, check_no_mask, is_class
from hvd_train.data.dataset import DataRequest, Divisible, Parts, Whole, known
from hvd_train.data.generators import beside
from hvd_train.data.held_out import fold_held_out, share_held_out, spread_fold, spread_share
from hvd_train.data.items import Items, gives_items
from hvd_train.data.ragged import RaggedRows, check_lengths, is_ragged, ragged_rows
from hvd_train.data.streams import StreamSource
from hvd_train.errors import DataError, named_reason
from hvd_train.protocol import Field, Fields, Source

PARTS = {"train", "validation", "val", "valid", "test"}


def user_parts(config: DataConfig, task: TaskConfig, request: DataRequest, user_data: Any) -> Parts:
    """Open (train, val) or (train, val, test), or one data set or pair of arrays, of which a share is held out.

    A part is a pair of arrays, an object with ``fetch``, a data set that gives one sample at a time, or a stream.
    ``user_data``: these, or a function(**data.options) that returns it; None: ``data.name`` names the function.
    """
    where = "data" if user_data is not None else f"data.name: {config.name}"
    made = user_data
    if user_data is None or callable(user_data):
        function = user_data or imported(config.name, where)
        with user_errors("the function failed", where, "look at data.options too", DataError):
            made = function(**config.options)
    if isinstance(made, dict) and "train" in made and (made.keys() <= PARTS or all(map(gives_items, made.values()))):
        made = _splits(made, where)
    if gives_items(made) or gives_batches(made):
        whole = _source(made, config, task, where, known(config, request), request.labels)
        return Whole(cast(Divisible, whole), config.val_fraction)
    listed = isinstance(made, tuple | list) and len(made) in (2, 3)
    if listed and len(made) == 2 and all(map(_are_arrays, made)) and not _alike(*made):  # one part: inputs and labels
        arrays = _source(tuple(made), config, task, where, known(config, request), request.labels)
        return Whole(cast(Divisible, arrays), config.val_fraction)
    if not listed or (len(made) == 3 and any(hasattr(part, "__array__") for part in made)):
        fix = "give (train, val), or (train, val, test), or one pair (inputs, labels) to be divided"
        raise DataError(f"the data are {_describe(made)}", where=where, fix=fix)
    classes, parts = known(config, request), dict[str, Source]()
    for name, part in zip(("train", "val", "test"), made, strict=False):
        if name == "test" and not request.reads_test:
            continue
        if part is None and request.split:  # the part does not exist
            continue
        parts[name] = source = _source(part, config, task, f"{where}, {name}", classes, request.labels)
        if isinstance(source, UserSource) and config.target == "labels":
            source.watch(task)
        classes = classes.after(parts[name]) if name == "train" else classes
    if not parts:
        raise DataError("there are no samples", where=where, fix="give (train, val)")
    return parts


def _are_arrays(value: Any) -> bool:
    """Return whether this is an array or a data frame, or a dict of such."""
    return all(map(_are_arrays, value.values())) if isinstance(value, dict) else hasattr(value, "__array__")


def _alike(one: Any, other: Any) -> bool:
    """Return whether these may be training and validation samples, and not inputs and labels."""
    if isinstance(one, dict) or isinstance(other, dict):
        return isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys()
    kinds = [(tuple(np.shape(x))[1:], list(map(str, getattr(x, "columns", ())))) for x in (one, other)]
    return kinds[0] == kinds[1] and bool(kinds[0][0])


def _splits(made: dict[str, Any], where: str) -> tuple[Any, ...]:
    """Return (train, val) or (train, val, test) of data sets by their names, as Hugging Face has them."""
    val = next((made[name] for name in ("validation", "val", "valid") if name in made), None)
    test = made.get("test")
    if val is None:
        what = f"there is no part 'validation' among {', '.join(map(str, made))}"
        fix = "give (train, val), or the training part alone: val_fraction divides it"
        if test is not None:  # as train_test_split of Hugging Face names the other part
            fix = "name the part to validate on 'validation', or give (data['train'], data['test'])"
        raise DataError(what, where=where, fix=fix)
    return (made["train"], val) if test is None else (made["train"], val, test)


def imported(name: str, where: str) -> Callable[..., Any]:
    """Import a user's function; raise DataError with the reason if it cannot be imported."""
    return user_function(name, where, DataError)


def _source(
    part: Any, config: DataConfig, task: TaskConfig, where: str, classes: Known, labelled: bool = True
) -> Source:
    """Make a source from one part of the user's data: arrays, an object with ``fetch``, a data set, or a stream."""
    if gives_items(part) and config.lengths:
        return _read_whole(part, config, task, where, classes, labelled)
    if gives_items(part):
        return ItemSource(part, config, task, where, classes, labelled)
    if gives_batches(part):
        with user_errors("the data set failed", where, kind=DataError):
            part = batched(part, where)
        _check_counted(part.num_classes, task, classes, where)
    if not isinstance(part, tuple | list | dict):
        iterated = hasattr(part, "__iter__") and not hasattr(part, "__array__")
        if hasattr(part, "fetch") or not (iterated or hasattr(part, "iterate")):
            return (RaggedSource if config.lengths else UserSource)(part, config, task, where, classes, labelled)
        if config.lengths:
            what = "a stream is read in its own order, so its samples cannot be grouped by length"
            raise DataError(what, where="data.lengths", fix="give an object with fetch and lengths")
        if config.workers > 1:
            raise DataError("a stream is read by one thread, in order", where="data.workers", fix="set it to 1")
        kind = BatchedStream if hasattr(part, "divided") else UserStream
        stream = kind(part, config, task, where, classes)
        stream.note = "\n".join(filter(None, [stream.note, getattr(part, "remark", "")]))
        return stream
    if isinstance(part, dict) or len(part) != 2:
        raise DataError(
            f"the part is {_describe(part)}", where=where, fix="give (inputs, labels): two arrays, or dicts of arrays"
        )
    lengths = config.lengths
    if not labelled:
        inputs = _arrays(part[0], "inputs", where, None, lengths)
        return Arrays(inputs, {}, where, classes, task, images=config.images, columns=(_columns(part[0]), ()))
    labels = _arrays(part[1], "labels", where, None, lengths, task.ignore_index)
    first = next(iter(labels.values())) if isinstance(labels, dict) else labels
    inputs = _arrays(part[0], "inputs", where, len(first) if first.shape else None, lengths)
    columns = _columns(part[0]), _columns(part[1])
    return Arrays(inputs, labels, where, classes, task, images=config.images, columns=columns)


def _read_whole(part: Any, config: DataConfig, task: TaskConfig, where: str, classes: Known, labelled: bool) -> Source:
    """Read a data set of samples of different lengths into memory. Raises DataError."""
    with user_errors("the data set failed", where, kind=DataError):
        items = Items.of(part, where, features=config.features, labels=config.labels, images=False)
        inputs, labels = ({}, {}) if not len(items) else items.listed()
    if not len(items):
        raise DataError("the data set is empty", where=where)
    # Samples of one shape are no lists: numbers of a sample, or labels.
    inputs, labels = _even_stacked(inputs), _even_stacked(labels)
    if labelled:
        _check_counted(items.num_classes, task, classes, where)
    plain = config.model_copy(update={"features": None, "labels": None})
    source = _source((inputs, labels), plain, task, where, classes.with_count(items.num_classes), labelled)
    named = classes.named(source.sample.labels, items.class_names, where)
    source.sample = replace(source.sample, labels=named)
    source.class_names = classes.listed or items.class_names  # type: ignore[attr-defined]
    return source


def _even_stacked(values: Any) -> Any:
    """Stack lists of numbers, and lists of arrays of one shape if others of the sample differ in length."""
    columns = values if isinstance(values, dict) else {"": values}
    shapes = {key: {np.shape(x) for x in column} for key, column in columns.items()}
    uneven = any(len(found) > 1 for found in shapes.values())
    made = {
        key: np.stack(column) if len(shapes[key]) == 1 and (uneven or shapes[key] == {()}) else column
        for key, column in columns.items()
    }
    return made if isinstance(values, dict) else made[""]


def _columns(value: Any) -> Any:
    """Return the column names of a data frame (pandas), of several by their names; () of other arrays."""
    if isinstance(value, dict):
        return {key: _columns(x) for key, x in value.items()}
    names = [*getattr(value, "columns", ())] if hasattr(value, "__array__") else []
    if names == [*range(len(names))]:  # pandas numbers columns without names
        return ()
    seen, found = Counter[str](), []
    for name in map(str, names):  # the second 'a' is a.1, as pandas calls it
        found.append(f"{name}.{seen[name]}" if seen[name] else name)
        seen[name] += 1
    return tuple(found) if len({*found}) == len(found) else ()


FEW = 8  # samples inspected for a remark
ATTRIBUTES = ("__len__", "fetch", "fingerprint", "num_classes")
WANTED = (
    "give (inputs, labels), or an object with __len__, fetch(indices) -> (inputs, labels), num_classes and fingerprint "
    "(a text, the same for the same data)"
)
STREAMED = (
    "a stream has __iter__ (or iterate(epoch, start)), __len__ (samples of an epoch), num_classes and fingerprint"
)


class UserSource:
    """A user's object with ``fetch``. Its fields come from sample 0, which is fetched at once to find errors early."""

    def __init__(
        self,
        user_source: Any,
        config: DataConfig,
        task: TaskConfig,
        where: str,
        classes: Known,
        labelled: bool = True,
    ) -> None:
        # ``num_classes`` is required only for labels that are classes.
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
        for name, values in (labels if isinstance(labels, dict) else {LABEL: labels}).items():
            if values.dtype.kind == "U":  # numbering words would need all of them
                what = f"labels of fetch are words, as '{values.reshape(-1)[0]}'{f' of {name}' * (name != LABEL)}"
                raise DataError(what, where=where, fix="number the classes 0, 1, ...; data.classes names them")
        classes = classes.with_count(getattr(user_source, "num_classes", None))
        columns = _columns(fetched[0]), _columns(fetched[1])
        self._template = Arrays(inputs, labels, where, classes, task, images=config.images, columns=columns)
        self.remarks = self._rounding(inputs, labels)
        self.class_names = classes.listed or tuple(getattr(user_source, "class_names", ()))
        ignore = task.ignore_index
        fields = classes.named(self._template.sample.labels, tuple(getattr(user_source, "class_names", ())), where)
        labels = {name: replace(field, masked=_may_be_masked(field, ignore)) for name, field in fields.items()}
        self.sample, self.note = replace(self._template.sample, labels=labels), self._template.note
        self._check_fetch()

    def __len__(self) -> int:
        return len(self._user_source)

    def _check_fetch(self) -> None:
        """Refuse a ``fetch`` whose values for a sample are random, or made of the others that are fetched with it."""
        one, other = map(np.array, beside(len(self._user_source)))
        if not len(one):
            return
        parts = 1 + bool(self._template.sample.labels)
        first, again, others = ([*self._fetch(indices)][:parts] for indices in (one, one, other))
        if not all(map(_same, first, again)):
            what = "fetch gives other values for the same indices, so ranks and resumed runs would see different ones"
            fix = "draw random numbers in a transform of yours, which gets them (data.transforms)"
            raise DataError(what, where=self._where, fix=fix)
        if not all(map(_same, map(_first_sample, first), map(_first_sample, others))):
            what = "fetch makes a sample's values of the others that are fetched with it, which depends on the ranks"
            raise DataError(what, where=self._where, fix="compute them from the sample alone, or from all in advance")

    def _rounding(self, *first: Any) -> tuple[str, ...]:
        """Return remarks if float32 rounds what ``fetch`` gives. Reads a few samples if the first one has float64."""
        if not any(map(float64_arrays, first)):
            return ()
        few = self._fetch(np.arange(min(FEW, len(self._user_source))))
        return self._template.rounding(*few)

    def watch(self, task: TaskConfig) -> None:
        """Check labels at each fetch, as they cannot be checked in advance."""
        self._template.watch(task)

    def fetch(self, indices: np.ndarray) -> tuple[Fields, Fields]:
        inputs, labels = self._fetch(indices)
        return self._template.convert(inputs, labels, indices)

    def _fetch(self, indices: np.ndarray, *epoch: Any) -> Any:
        with user_errors("fetch failed", self._where, kind=DataError):
            return self._user_source.fetch(indices, *epoch)


class ItemSource(UserSource):
    """The samples of a torch data set, or of another one that gives one sample at a time (``Items``)."""

    def __init__(
        self,
        user_source: Any,
        config: DataConfig,
        task: TaskConfig,
        where: str,
        classes: Known,
        labelled: bool = True,
        items: Items | None = None,
    ) -> None:
        self._arguments = (user_source, config, task, where, classes, labelled)
        with user_errors("the data set failed", where, kind=DataError):
            items = items or Items.of(
                user_source, where, features=config.features, labels=config.labels, images=config.images
            )
        losses = [loss for loss, _ in task.terms.values()]
        if items.counted and not task.step and not any(loss == "cross_entropy" or ":" in loss for loss in losses):
            items.num_classes, items.counted = None, False  # its targets are numbers
        if len(items):
            _check_counted(items.num_classes, task, classes, where)
        super().__init__(items, config, task, where, classes, labelled)
        if items.counted and "cross_entropy" not in losses and self.sample.declared_classes == items.num_classes:
            self._say(f"the data set lists targets of {items.num_classes} classes (data.num_classes says otherwise)")
        if items.weights is not None and config.sampling:
            what = "the DataLoader has a WeightedRandomSampler, and samples are drawn once"
            raise DataError(what, where=f"data.sampling: {config.sampling}", fix="leave one of the two out")
        self.items, self.rows = items, items.rows
        if items.weights is not None:
            self._say("training samples are drawn by the weights of the DataLoader's sampler, with replacement")
        if items.random:
            self._say("samples are random: drawn by (seed, epoch, index), the same on any number of ranks and workers")
        if not classes.run:  # ranks that evaluate are connected already, and draw nothing meanwhile
            items.begin(config.workers)

    def _say(self, line: str) -> None:
        self.note = "\n".join(filter(None, [self.note, line]))

    def _check_fetch(self) -> None:
        """Do nothing: ``Items`` has looked at the data set."""

    def drawn(self, indices: np.ndarray, seed: int, epoch: int, *keys: np.ndarray) -> tuple[Fields, Fields]:
        inputs, labels = self._fetch(indices, seed, epoch, *keys)
        return self._template.convert(inputs, labels, indices)

    def split(self, fraction: float) -> tuple[ItemSource, ItemSource]:
        """Hold out ``fraction`` of each class, as ``Arrays.split``; of all samples if no targets are listed."""
        return self._without(share_held_out(self._labels(), fraction, self._where))

    def fold(self, part: int, parts: int) -> tuple[ItemSource, ItemSource]:
        """Hold out fold ``part`` of ``parts`` of each class."""
        return self._without(fold_held_out(self._labels(), part, parts, self._where))

    def _labels(self) -> np.ndarray:
        classes = any(field.classes for field in self.sample.labels.values())
        labels = self.items.labels_known() if classes else None
        return np.zeros(len(self), np.int64) if labels is None else labels

    def _without(self, held: np.ndarray) -> tuple[ItemSource, ItemSource]:
        train, val = (ItemSource(*self._arguments, self.items.part(np.flatnonzero(rows))) for rows in (~held, held))
        return train, val


def _check_counted(count: int | None, task: TaskConfig, classes: Known, where: str) -> None:
    """Raise DataError if the number of classes is needed, and neither the data set nor the configuration says it."""
    default = classes.default
    counted = count is not None or default.count or default.names or classes.run or classes.train
    if not counted and "cross_entropy" in [loss for loss, _ in task.terms.values()]:
        what = "the number of classes is not known: the data set lists neither classes nor targets"
        raise DataError(what, where=where, fix="set data.num_classes")


def _first_sample(value: Any) -> Any:
    """Return the first sample of inputs or labels, with its names."""
    if isinstance(value, dict):
        return {key: _first_sample(x) for key, x in value.items()}
    return value[:1] if isinstance(value, list | tuple | RaggedRows) else np.asarray(value)[:1]


def _same(one: Any, other: Any) -> bool:
    """Return whether two answers of ``fetch`` have the same values; a type may depend on which samples are fetched."""
    if isinstance(one, dict):
        return one.keys() == getattr(other, "keys", dict)() and all(_same(x, other[key]) for key, x in one.items())
    if isinstance(one, tuple | list):
        return len(one) == len(other) and all(map(_same, one, other))
    a, b = (x[:] if isinstance(x, RaggedRows) else np.asarray(x) for x in (one, other))
    return np.array_equal(a, b, equal_nan=a.dtype.kind == b.dtype.kind == "f")


def _may_be_masked(field: Field, ignore: int) -> bool:
    """Return whether labels may be ``ignore_index`` in other samples than the first one."""
    return bool(field.classes and (field.shape or is_class(ignore, field.classes)))


class RaggedSource(UserSource):
    """A user's object with ``fetch`` and ``lengths`` (n,), whose samples differ in length."""

    def __init__(
        self,
        user_source: Any,
        config: DataConfig,
        task: TaskConfig,
        where: str,
        classes: Known,
        labelled: bool = True,
    ) -> None:
        if not hasattr(user_source, "lengths"):
            fix = "give the length of each sample, (n,) whole numbers, in the order of fetch's indices"
            raise DataError(f"{type(user_source).__name__} has no lengths", where=where, fix=fix)
        assert config.lengths is not None
        self._limits, self._ignore = config.lengths, task.ignore_index
        self._lengths = np.asarray(user_source.lengths)
        if self._lengths.shape != (len(user_source),) or self._lengths.dtype.kind not in "iu":
            what = f"lengths are {self._lengths.shape} {self._lengths.dtype} for {len(user_source):,} samples"
            raise DataError(what, where=where, fix="give one whole number for each sample")
        check_lengths(self._lengths, "lengths", where, config.lengths)
        super().__init__(user_source, config, task, where, classes, labelled)
        if self._template.varying is None:
            raise DataError("fetch gives no list of samples", where=where, fix="give a list of arrays, one a sample")
        self.varying = replace(self._template.varying, lengths=np.minimum(self._lengths, self._limits.max_length))

    def _fetch(self, indices: np.ndarray, *epoch: Any) -> Any:
        fetched = super()._fetch(indices, *epoch)
        if not isinstance(fetched, tuple | list) or len(fetched) != 2:
            return fetched
        kinds = zip(("inputs", "labels"), fetched, (0, self._ignore), strict=True)
        return tuple(self._padded(value, f"{kind} of fetch", padding, indices) for kind, value, padding in kinds)

    def _padded(self, value: Any, name: str, padding: int, indices: np.ndarray) -> Any:
        if isinstance(value, dict):
            return {key: self._padded(x, f"{name} '{key}'", padding, indices) for key, x in value.items()}
        if not is_ragged(value):
            return value
        rows = ragged_rows(value, name, self._where, self._limits, padding)
        wanted = np.minimum(self._lengths[indices], self._limits.max_length)
        if not np.array_equal(rows.lengths, wanted):
            bad = int(np.argmax(rows.lengths != wanted)) if len(rows) == len(wanted) else 0
            what = f"{name} of sample {indices[bad]} does not have the length given by the source's lengths"
            raise DataError(what, where=self._where, fix="lengths[k] is the length of sample k")
        return rows

    def fetch(self, indices: np.ndarray) -> tuple[Fields, Fields]:
        inputs, labels = self._fetch(indices)
        return self._template.convert(_whole(inputs), _whole(labels), indices)


def _whole(value: Any) -> Any:
    """Convert RaggedRows to padded arrays."""
    if isinstance(value, dict):
        return {key: _whole(x) for key, x in value.items()}
    return value[:] if isinstance(value, RaggedRows) else value


class UserStream(UserSource):
    """A user's stream, which is read in its own order."""

    ordered = True

    def __init__(self, user_source: Any, config: DataConfig, task: TaskConfig, where: str, classes: Known) -> None:
        missing = [name for name in ("__len__", "fingerprint") if not hasattr(user_source, name)]
        if missing:
            raise DataError(f"{type(user_source).__name__} has no {', '.join(missing)}", where=where, fix=STREAMED)
        with user_errors("the stream failed", where, kind=DataError):
            if len(user_source) == 0:
                raise DataError("the data set is empty", where=where)
            stream = StreamSource(user_source, where)
        super().__init__(stream, config, task, where, classes)

    def _check_fetch(self) -> None:
        """Do nothing: ``StreamSource`` has read the first sample twice."""

    def drawn(self, indices: np.ndarray, seed: int, epoch: int) -> tuple[Fields, Fields]:
        inputs, labels = self._fetch(indices, epoch)
        return self._template.convert(inputs, labels, indices)


class BatchedStream(UserStream):
    """The samples of a tf.data.Dataset or a PyDataset, of which some can be held out."""

    def __init__(self, user_source: Any, config: DataConfig, task: TaskConfig, where: str, classes: Known) -> None:
        self._stream, self._arguments = user_source, (config, task, where, classes)
        super().__init__(user_source, *self._arguments)

    def split(self, fraction: float) -> tuple[UserStream, UserStream]:
        """Hold out ``fraction`` of the samples (of a PyDataset: of its batches), evenly spread over their order."""
        return self._divided(lambda count: spread_share(count, fraction, self._where))

    def fold(self, part: int, parts: int) -> tuple[UserStream, UserStream]:
        """Hold out fold ``part`` of ``parts``: every ``parts``-th sample, of a PyDataset batch."""
        return self._divided(lambda count: spread_fold(count, part, parts, self._where))

    def _divided(self, held_out: Callable[[int], np.ndarray]) -> tuple[UserStream, UserStream]:
        train, val = (UserStream(part, *self._arguments) for part in self._stream.divided(held_out))
        return train, val


def _arrays(
    value: Any,
    name: str,
    where: str,
    count: int | None = None,
    lengths: LengthsConfig | None = None,
    padding: int = 0,
) -> Any:
    """Convert to one array, or to a dict of arrays named like the model's arguments.

    ``lengths``: if set, lists of samples may differ in length; ``padding``: the value after their ends.
    """
    if not isinstance(value, dict):
        if lengths and is_ragged(value):
            return ragged_rows(value, name, where, lengths, padding)
        return _array(value, name, where, count)
    strange = [key for key in value if not (isinstance(key, str) and key.isidentifier())]
    if strange or not value:
        fix = "name them as the model's arguments are"
        raise DataError(f"{name} are {_describe(value)}: {strange or value} names no argument", where=where, fix=fix)
    more = (count, lengths, padding)
    return {
        key: _array(x, f"{name} '{key}'", where, count)
        if isinstance(x, dict)
        else _arrays(x, f"{name} '{key}'", where, *more)
        for key, x in value.items()
    }


def _array(value: Any, name: str, where: str, count: int | None = None) -> Any:
    """Convert to one array of all (``count``) samples.

    Several arrays without names are refused: their meaning would depend on the model.
    """
    if isinstance(value, RaggedRows):
        return value
    check_no_mask(value, name, where)
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
        reason = named_reason(error)
        raise DataError(f"{name} are not an array of numbers: {reason}", where=where) from error
    if array.dtype.kind == "U" and array.ndim == 1 and isinstance(value, list | tuple):
        # NumPy has converted numbers among words to text, and words are numbered in alphabetical order.
        return _of_objects(np.array(value, object), name, where, ())
    if array.dtype != object:
        return array
    if lengths := _lengths(array):
        raise _ragged(name, lengths, where)
    return _of_objects(array, name, where, getattr(value, "columns", ()))


def _of_objects(array: np.ndarray, name: str, where: str, columns: Sequence[Any]) -> np.ndarray:
    """Convert Python objects, as pandas has in a column of words, to an array of text; refuse anything else.

    ``columns``: the names of the last axis.
    """
    if not array.ndim:  # NumPy has not looked into it
        sparse = hasattr(array.item(), "toarray")  # of SciPy
        what = f"{name} are {'a sparse matrix, ' * sparse}{_describe(array.item())}, not an array"
        raise DataError(what, where=where, fix="give x.toarray()" if sparse else "give an array")
    texts = np.array([isinstance(one, str) for one in array.reshape(-1)], bool).reshape(array.shape)
    if texts.all():
        return array.astype(str)
    if not texts.any():
        what = f"{name} are Python objects, as {array.reshape(-1)[0]!r:.40}, not numbers"
        raise DataError(what, where=where, fix="convert them: np.asarray(x, np.float32); for classes np.int64")
    odd = tuple(np.argwhere(~texts if array.ndim == 1 else texts)[0].tolist())
    at = f"sample {odd[0]}" + (f", column '{columns[odd[-1]]}'" if len(odd) > 1 and len(columns) else "")
    what = f"{name} hold words and numbers: {array[odd]!r:.40} at {at}"
    fix = "give all as words or all as numbers; leave out samples without a value"
    raise DataError(what, where=where, fix="number the words, or leave the column out" if array.ndim > 1 else fix)


def _lengths(value: Any) -> list[int]:
    """Return the different lengths of samples, sorted, or [] if all are equal."""
    try:
        lengths = sorted({len(sample) for sample in value if not isinstance(sample, str | bytes)})
    except TypeError:
        return []
    return lengths if len(lengths) > 1 else []


def _ragged(name: str, lengths: list[int], where: str) -> DataError:
    what = f"{name} have samples of different lengths, {lengths[0]} to {lengths[-1]}"
    fix = "set data.lengths: {max_length: ...}, or pad them to one length and give a mask as a second input"
    return DataError(what, where=where, fix=fix)


def _describe(value: Any) -> str:
    """Describe a value for messages: "a dict with x, y", "a tuple of 3", "int"."""
    if isinstance(value, dict):
        return f"a dict with {', '.join(map(str, list(value)[:8])) or 'nothing'}"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    return type(value).__name__

"""Data sets that give one sample at a time: torch's Dataset, torchvision's, Hugging Face's, and a DataLoader's.

What is random in ``__getitem__`` and ``collate_fn`` is drawn from generators that are seeded by (seed, epoch, index).
So any number of ranks and workers, and a resumed run, get the same samples. Most of these generators are global to a
process, in which the training draws its own numbers, so training samples are fetched in processes of their own, except
of a ``TensorDataset``, and where TensorFlow has computed already. Each sample is collated on its own: how many of them
a rank has must not matter.
"""

from __future__ import annotations

import hashlib
import itertools
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hvd_train.data.batched import gives_batches
from hvd_train.data.column import check_alike, check_no_mask
from hvd_train.data.generators import beside, generators_kept, generators_of, seed_all, states
from hvd_train.data.images import upright
from hvd_train.data.item_workers import ItemWorkers
from hvd_train.data.order import mix, stream
from hvd_train.errors import DataError, listing

LOOKED_AT, LOOKED_AT_TENSORS = 4, 64  # samples that make the fingerprint, and of a TensorDataset
TRIED, TRIED_SECONDS = 24, 3.0  # samples that are read twice, until this time is over
EVALUATION = -1  # the epoch of samples that are not for training
CHANNELS = (1, 3)
KEYS = 6  # with which a collator is tried
SAMPLERS = ("SequentialSampler", "RandomSampler")
FIX = "let __getitem__ return (inputs, label): each a tensor, an array or a number, or a dict of them by name"


def gives_items(part: Any) -> bool:
    """Return whether this is a data set with ``__getitem__`` by index, or a DataLoader of one."""
    other = any(hasattr(part, name) for name in ("__array__", "fetch", "iterate"))
    if other or isinstance(part, tuple | list | dict | str) or gives_batches(part):
        return False
    if _is(part, "torch.utils.data", "IterableDataset"):
        return False
    return _is_loader(part) or (hasattr(part, "__getitem__") and hasattr(part, "__len__"))


def _is_loader(part: Any) -> bool:
    return _is(part, "torch.utils.data", "DataLoader")


def _is(part: Any, module: str, name: str) -> bool:
    """Return whether a part is of a class, whose module need not be imported."""
    return any(kind.__name__ == name and kind.__module__.startswith(module) for kind in type(part).__mro__)


class Items:
    """A data set by items as an object with ``fetch``. Its samples are ``rows`` of the data set, in this order.

    ``features``, ``labels``: the keys of an item that is a dict; None: ``label`` or ``labels``, and all others.
    ``collate``: makes (inputs, labels) of a list of items, in place of stacking. ``images``: False: tensors of three
    axes are no images, and keep their axes.
    """

    weights: np.ndarray | None = None  # (n,): with what probability training draws each sample
    _ends: np.ndarray | None = None  # (n,): the sums of weights up to each sample

    def __init__(
        self,
        dataset: Any,
        where: str,
        features: Sequence[str] | None = None,
        labels: str | Sequence[str] | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
        images: bool | None = None,
    ) -> None:
        self._dataset, self._where, self._features, self._labels = dataset, where, features, labels
        self._images = images
        self._collate, self._length = collate, len(dataset)
        self._workers: ItemWorkers | None = None
        self._alone = threading.Lock()  # held while generators are seeded for a sample
        self.rows = np.arange(self._length)
        self._own = [one for part in (dataset, collate) for one in generators_of(part)]
        self.still = _draws_nothing(dataset) and not collate
        number = LOOKED_AT if not self.still else LOOKED_AT_TENSORS
        few = sorted({*np.linspace(0, self._length - 1, number).astype(int).tolist()}) if self._length else []
        self.random = False
        if self._length and not collate:
            with generators_kept():
                self._pair(dataset[0])  # it may be none
        if self._length and images is None:
            with generators_kept():
                self._check_axes(self._pair(self._sample(0))[0])
        if self._length and not self.still:
            self._try(few)
            if collate and self._length > 2:
                self._check_collate(collate)
        self.fingerprint = self._fingerprint(few)
        self.num_classes, self.counted, self.class_names = _classes_of(dataset), False, _class_names(dataset, where)
        if self.num_classes is None and (targets := _targets(dataset)) is not None and len(targets):
            self.num_classes, self.counted = int(targets.max()) + 1, True

    @classmethod
    def of(cls, part: Any, where: str, **keys: Any) -> Items:
        """Make it of a data set or a DataLoader, whose data set and ``collate_fn`` are taken. Raises DataError."""
        if not _is_loader(part):
            return cls(part, where, **keys)
        if _is(part.dataset, "torch.utils.data", "IterableDataset"):
            raise DataError("the DataLoader reads a stream", where=where, fix="give the stream, with __len__")
        sampler = part.sampler
        weighted = type(sampler).__name__ == "WeightedRandomSampler"
        own = type(sampler).__name__ not in SAMPLERS or getattr(sampler, "replacement", False)
        if not own and (sampler.data_source is not part.dataset or len(sampler) != len(part.dataset)):
            other = " of another object" * (sampler.data_source is not part.dataset)
            what = f"the DataLoader's sampler gives {len(sampler):,} of {len(part.dataset):,} samples{other}"
            raise DataError(what, where=where, fix="leave it out; torch.utils.data.Subset gives a part of a data set")
        if (own and not weighted) or part.batch_size is None:
            kind = type(sampler).__name__ if own else "batch sampler of its own"
            what = f"the DataLoader has a {kind}, and the order of samples is made here"
            fix = "leave it out; torch.utils.data.Subset(dataset, indices) gives a part of a data set"
            raise DataError(what, where=where, fix=f"{fix}, and data.sampling: balanced takes all classes alike")
        plain = getattr(part.collate_fn, "__name__", "") in ("default_collate", "default_convert")
        items = cls(part.dataset, where, collate=None if plain else part.collate_fn, **keys)
        if weighted:
            items.weigh(np.asarray(sampler.weights, np.float64), sampler.num_samples, sampler.replacement)
        return items

    def __len__(self) -> int:
        return len(self.rows)

    def part(self, rows: np.ndarray) -> Items:
        """Return the data set of these samples."""
        one = object.__new__(type(self))
        weights = None if self.weights is None else self.weights[rows]
        vars(one).update(vars(self) | {"rows": self.rows[rows], "weights": weights, "_ends": None})
        one.fingerprint = hashlib.sha256(f"{self.fingerprint} {one.rows.tobytes().hex()}".encode()).hexdigest()
        return one

    def weigh(self, weights: np.ndarray, drawn: int, replacement: bool) -> None:
        """Draw training samples with probabilities in proportion to ``weights`` (n,), as a WeightedRandomSampler."""
        if drawn != len(self) or weights.shape != (len(self),) or not replacement:
            what = f"the WeightedRandomSampler draws {drawn:,} of {len(self):,} samples"
            what += " without replacement" * (not replacement)
            fix = f"give it {len(self):,} weights and num_samples={len(self)}, with replacement"
            raise DataError(what, where=self._where, fix=fix)
        if not (np.isfinite(weights).all() and (weights >= 0).all() and weights.any()):
            raise DataError("weights of the sampler are negative, not finite, or all 0", where=self._where)
        self.weights = weights
        self.fingerprint = hashlib.sha256(f"{self.fingerprint} {weights.tobytes().hex()}".encode()).hexdigest()

    def chosen(self, positions: np.ndarray, seed: int, epoch: int) -> np.ndarray:
        """Map positions (k,) in an epoch to indices of samples (k,), each drawn on its own by ``weights``."""
        assert self.weights is not None
        uniform = stream(mix(seed, epoch), np.asarray(positions).astype(np.uint64)) / 2.0**64
        if self._ends is None:
            self._ends = np.cumsum(self.weights)
        # The last sample that can be drawn: a product may round up to the sum.
        last = int(np.searchsorted(self._ends, self._ends[-1]))
        return np.minimum(np.searchsorted(self._ends, uniform * self._ends[-1], side="right"), last)

    def listed(self) -> tuple[Any, Any]:
        """Read all samples; return inputs and labels, each a list of arrays or numbers, or a dict of such.

        Raises DataError if samples are random, or collated: they are read once, and padded later.
        """
        if self.random or self._collate or self.weights is not None:
            what = "samples are random" if self.random else "the DataLoader has a collate_fn or a sampler of its own"
            fix = "give the data set itself, without padding and random changes"
            raise DataError(f"{what}, and with data.lengths they are read once", where=self._where, fix=fix)
        with self._alone, generators_kept():
            pairs = [self._pair(self._sample(row)) for row in self.rows.tolist()]
        columns = []
        for values in ([inputs for inputs, _ in pairs], [labels for _, labels in pairs]):
            made = [_converted(x, images=False) for x in values]
            named = hasattr(values[0], "keys")
            columns.append({key: [one[key] for one in made] for key in made[0]} if named else made)
        inputs, labels = columns
        first = self._sample(self.rows[0])
        # There will be a mask beside it, so that the model gets its inputs by their names.
        if hasattr(first, "keys") and not isinstance(inputs, dict):
            inputs = {self._columns_of(first)[0][0]: inputs}
        return inputs, labels

    def labels_known(self) -> np.ndarray | None:
        """Return the class of each sample (n,) if the data set lists them, as torchvision's do, else None."""
        labels = _targets(self._dataset)
        return None if labels is None else labels[self.rows]

    def begin(self, workers: int) -> None:
        """Fetch in ``workers`` processes from now on, unless it is 1 and samples are known to be not random.

        Where TensorFlow has computed already, as for this data set, samples are read in this process.

        Call it before there are other threads.
        """
        # A process that is forked after TensorFlow has begun to compute may wait for its threads forever.
        if not self._workers and not _tensorflow_runs() and (not self.still or workers > 1):
            self._workers = ItemWorkers(workers, self._read, self._where)

    def fetch(
        self, indices: np.ndarray, seed: int = 0, epoch: int = EVALUATION, keys: np.ndarray | None = None
    ) -> tuple[Any, Any]:
        """Return the inputs and labels of samples, each (k, ...) or a dict of such; thread-safe.

        With ``weights`` and in training, ``indices`` are positions in the epoch, for which samples are drawn.
        ``keys`` (k,): what random numbers are drawn by; None: the rows of the samples.
        """
        rows = self.rows[indices]
        keys = rows if keys is None else keys
        if self.weights is not None and epoch != EVALUATION:
            # A sample that is drawn twice gets other random numbers.
            rows, keys = self.rows[self.chosen(indices, seed, epoch)], indices
        if self._workers:
            return self._workers.run(rows, keys, seed, epoch)
        if self.still:
            return self._read(rows, keys, seed, epoch)
        with self._alone, generators_kept():
            return self._read(rows, keys, seed, epoch)

    def _read(self, rows: np.ndarray, keys: np.ndarray, seed: int, epoch: int) -> tuple[Any, Any]:
        """Read ``rows`` (k,) of the data set; what is random is drawn by ``keys`` (k,)."""
        if len(self._dataset) != self._length:
            what = f"the data set had {self._length:,} samples, and has {len(self._dataset):,} now"
            raise DataError(what, where=self._where, fix="its length must not change")
        items = []
        for row, key in zip(rows.tolist(), keys.tolist(), strict=True):
            if not self.still:
                seed_all(mix(mix(seed, epoch), key), self._own)
            items.append(self._sample(row))
        pairs = [self._pair(item) for item in items]
        for (given, _), row in zip(pairs, rows.tolist(), strict=True):
            if isinstance(given, tuple | list) and any(getattr(x, "ndim", 0) for x in given):
                # NumPy would make one array of them, with an axis for the arrays.
                what = f"the inputs of sample {row} are a {type(given).__name__} of {len(given)} arrays"
                fix = "name them, as the model's arguments are: {'first': a, 'second': b}, or stack them"
                raise DataError(what, where=self._where, fix=fix)
        collated, images = self._collate is not None, self._images
        inputs = [_converted(pair[0], collated, images) for pair in pairs]
        # Labels are images only beside an image, as those of arrays are.
        beside_one = images is not False and _holds_image(pairs[0][0], collated, images)
        labels = [_converted(pair[1], collated, images if beside_one or images else False) for pair in pairs]
        numbers = rows.tolist()
        return (
            _stacked(inputs, numbers, True, self._where, collated),
            _stacked(labels, numbers, False, self._where, collated),
        )

    def _pair(self, item: Any) -> tuple[Any, Any]:
        """Return (inputs, label) of an item."""
        if isinstance(item, tuple | list) and len(item) == 2:
            return item[0], item[1]
        if not hasattr(item, "keys"):
            kind = f"a {type(item).__name__} of {len(item)}" if isinstance(item, tuple | list) else type(item).__name__
            raise DataError(f"a sample is {kind}", where=self._where, fix=FIX)
        features, labels = self._columns_of(item)
        one_input, one_label = len(features) == 1, len(labels) == 1
        return (
            item[features[0]] if one_input else {key: item[key] for key in features},
            item[labels[0]] if one_label else {key: item[key] for key in labels},
        )

    def _columns_of(self, item: Any) -> tuple[list[str], list[str]]:
        """Return the keys of features and of labels of an item by keys."""
        keys = list(item.keys())
        given = [self._labels] if isinstance(self._labels, str) else list(self._labels or ())
        labels = given or [key for key in keys if key in ("label", "labels")][:1]
        features = list(self._features or [key for key in keys if key not in labels])
        if not labels or (missing := [key for key in (*labels, *features) if key not in keys]):
            what = f"a sample has {', '.join(map(str, keys))}" + (f", not {', '.join(missing)}" if labels else "")
            raise DataError(what, where=self._where, fix="name its columns in data.labels and data.features")
        return features, labels

    def _try(self, few: Sequence[int]) -> None:
        """Read some samples twice: find whether they are random, and refuse other randomness than of generators."""
        targets = _targets(self._dataset)
        first_of_class = [] if targets is None else np.unique(targets, return_index=True)[1][:TRIED].tolist()
        spread = np.linspace(0, self._length - 1, TRIED).astype(int).tolist()
        ends = time.perf_counter() + TRIED_SECONDS
        for number, row in enumerate(dict.fromkeys([*few, *first_of_class, *spread])):
            if number >= len(few) and time.perf_counter() > ends:
                return
            with generators_kept():
                seed_all(row, self._own)
                before = states(self._own)
                once = _bytes(self._sample(row))
                self.random |= states(self._own) != before
                seed_all(row, self._own)
                again = _bytes(self._sample(row))
            if once != again:
                what = (
                    f"sample {row} differs each time it is read, so ranks and resumed runs would see different samples"
                )
                fix = "draw what is random in __getitem__ from the generators of random, numpy.random and torch"
                raise DataError(what, where=self._where, fix=fix)

    def _sample(self, row: int) -> Any:
        item = self._dataset[row]
        return self._collate([item]) if self._collate else item

    def _check_axes(self, inputs: Any) -> None:
        """Refuse tensors that may be images or not, as their first and last axes both have 1 or 3 entries."""
        for x in [inputs[key] for key in inputs.keys()] if hasattr(inputs, "keys") else [inputs]:  # noqa: SIM118
            shape = tuple(getattr(x, "shape", ()))[self._collate is not None :]
            if _is(x, "torch", "Tensor") and len(shape) == 3 and shape[0] in CHANNELS and shape[-1] in CHANNELS:
                what = f"tensors of {shape} may be images, (channels, height, width), or something else"
                fix = "set data.images: true if they are images; false if not, and they keep their axes"
                raise DataError(what, where=self._where, fix=fix)

    def _check_collate(self, collate: Callable[[list[Any]], Any]) -> None:
        """Refuse a collator that makes a sample's values of the others in its list."""
        ends = time.perf_counter() + TRIED_SECONDS
        for key in range(KEYS):
            if key and time.perf_counter() > ends:
                return
            firsts = []
            for one in beside(self._length):
                with generators_kept():
                    items = []
                    for row in one:
                        seed_all(mix(key, row), self._own)
                        items.append(self._dataset[row])
                    seed_all(key, self._own)
                    firsts.append([_bytes(_first_of(x)) for x in self._pair(collate(items))])
            if firsts[0] != firsts[1]:
                what = "the collate_fn makes a sample's values of the others in its list, which depends on the ranks"
                fix = "compute them in __getitem__, pad to one fixed length; data.transforms has mixup and cutmix"
                raise DataError(what, where=self._where, fix=fix)

    def _digest(self, rows: Sequence[int], seed: int) -> str:
        """Return a hash of samples drawn with ``seed``; the process' generators stay as they are."""
        digest = hashlib.sha256()
        with generators_kept():
            for row in rows:
                seed_all(mix(seed, row), self._own)
                digest.update(_bytes(self._dataset[row]))
        return digest.hexdigest()

    def _fingerprint(self, rows: Sequence[int]) -> str:
        kind = type(self._dataset)
        targets = _targets(self._dataset)
        text = f"{kind.__module__}.{kind.__qualname__} {self._length} {self._digest(rows, 0)}"
        return hashlib.sha256(text.encode() + (b"" if targets is None else targets.tobytes())).hexdigest()


def _converted(value: Any, batched: bool = False, images: bool | None = None) -> Any:
    """Convert tensors and Pillow's images to arrays; PyTorch's images, (channels, height, width), get channels last."""
    if hasattr(value, "keys"):
        return {key: _converted(value[key], batched, images) for key in value.keys()}  # noqa: SIM118
    if _is(value, "PIL", "Image"):
        return upright(value)
    if images is not False and _is_image(value, batched, images):
        value = value.movedim(int(batched), -1)
    if _is(value, "torch", "Tensor"):
        value = value.detach().cpu()
        # NumPy has no such type, whose numbers float32 holds exactly.
        return (value.float() if str(value.dtype) == "torch.bfloat16" else value).numpy()
    check_no_mask(value, "values of a sample", "the data set")
    return np.asarray(value)


def _is_image(value: Any, batched: bool, images: bool | None) -> bool:
    """Return whether this is an image of PyTorch: a tensor (channels, height, width)."""
    if not _is(value, "torch", "Tensor") or value.ndim != 3 + batched:
        return False
    return value.shape[batched] in CHANNELS and (bool(images) or value.shape[-1] not in CHANNELS)


def _holds_image(inputs: Any, batched: bool, images: bool | None) -> bool:
    """Return whether an input of a sample is an image: one of Pillow, of PyTorch, or an array with channels last."""
    if hasattr(inputs, "keys"):
        return any(_holds_image(inputs[key], batched, images) for key in inputs.keys())  # noqa: SIM118
    if _is(inputs, "PIL", "Image") or _is_image(inputs, batched, images):
        return True
    shape = tuple(getattr(inputs, "shape", ()))[int(batched) :]
    of_bytes = "uint8" in str(getattr(inputs, "dtype", "")) and len(shape) in (2, 3)
    return of_bytes or (len(shape) == 3 and shape[-1] in CHANNELS)


def _first_of(collated: Any) -> Any:
    """Return the first sample of collated inputs or labels."""
    if hasattr(collated, "keys"):
        return {key: _first_of(collated[key]) for key in collated.keys()}  # noqa: SIM118
    return collated[:1] if isinstance(collated, tuple | list) else _converted(collated)[:1]


def _tensorflow_runs() -> bool:
    """Return whether this process has computed with TensorFlow."""
    module = sys.modules.get("tensorflow.python.eager.context")
    context = module.context_safe() if module else None
    return bool(context and context._initialized)


def _draws_nothing(dataset: Any) -> bool:
    """Return whether a data set is known to read its samples without any code of the user's."""
    # Of subclasses nothing is known: one of Subset often augments.
    kind = type(dataset).__name__ if type(dataset).__module__.startswith("torch.utils.data") else ""
    if kind == "Subset":
        return _draws_nothing(dataset.dataset)
    return all(map(_draws_nothing, dataset.datasets)) if kind == "ConcatDataset" else kind == "TensorDataset"


def _stacked(values: list[Any], rows: Sequence[int], is_input: bool, where: str, collated: bool) -> Any:
    """Stack the samples ``rows`` (k,); ``collated``: each has an axis of one sample already."""
    if isinstance(values[0], dict):
        return {key: _stacked([one[key] for one in values], rows, is_input, where, collated) for key in values[0]}
    check_alike(values, rows, is_input, where)
    shapes = {one.shape for one in values}
    if len(shapes) > 1:
        what = f"samples have unequal shapes, as {' and '.join(map(str, sorted(shapes)[:2]))}"
        raise DataError(what, where=where, fix="give them one shape in __getitem__, by padding or resizing")
    if collated and values[0].shape[:1] != (1,):
        what = f"the collate_fn makes {values[0].shape} of a list of one sample"
        raise DataError(what, where=where, fix="let its first axis be the samples")
    return np.concatenate(values) if collated else np.stack(values)


def _bytes(value: Any) -> bytes:
    if hasattr(value, "keys"):
        return b"".join(f"{key}:".encode() + _bytes(value[key]) for key in value.keys())  # noqa: SIM118
    if isinstance(value, tuple | list):
        return b"".join(map(_bytes, value))
    if isinstance(value, str | bytes | None):
        return repr(value).encode()
    return np.ascontiguousarray(_converted(value)).tobytes()


def _targets(dataset: Any) -> np.ndarray | None:
    """Return the labels that a data set lists (n,), through subsets and concatenations; None: it lists none."""
    if _is(dataset, "torch.utils.data", "Subset"):
        inner = _targets(dataset.dataset)
        return None if inner is None else inner[np.asarray(dataset.indices, np.int64)]
    if _is(dataset, "torch.utils.data", "ConcatDataset"):
        parts = [_targets(one) for one in dataset.datasets]
        return None if any(one is None for one in parts) else np.concatenate(parts)  # type: ignore[arg-type]
    if _is(dataset, "torch.utils.data", "TensorDataset"):
        listed = dataset.tensors[-1]
    else:
        listed = getattr(dataset, "targets", None)
    try:
        labels = np.asarray(listed)
    except (TypeError, ValueError):
        return None
    return labels if labels.shape == (len(dataset),) and labels.dtype.kind in "iu" else None


def _classes_of(dataset: Any) -> int | None:
    """Return the number of classes that the data set says."""
    if (count := getattr(dataset, "num_classes", None)) is not None:
        return int(count)
    if isinstance(names := getattr(dataset, "classes", None), list | tuple):
        return len(names)
    if _is(dataset, "torch.utils.data", "Subset"):
        return _classes_of(dataset.dataset)
    if _is(dataset, "torch.utils.data", "ConcatDataset"):
        counts = [_classes_of(one) for one in dataset.datasets]
        return None if None in counts else max(counts)  # type: ignore[type-var]
    label = _class_label(dataset)
    return None if label is None else int(label.num_classes)


def _class_names(dataset: Any, where: str) -> tuple[str, ...]:
    """Return the names of the classes in the order of their numbers, as the data set says them; (): it does not.

    Raises DataError if joined data sets number their classes in several ways.
    """
    if _is(dataset, "torch.utils.data", "Subset"):
        return _class_names(dataset.dataset, where)
    if _is(dataset, "torch.utils.data", "ConcatDataset"):
        listed = (_class_names(one, where) for one in dataset.datasets)
        several = sorted(dict.fromkeys(filter(None, listed)), key=len)
        for one, other in itertools.pairwise(several):
            if one != other[: len(one)]:
                what = f"joined data sets number their classes in two ways: {listing(one)} and {listing(other)}"
                raise DataError(what, where=where, fix="give all of them the same list of classes")
        return several[-1] if several else ()
    if getattr(dataset, "target_transform", None) is not None:  # it may have changed the numbers
        return ()
    names: Any = getattr(dataset, "classes", None)
    if not isinstance(names, list | tuple):
        names = getattr(_class_label(dataset), "names", None) or ()
    plain = all(isinstance(name, str) for name in names) and len({*names}) == len(names)
    return tuple(names) if plain and len(names) == _classes_of(dataset) else ()


def _class_label(dataset: Any) -> Any:
    """Return the type of a Hugging Face data set's only column of the type ClassLabel, or None."""
    features: Any = getattr(dataset, "features", None)
    if not hasattr(features, "values"):
        return None
    labels = [one for one in features.values() if hasattr(one, "num_classes")]
    return labels[0] if len(labels) == 1 else None

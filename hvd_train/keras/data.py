"""Each rank's part of the data that a user's own script hands to ``fit``, ``evaluate`` and ``predict``.

Training: the order of samples is cut into global batches of ``batch_size`` x N, of which each rank takes a contiguous
part; all ranks take the same number of steps. A rest of fewer samples than ranks is left out of an epoch.
Evaluation and prediction: each rank takes one contiguous part of the whole, every sample exactly once; of whole global
batches where it matters where batches are cut. ``steps`` count global batches everywhere.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field, replace
from typing import Any

import keras
import numpy as np
from keras.src.trainers.data_adapters.py_dataset_adapter import PyDatasetAdapter

from hvd_train.data.order import mix, permute, share
from hvd_train.errors import ConfigError, DataError
from hvd_train.protocol import Communicator
from hvd_train.script.record import recording
from hvd_train.script.rng import Draws

BATCH = 32  # Keras' own, where the user gives none
BATCH_SIZE = "batch_size"  # a fact of training: a rank's samples in every step but an epoch's last
DIFFERS = (
    "drawn at random? call keras.utils.set_random_seed(n) first; divided already? hk.distribute(model, shard=False)"
)
WATCHED = 4096  # values of a batch that tell its place in an order
SAMPLED = 64  # rows of an array, evenly spread, that tell whether two ranks hold the same


def kind_of(x: Any) -> str:
    """arrays | dataset (tf.data) | sequence (PyDataset) | loader (PyTorch's DataLoader) | other."""
    if isinstance(x, keras.utils.PyDataset):
        return "sequence"
    if any(c.__name__ == "DatasetV2" for c in type(x).__mro__):
        return "dataset"
    if any(c.__name__ == "DataLoader" and c.__module__.startswith("torch.") for c in type(x).__mro__):
        return "loader"
    leaves = [leaf for leaf in keras.tree.flatten(x) if leaf is not None]
    return "arrays" if leaves and all(hasattr(leaf, "shape") and hasattr(leaf, "dtype") for leaf in leaves) else "other"


def columns(x: Any, y: Any, sample_weight: Any) -> tuple[Any, ...]:
    """(x,), (x, y) or (x, y, sample_weight) with NumPy leaves; floats have Keras' floatx, as ``fit`` would make them.

    A data frame is an array, a series of it a column, as Keras takes them. TensorFlow's texts are an array of bytes;
    rows of different lengths, a RaggedTensor, stay what they are.
    """

    def array(leaf: Any) -> Any:
        if leaf is None:
            return None
        if is_ragged(leaf):
            return keras.ops.cast(leaf, keras.config.floatx()) if leaf.dtype.is_floating else leaf
        if hasattr(leaf, "tocsr") or hasattr(leaf, "dense_shape"):
            what = f"a {type(leaf).__name__} cannot be divided among ranks"
            raise ConfigError(what, where="hvd_train.keras", fix="give a dense array: .toarray(), tf.sparse.to_dense")
        if getattr(leaf.dtype, "name", "") == "string" and hasattr(leaf, "numpy"):
            return leaf.numpy()
        frame = hasattr(leaf, "to_numpy")
        values = leaf.to_numpy() if frame else keras.ops.convert_to_numpy(leaf) if hasattr(leaf, "device") else leaf
        values = np.asarray(values)
        values = values[:, None] if frame and values.ndim == 1 else values
        floats = values.dtype.kind == "f" and values.dtype.name != keras.config.floatx()
        return values.astype(keras.config.floatx()) if floats else values

    parts = [x, y, sample_weight]
    while len(parts) > 1 and parts[-1] is None:
        parts.pop()
    return tuple(keras.tree.map_structure(array, part) for part in parts)


def packed(parts: tuple[Any, ...]) -> Any:
    """What ``train_step`` gets for columns: x as it is where it is alone, one weight of samples for each target."""
    x, y, weight = (*parts, None, None)[:3]
    if keras.tree.is_nested(y) and hasattr(weight, "shape"):
        if weight.shape not in ((len(weight),), (len(weight), 1)):
            what = f"sample_weight has the shape {weight.shape}, but there are several targets"
            raise ConfigError(what, where="model.fit", fix="give one weight a sample, or one array a target")
        weight = keras.tree.map_structure(lambda _: weight, y)
    return keras.utils.pack_x_y_sample_weight(x, y, weight)


def as_arrays(batch: Any) -> Any:
    """A DataLoader's batch, as Keras' own adapter gives it: a tuple of arrays."""
    arrays = keras.tree.map_structure(lambda leaf: np.asarray(leaf), batch, none_is_leaf=False)
    return tuple(arrays) if isinstance(arrays, list) else arrays


def is_ragged(leaf: Any) -> bool:
    """Return whether it is TensorFlow's array of rows of different lengths."""
    return hasattr(leaf, "ragged_rank")


def take(parts: Any, places: Any) -> Any:
    def rows(a: Any) -> Any:
        if a is None or not is_ragged(a) or isinstance(places, slice):
            return None if a is None else a[places]
        import tensorflow as tf

        return tf.gather(a, places)

    return keras.tree.map_structure(rows, parts)


def texts(parts: Any) -> Any:
    """Return them as Keras takes them: tensors for arrays of texts."""
    if keras.backend.backend() != "tensorflow":
        return parts
    import tensorflow as tf

    return keras.tree.map_structure(lambda a: tf.constant(a) if _holds_texts(a) else a, parts)


def _holds_texts(a: Any) -> bool:
    if not isinstance(a, np.ndarray) or not a.size:
        return False
    return a.dtype.kind in "US" or a.dtype.kind == "O" and isinstance(a.flat[0], str | bytes)


def length(parts: Any) -> int:
    counts = {int(leaf.shape[0]) for leaf in keras.tree.flatten(parts) if leaf is not None}
    if len(counts) != 1:
        raise DataError(f"the arrays have {sorted(counts)} samples", where="fit", fix="give arrays of one length")
    return counts.pop()


def digest(parts: Any) -> str:
    """A short hash of structure, shapes, types and up to ``SAMPLED`` rows of every array."""
    found = hashlib.sha256()
    for leaf in keras.tree.flatten(parts):
        if leaf is not None and is_ragged(leaf):
            found.update(_of_ragged(leaf))
            continue
        array = np.asarray(leaf if leaf is not None else ())
        rows = np.unique(np.linspace(0, len(array) - 1, SAMPLED).astype(np.int64)) if array.ndim and len(array) else ...
        found.update(f"{array.shape}{array.dtype}".encode())
        chosen = array[rows]
        found.update(repr(chosen.tolist()).encode() if chosen.dtype.hasobject else np.ascontiguousarray(chosen).data)
    return found.hexdigest()[:12]


def _of_ragged(x: Any) -> bytes:
    """Return what a digest takes of a RaggedTensor, or of its value."""
    n = int(x.shape[0])
    few = take(x, np.unique(np.linspace(0, n - 1, SAMPLED).astype(np.int64))) if hasattr(x, "numpy") and n else x
    return repr([n, x.dtype, few.to_list()]).encode()


class Epochs(keras.utils.PyDataset):
    """Steps of an epoch as a pure function of (epoch, step); ``begin`` tells which epoch it is.

    ``given``: ``steps_per_epoch``, in whole executions. As in Keras, a pass over the data goes on from epoch to epoch,
    ends the epoch in which the data end, however many steps that one still wanted, and the next epoch begins another.
    """

    def __init__(self, steps: int, given: int | None, seed: int | None, **workers: Any) -> None:
        super().__init__(**workers)
        self.steps, self._given, self._seed = steps, min(given or steps, steps), seed
        self.epoch, self._first = 0, -1

    def begin(self, epoch: int) -> None:
        """All passes are counted from the first epoch of this ``fit``."""
        self.epoch, self._first = epoch, epoch if self._first < 0 else self._first

    def _place(self) -> tuple[int, int]:
        """(the epoch in which the pass of this one began, steps of it that were made before)."""
        before = (self.epoch - max(self._first, 0)) % -(-self.steps // self._given)
        return self.epoch - before, before * self._given

    def __len__(self) -> int:
        return min(self._given, self.steps - self._place()[1])

    def __getitem__(self, index: int) -> Any:
        turn, before = self._place()
        return self.part(turn, before + index)

    def part(self, turn: int, step: int) -> Any:
        """This rank's part of a step of the pass that began in epoch ``turn``."""
        raise NotImplementedError

    def order(self, places: np.ndarray, n: int, turn: int) -> np.ndarray:
        return places if self._seed is None else permute(places, n, self._seed, turn)


class ArrayParts(Epochs):
    """``whole``: samples of a step, on all ranks."""

    def __init__(self, parts: Any, whole: int, world: Communicator, given: int | None, seed: int | None) -> None:
        self._parts, self._world, self._n, self._global = parts, world, length(parts), whole
        rest = self._n % self._global
        super().__init__(self._n // self._global + (rest >= world.size), given, seed)

    def part(self, turn: int, step: int) -> Any:
        return texts(take(self._parts, self.order(np.arange(*self._places(step)), self._n, turn)))

    def _places(self, step: int) -> tuple[int, int]:
        low = step * self._global
        start, stop = share(min(self._global, self._n - low), self._world.size, self._world.rank)
        return low + start, low + stop

    def as_keras(self, tensorflow: bool, weighted: bool = False) -> Any:
        """What ``fit`` is to get, so that ``train_step`` gets what it would alone: TensorFlow's has tuples for lists.

        ``weighted``: with class weights, which Keras would compute in 32 bits on a pipeline.
        """
        pipeline = None
        if tensorflow:
            self._parts = keras.tree.lists_to_tuples(self._parts)
            pipeline = None if weighted else self.pipeline()
        if pipeline is not None:
            return pipeline
        return self if weighted else AsGiven(self)

    def pipeline(self) -> Any:
        """The same as a tf.data.Dataset: one pass over the data, which begins in the epoch of its first step. Python is
        asked once in it. None where leaves are neither numbers nor texts."""
        import tensorflow as tf

        leaves = keras.tree.flatten(self._parts)
        if not all(x is None or is_ragged(x) or x.dtype.kind in "biuf" or _holds_texts(x) for x in leaves):
            return None
        tensors = [leaf if leaf is None or is_ragged(leaf) else tf.constant(leaf) for leaf in leaves]
        places = [np.arange(*self._places(step)) for step in range(self.steps)]
        ends = np.cumsum([0, *map(len, places)])

        def one() -> Any:
            yield self.order(np.concatenate(places), self._n, self.epoch), ends

        def steps(rows: Any, bounds: Any) -> Any:
            return tf.data.Dataset.range(tf.size(bounds, tf.int64) - 1).map(lambda k: rows[bounds[k] : bounds[k + 1]])

        def taken(rows: Any) -> Any:
            return keras.tree.pack_sequence_as(self._parts, [x if x is None else tf.gather(x, rows) for x in tensors])

        integers = tf.TensorSpec([None], tf.int64)
        orders = tf.data.Dataset.from_generator(one, output_signature=(integers, integers))
        counted = tf.data.experimental.assert_cardinality(self.steps)
        options = tf.data.Options()
        options.autotune.enabled = False  # its thread takes time from a filled core, and an epoch waits for its end
        return orders.flat_map(steps).map(taken).apply(counted).prefetch(2).with_options(options)


class AsGiven(PyDatasetAdapter):
    """Batches as they are: Keras' own makes a tuple of a lone array, and PyTorch's loader lists of tuples."""

    def _standardize_batch(self, batch: Any) -> Any:
        return batch

    def get_torch_dataloader(self) -> Any:
        loader = super().get_torch_dataloader()
        loader.collate_fn = self._standardize_batch
        return loader


def _concatenated(*arrays: Any) -> np.ndarray:
    """Rows of all, where they are of different lengths with zeros at the end."""
    given = [np.asarray(a) for a in arrays]
    longest = np.max([a.shape[1:] for a in given], axis=0, initial=0)
    blank: dict[str, Any] = {"O": "", "U": "", "S": b""}
    sides = [[(0, 0), *((0, int(n) - m) for n, m in zip(longest, a.shape[1:], strict=True))] for a in given]
    padded = [np.pad(a, s, constant_values=blank.get(a.dtype.kind, 0)) for a, s in zip(given, sides, strict=True)]
    return np.concatenate(padded)


class SequenceParts(Epochs):
    """N batches of the user's a step, one for each rank; what is left at the end is divided sample by sample.

    The last batch of the user's, which may be short, stays the last.
    """

    def __init__(self, data: Any, draws: Draws, given: int | None, seed: int | None, together: int = 1) -> None:
        self._data, self._draws, self._world, self._n = data, draws, draws.world, data.num_batches
        self._size = self._world.size * together
        self._ranks = range(together) if together > 1 else [self._world.rank]
        tail = self._n % self._size
        left = sum(length(data[i]) for i in range(self._n - tail, self._n)) if tail else 0
        workers = {
            "workers": data.workers,
            "use_multiprocessing": data.use_multiprocessing,
            "max_queue_size": data.max_queue_size,
        }
        super().__init__(self._n // self._size + (left >= self._size), given, seed, **workers)

    def part(self, turn: int, step: int) -> Any:
        parts = [self._part(rank, turn, step) for rank in self._ranks]
        return parts[0] if len(parts) == 1 else keras.tree.map_structure(_concatenated, *parts)

    def _part(self, rank: int, turn: int, step: int) -> Any:
        low = step * self._size
        places = np.arange(low, min(low + self._size, self._n))
        inner = places[places < self._n - 1]
        places[: len(inner)] = self.order(inner, self._n - 1, turn) if len(inner) else inner
        if len(places) == self._size:
            return self._data[int(places[rank])]
        batches = [self._data[int(i)] for i in places]
        rest = keras.tree.map_structure(_concatenated, *batches)
        start, stop = share(length(rest), self._size, rank)
        return take(rest, slice(start, stop))

    def on_epoch_begin(self) -> None:
        with self._draws.common():
            self._data.on_epoch_begin()

    def on_epoch_end(self) -> None:
        """The data set may shuffle itself here; called before the first epoch, too. Raises on all ranks where they
        have other orders then: their generator is one that nobody else can reach."""
        with self._draws.common():
            self._data.on_epoch_end()
        with self._draws.common(keep=True):
            found = digest([self._data[i] for i in sorted({0, self._n - 1})])
        if len(set(self._world.allgather_bytes(found.encode()))) > 1:
            what = f"{type(self._data).__name__} has other batches on each rank: it draws its order by itself"
            fix = "draw from random or numpy.random, which are alike in on_epoch_end, or seed your own generator"
            raise ConfigError(what, where="model.fit, on_epoch_end", fix=fix, common=True)


class Divided(keras.utils.PyDataset):
    """A rank's own PyDataset. If it shuffles before it takes its part, then all ranks shuffle alike."""

    def __init__(self, data: Any, draws: Draws) -> None:
        super().__init__(data.workers, data.use_multiprocessing, data.max_queue_size)
        self._data, self._draws = data, draws

    @property
    def num_batches(self) -> int | None:
        return self._data.num_batches

    def __getitem__(self, index: int) -> Any:
        return self._data[index]

    def on_epoch_begin(self) -> None:
        with self._draws.common():
            self._data.on_epoch_begin()

    def on_epoch_end(self) -> None:
        with self._draws.common():
            self._data.on_epoch_end()


class SequenceRange(keras.utils.PyDataset):
    """Batches [start, stop) of another PyDataset."""

    def __init__(self, data: Any, start: int, stop: int) -> None:
        super().__init__(data.workers, data.use_multiprocessing, data.max_queue_size)
        self._data, self._start, self._stop = data, start, stop

    def __len__(self) -> int:
        return self._stop - self._start

    def __getitem__(self, index: int) -> Any:
        return self._data[self._start + index]


def in_order(data: Any) -> Any:
    """A tf.data.Dataset that gives the same order on all ranks. Raises ConfigError where a part of it must not."""
    import tensorflow as tf

    if _any_order(data):
        what = "the data set is free to give its samples in any order, and would in another one on each rank"
        raise ConfigError(what, where="tf.data", fix="leave deterministic=False out of its map, interleave and batch")
    if data.options().deterministic is not False:
        return data
    options = tf.data.Options()
    options.deterministic = True
    return data.with_options(options)


def _any_order(data: Any) -> bool:
    """Whether a step of the pipeline has deterministic=False."""
    if type(data).__name__ == "_ParallelInterleaveDataset":  # which alone does not keep what it was told
        nodes = _graph_of(data).node
        own = any(x.op.startswith("ParallelInterleave") and x.attr["deterministic"].s == b"false" for x in nodes)
    else:
        own = getattr(data, "_deterministic", "") == "false"
    return own or any(map(_any_order, data._inputs()))


class Seen:
    """The order in which a tf.data.Dataset gives its batches, which ranks compare: a look at it on one rank alone, or
    numbers drawn there alone, shift what it shuffles on that rank."""

    def __init__(self) -> None:
        self._passes: list[list[int]] = []
        self._first = 0

    def begin(self) -> None:
        """Passes until now were looks, on all ranks."""
        self._first = len(self._passes)

    def watched(self, data: Any) -> Any:
        """``data``, of whose batches hashes are noted: of targets where there are any, as inputs may be augmented with
        numbers that each rank draws by itself."""
        import tensorflow as tf

        def number() -> Any:
            self._passes.append([])
            yield len(self._passes) - 1

        def note(number: Any, found: Any) -> Any:
            self._passes[number].append(int(found))
            return found

        def noted(element: Any, number: Any) -> Any:
            told = element[1] if isinstance(element, tuple) and len(element) > 1 else element
            leaves = [leaf for leaf in tf.nest.flatten(told) if isinstance(leaf, tf.Tensor) and leaf.shape.rank]
            rows = [leaf[: max(1, WATCHED // (math.prod(d or 1 for d in leaf.shape[1:]) or 1))] for leaf in leaves]
            text = tf.strings.join([tf.io.serialize_tensor(x) for x in rows]) if rows else tf.constant("")
            tf.numpy_function(note, [number, tf.strings.to_hash_bucket_fast(text, (1 << 63) - 1)], tf.int64)
            return element

        numbers = tf.data.Dataset.from_generator(number, output_signature=tf.TensorSpec([], tf.int64))
        numbers = numbers.flat_map(lambda k: tf.data.Dataset.from_tensors(k).repeat())
        found, count = tf.data.Dataset.zip((data, numbers)).map(noted), int(data.cardinality())
        return found.apply(tf.data.experimental.assert_cardinality(count)) if count >= 0 else found

    def __len__(self) -> int:
        return sum(map(len, self._passes[self._first :]))

    def order(self, batches: int) -> bytes:
        """Of the batches that were given first."""
        notes = [x for each in self._passes[self._first :] for x in each][:batches]
        return hashlib.sha256(repr(notes).encode()).digest()

    def last(self) -> bytes:
        """Of the last pass, by its first batch."""
        return repr(self._passes[-1][:1] if self._passes else []).encode()


def varies(data: Any) -> bool:
    """Return whether the samples of a tf.data.Dataset may be of different lengths, as texts are."""
    import tensorflow as tf

    return any(
        spec.shape.rank is None or None in spec.shape[1:].as_list() for spec in tf.nest.flatten(data.element_spec)
    )


def joined(data: Any, count: int) -> Any:
    """Each ``count`` batches of a tf.data.Dataset as one, in tuples. Samples are padded to the longest, with what the
    data set itself pads with; a RaggedTensor stays one."""
    import tensorflow as tf

    specs = tf.nest.flatten(data.element_spec)
    values = paddings(data)
    if any(isinstance(spec, tf.RaggedTensorSpec) for spec in specs):

        def merge(spec: Any, value: Any, x: Any) -> Any:
            x = x.merge_dims(0, 1)
            return x if isinstance(spec, tf.RaggedTensorSpec) or not is_ragged(x) else x.to_tensor(value)

        def merged(*element: Any) -> Any:
            leaves = [merge(*each) for each in zip(specs, values, tf.nest.flatten(element), strict=True)]
            return tf.nest.pack_sequence_as(element, leaves)

        return data.ragged_batch(count).map(merged)

    def counted(*element: Any) -> Any:
        return element, rows_in(element)

    def one(element: Any, rows: Any) -> Any:
        there = tf.sequence_mask(rows)
        return tf.nest.map_structure(lambda x: tf.boolean_mask(x, there), element)

    whole = data.map(counted)
    packed_values = tf.nest.pack_sequence_as(whole.element_spec[0], values)
    return whole.padded_batch(count, padding_values=(packed_values, tf.constant(0))).map(one)


def rows_in(element: Any) -> Any:
    """The number of samples in a batch of a tf.data.Dataset."""
    import tensorflow as tf

    first = tf.nest.flatten(element)[0]
    return tf.cast(first.nrows(), tf.int32) if is_ragged(first) else tf.shape(first)[0]


def paddings(data: Any) -> list[Any]:
    """Return the padding value of each leaf, as the graph of the data set says. Raises ConfigError where
    it does not: what pads other data than those that come out, with other values than zeros."""
    import tensorflow as tf

    types = [spec.dtype for spec in tf.nest.flatten(data.element_spec)]
    zeros = [tf.zeros([], kind) for kind in types]
    told = _padded_batches(data)
    if all(value is not None and not value for values in told for value in values):  # 0, False, no text
        return zeros
    if len(told) == 1 and all(value is not None for value in told[0]):
        values = [tf.constant(value) for value in told[0]]
        if [value.dtype for value in values] == types:
            return values
    what = "its batches are of different lengths, and what it pads them with cannot be told from outside"
    raise ConfigError(what, where="tf.data", fix="pad with zeros, or to one length: padded_batch(n, padded_shapes=...)")


def _padded_batches(data: Any) -> list[list[Any]]:
    """[what each leaf is padded with, or None where that is computed], of each padded_batch in the data set."""
    import tensorflow as tf

    graph = _graph_of(data)
    found = []
    for nodes in (graph.node, *(function.node_def for function in graph.library.function)):
        constants = {x.name: tf.make_ndarray(x.attr["value"].tensor) for x in nodes if x.op == "Const"}
        for node in nodes:
            if node.op.startswith("PaddedBatchDataset"):
                leaves = len(node.attr["Toutput_types"].list.type)
                inputs = [name.split(":")[0] for name in node.input]
                values = [constants.get(name) for name in inputs[2 + leaves : 2 + 2 * leaves]]
                found.append([None if x is None else x.item() if x.dtype.hasobject else x[()] for x in values])
    return found


def _graph_of(data: Any) -> Any:
    import tensorflow as tf

    graph = data._as_serialized_graph(external_state_policy=tf.data.experimental.ExternalStatePolicy.IGNORE)
    return tf.compat.v1.GraphDef.FromString(graph.numpy())


def dataset_parts(data: Any, world: Communicator, batch: int, seen: Seen | None = None, together: int = 1) -> Any:
    """A tf.data.Dataset of batches of ``batch`` samples -> this rank's parts of global batches, which are ``together``
    times the batches of all ranks."""
    import tensorflow as tf

    def count(*element: Any) -> Any:
        return rows_in(element)

    def part(*element: Any) -> Any:
        each, rest = tf.math.floordiv(count(*element), world.size), tf.math.floormod(count(*element), world.size)
        start = world.rank * each + tf.minimum(world.rank, rest)
        stop = start + each + tf.cast(world.rank < rest, tf.int32)
        parts = tf.nest.map_structure(lambda x: x[start:stop], element)
        return parts if isinstance(data.element_spec, tuple) else parts[0]

    whole, known = world.size * together, int(data.cardinality())
    apart = varies(data)
    steps, certain = -(-known // whole), known % whole == 0 if apart else known % whole != 1
    parts = joined(data, whole) if apart else data.rebatch(batch * whole)
    parts = parts if seen is None else seen.watched(parts)
    if known > 0 and certain and batch >= world.size:  # the last global batch has enough samples
        return parts.map(part).apply(tf.data.experimental.assert_cardinality(steps)).prefetch(2)
    return parts.filter(lambda *element: count(*element) >= world.size).map(part).prefetch(2)


def first_of(x: Any, y: Any, weight: Any) -> Any:
    """A batch of what a rank's ``fit`` gets: (x, y, ...)."""
    if isinstance(x, Epochs):
        return x.part(0, 0)
    kind = kind_of(x)
    if kind == "arrays":
        return take(packed(columns(x, y, weight)), slice(0, BATCH))
    return x[0] if kind == "sequence" else first_batch(x)


def first_batch(data: Any) -> Any:
    if kind_of(data) == "loader":
        return next(map(as_arrays, data), None)
    import tensorflow as tf

    for batch in data:
        return tf.nest.map_structure(lambda leaf: leaf if is_ragged(leaf) else leaf.numpy(), batch)
    return None


def steps_of(kind: str, x: Any, batch: int) -> int | None:
    """Batches in one pass over a rank's own data; None: nobody knows, or without end."""
    if kind == "arrays":
        return math.ceil(length(x) / batch)
    if kind == "sequence":
        return x.num_batches
    if kind == "loader":
        return len(x) if hasattr(x.dataset, "__len__") else None
    found = int(x.cardinality()) if kind == "dataset" else -1
    return found if found >= 0 else None


def _ends(x: Any) -> bool:
    """Return whether a tf.data.Dataset has an end, though its number of batches is known there alone.

    All ranks go through all of it, and come there in the same step."""
    return kind_of(x) == "dataset" and int(x.cardinality()) == -2  # tf.data.UNKNOWN_CARDINALITY


def training(
    x: Any,
    y: Any,
    weight: Any,
    *,
    batch: int | None,
    steps: int | None,
    seed: int | None,
    draws: Draws,
    execution: int = 1,
    seen: Seen | None = None,
) -> tuple[dict[str, Any], dict[str, str]]:
    """(what ``fit`` gets instead, what all ranks must have alike). ``steps``: ``steps_per_epoch``, which Keras makes in
    whole executions of ``execution`` steps. ``seen`` gets the order of a tf.data.Dataset."""
    kind, where, world = kind_of(x), "model.fit", draws.world
    given = steps and -(-steps // execution) * execution
    together = record.together if (record := recording()) else 1  # ranks whose batches this one takes
    facts = {"data": kind}
    if kind == "other":
        raise ConfigError(
            f"{type(x).__name__} cannot be divided among ranks",
            where=where,
            fix="give arrays, a tf.data.Dataset or a PyDataset, or divide it yourself and say "
            "hk.distribute(model, shard=False)",
        )
    if kind == "arrays":
        parts = packed(columns(x, y, weight))
        n = length(parts)
        _enough(n, "samples", world)
        whole = (batch or BATCH) * together * world.size
        if steps and not batch:  # Keras makes that many batches of the data
            whole = math.ceil(n / steps)
            _enough(whole, f"samples in each of {steps} steps", world)
        facts |= {
            "samples": str(n),
            BATCH_SIZE: str(batch or whole / world.size),
            f"data ({DIFFERS})": digest(parts),
        }
        return {"x": ArrayParts(parts, whole, world, given, seed), "y": None, "sample_weight": None}, facts
    if kind == "loader":
        return _loader(x, seed, together, world)
    x = in_order(x) if kind == "dataset" else x
    known = steps_of(kind, x, batch or BATCH)
    if known is None and not steps and not _ends(x):
        raise ConfigError("nobody knows how many batches the data set has", where=where, fix="give steps_per_epoch=")
    if kind == "sequence":
        if known is None:
            raise ConfigError("a PyDataset without end cannot be divided", where=where, fix="give it num_batches")
        first = x[0]
        size = length(first)
        _enough(known * size, "samples", world)
        data: Any = SequenceParts(x, draws, given, seed, together)
    else:
        first = first_batch(x)
        size = length(first) if first is not None else 0
        _enough(size if known == 1 else (known or world.size) * size, "samples", world)
        data = dataset_parts(x, world, size, seen, together)
    facts |= {
        "batches": str(known),
        BATCH_SIZE: str(size),
        f"first batch ({DIFFERS})": digest(first),
    }
    return {"x": data, "y": None, "sample_weight": None}, facts


def _loader(x: Any, seed: int | None, together: int, world: Communicator) -> tuple[dict[str, Any], dict[str, str]]:
    """PyTorch's DataLoader, as ``ht.shard`` divides it: its own shuffle, samplers and workers."""
    from hvd_train.script.dataloader import passes, shares

    shares.check(x)
    loader = passes.shared(x, seed or 0, world.rank, world.size, together=together)
    facts = shares.facts(x) | {"data": "loader", BATCH_SIZE: str(x.batch_size or BATCH)}
    return {"x": loader, "y": None, "sample_weight": None}, facts


def undivided(
    x: Any, *, batch: int | None, steps: int | None, columns_: tuple[Any, Any, Any], draws: Draws
) -> tuple[dict, dict[str, str]]:
    """Data that the user has divided: only the number of steps must be the same on all ranks."""
    kind = kind_of(x)
    batch = batch or (math.ceil(length(x) / steps) if steps and kind == "arrays" else BATCH)  # as Keras does
    known = steps_of(kind, x, batch)
    if known is None and not steps:
        raise ConfigError(
            "nobody knows how many batches the data set has",
            where="model.fit",
            fix="give .take(...) or steps_per_epoch=",
        )
    if steps and kind == "dataset":
        x = x.repeat()  # a rank that runs out of data would leave the others waiting
        known = None
    x = Divided(x, draws) if kind == "sequence" else x
    count = f"{steps or known}" if known is None or not steps else f"{steps} of {known}"
    data = {"x": x, "y": columns_[1], "sample_weight": columns_[2]}
    return data, {"steps in an epoch (make them equal: .take(...) or steps_per_epoch=)": count}


@dataclass
class Scored:
    """What this rank scores. ``part``: only its part of the whole; ``counts``: whether what it finds counts, as another
    rank may score the same; ``window``: how many of its batches in a row are a global batch; ``limit``: ``steps``."""

    data: tuple[Any, Any, Any]
    part: bool = True
    counts: bool = True
    window: int = 1
    batch: int | None = None
    limit: int | None = None
    seen: Seen | None = None
    facts: dict[str, str] = field(default_factory=dict)


def scoring(
    x: Any,
    y: Any,
    weight: Any,
    world: Communicator,
    *,
    batch: int | None,
    steps: int | None,
    uncut: bool,
    execution: int = 1,
    seen: Seen | None = None,
) -> Scored:
    """``steps``: of global batches, which Keras makes in whole executions of ``execution`` steps. ``uncut``: a global
    batch is one rank's. Too few samples or batches, or an unknown number of them, are scored whole on every rank."""
    kind, window, size = kind_of(x), world.size, world.size
    taken = steps and -(-steps // execution) * execution
    if kind == "arrays":
        parts = columns(x, y, weight)
        count, same = length(parts), digest(parts)
        if steps and not batch:  # Keras makes that many batches of the data
            batch, window = math.ceil(count / steps), 1
        unit = (batch or BATCH) * window
        limit, count = None, min(count, taken * unit) if taken else count
    else:
        unit = size
        if kind == "dataset":
            x = in_order(x)
            if varies(x):
                alone = not isinstance(x.element_spec, tuple)
                x, unit, window = joined(x, size), 1, 1
                x = x.map(lambda only: only) if alone else x
            x = x if seen is None else seen.watched(x)
        limit = taken and taken * unit
        if kind == "dataset":
            x = x.take(limit) if limit else x
        count = (steps_of(kind, x, 1) or 0) if kind in ("sequence", "dataset") else 0
        same = "" if not count else digest(x[0] if kind == "sequence" else first_batch(x))
        if count:
            limit, count = None, min(count, limit or count)
    facts = {f"data to score ({DIFFERS})": f"{kind} of {count}, {same}", "batch_size to score": str(batch)}
    given = ((texts(parts) + (None, None))[:3]) if kind == "arrays" else (x, y, weight)
    found = Scored(given, False, True, window, batch, limit, seen, facts | {"steps to score": str(steps)})

    def rows(start: int, stop: int) -> tuple[Any, Any, Any]:
        if kind == "arrays":
            return (texts(take(parts, slice(start, stop))) + (None, None))[:3]
        return (SequenceRange(x, start, stop) if kind == "sequence" else x.skip(start).take(stop - start)), None, None

    if count < size:
        return found if not count else replace(found, data=rows(0, count))
    unit = unit if uncut else 1
    pieces = -(-count // unit)
    start, stop = share(max(pieces, size), size, world.rank)
    if pieces < size:  # a rank without a piece scores another's, which counts there
        start, stop = world.rank % pieces, world.rank % pieces + 1
    mine = rows(start * unit, min(stop * unit, count))
    return replace(found, data=mine, part=True, counts=world.rank < pieces)


def split(x: Any, y: Any, weight: Any, fraction: float) -> tuple[Any, Any]:
    """Training and validation parts of arrays: the last ``fraction`` validates, as in Keras."""
    if kind_of(x) != "arrays":
        what = f"validation_split cannot split a {type(x).__name__}"
        raise ConfigError(what, where="model.fit", fix="give arrays, or validation_data=")
    parts = columns(x, y, weight)
    n = length(parts)
    at = math.floor(n * (1 - fraction))
    if not 0 < at < n:
        what = f"validation_split={fraction} of {n} samples leaves one part without any"
        raise ConfigError(what, where="model.fit", fix="give more samples or another part")
    first, last = take(parts, slice(0, at)), take(parts, slice(at, None))
    return (first + (None, None))[:3], last


def _enough(n: int, what: str, world: Communicator) -> None:
    if n < world.size:
        raise ConfigError(
            f"the data set has {n} {what} for {world.size} ranks", where="model.fit", fix="start fewer ranks"
        )


def pass_seed(seed: int, turn: int) -> int:
    """The order's key for the ``turn``-th call of fit: calls in a row do not repeat each other's order."""
    return mix(seed, turn)

"""Each rank's part of the data that a user's own script hands to ``fit``, ``evaluate`` and ``predict``.

Training: the order of samples is cut into global batches of ``batch_size`` x N, of which each rank takes a contiguous
part; all ranks take the same number of steps. A rest of fewer samples than ranks is left out of an epoch.
Evaluation and prediction: each rank takes one contiguous part of the whole, every sample exactly once.
"""

from __future__ import annotations

import hashlib
import math
from typing import Any

import keras
import numpy as np
from keras.src.trainers.data_adapters.py_dataset_adapter import PyDatasetAdapter

from hvd_train.attach.draws import Draws
from hvd_train.attach.recorded import recording
from hvd_train.data.order import mix, permute, share
from hvd_train.errors import ConfigError, DataError
from hvd_train.protocol import Communicator

BATCH = 32  # Keras' own, where the user gives none
BATCH_SIZE = "batch_size"  # a fact of training: a rank's samples in every step but an epoch's last
DIFFERS = (
    "drawn at random? call keras.utils.set_random_seed(n) first; divided already? hk.distribute(model, shard=False)"
)
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

    A data frame is an array, a series of it a column, as Keras takes them.
    """

    def array(leaf: Any) -> Any:
        if leaf is None:
            return None
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


def take(parts: Any, places: Any) -> Any:
    return keras.tree.map_structure(lambda a: None if a is None else a[places], parts)


def length(parts: Any) -> int:
    counts = {len(leaf) for leaf in keras.tree.flatten(parts) if leaf is not None}
    if len(counts) != 1:
        raise DataError(f"the arrays have {sorted(counts)} samples", where="fit", fix="give arrays of one length")
    return counts.pop()


def digest(parts: Any) -> str:
    """A short hash of structure, shapes, types and up to ``SAMPLED`` rows of every array."""
    found = hashlib.sha256()
    for leaf in keras.tree.flatten(parts):
        array = np.asarray(leaf if leaf is not None else ())
        rows = np.unique(np.linspace(0, len(array) - 1, SAMPLED).astype(np.int64)) if array.ndim and len(array) else ...
        found.update(f"{array.shape}{array.dtype}".encode())
        chosen = array[rows]
        found.update(repr(chosen.tolist()).encode() if chosen.dtype.hasobject else np.ascontiguousarray(chosen).data)
    return found.hexdigest()[:12]


class Epochs(keras.utils.PyDataset):
    """Steps of an epoch as a pure function of (epoch, step). ``epoch`` is set when one begins.

    ``steps_per_epoch``: of the user; epochs then go on where the last one ended, round and round the ``passes``.
    """

    def __init__(self, steps: int, steps_per_epoch: int | None, seed: int | None, **workers: Any) -> None:
        super().__init__(**workers)
        self.steps, self._given, self._seed, self.epoch = steps, steps_per_epoch, seed, 0

    def __len__(self) -> int:
        return self._given or self.steps

    def __getitem__(self, index: int) -> Any:
        turn, step = divmod(self.epoch * len(self) + index, self.steps)
        return self.part(turn, step)

    def part(self, turn: int, step: int) -> Any:
        """This rank's part of a step of the ``turn``-th pass over the data."""
        raise NotImplementedError

    def order(self, places: np.ndarray, n: int, turn: int) -> np.ndarray:
        return places if self._seed is None else permute(places, n, self._seed, turn)


class ArrayParts(Epochs):
    def __init__(
        self, parts: Any, batch: int, world: Communicator, steps_per_epoch: int | None, seed: int | None
    ) -> None:
        self._parts, self._world, self._n, self._global = parts, world, length(parts), batch * world.size
        rest = self._n % self._global
        super().__init__(self._n // self._global + (rest >= world.size), steps_per_epoch, seed)

    def part(self, turn: int, step: int) -> Any:
        return take(self._parts, self.order(np.arange(*self._places(step)), self._n, turn))

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
        """The same as a tf.data.Dataset: one epoch, that of ``epoch`` when it begins. Python is asked once in a pass
        over the data. None where leaves are missing or are no numbers."""
        import tensorflow as tf

        leaves = keras.tree.flatten(self._parts)
        if any(
            leaf is None or leaf.dtype.kind not in "biufUS" and not isinstance(leaf.flat[0], str) for leaf in leaves
        ):
            return None
        tensors = [tf.constant(leaf) for leaf in leaves]
        places = [np.arange(*self._places(step)) for step in range(self.steps)]
        ends = np.cumsum([0, *map(len, places)])

        def passes() -> Any:
            at = self.epoch * len(self)
            last = at + len(self)
            while at < last:
                turn, step = divmod(at, self.steps)
                count = min(self.steps - step, last - at)
                yield self.order(np.concatenate(places), self._n, turn), ends[step : step + count + 1]
                at += count

        def steps(rows: Any, bounds: Any) -> Any:
            return tf.data.Dataset.range(tf.size(bounds, tf.int64) - 1).map(lambda k: rows[bounds[k] : bounds[k + 1]])

        def taken(rows: Any) -> Any:
            return keras.tree.pack_sequence_as(self._parts, [tf.gather(x, rows) for x in tensors])

        integers = tf.TensorSpec([None], tf.int64)
        orders = tf.data.Dataset.from_generator(passes, output_signature=(integers, integers))
        counted = tf.data.experimental.assert_cardinality(len(self))
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


class SequenceParts(Epochs):
    """N batches of the user's a step, one for each rank; what is left at the end is divided sample by sample.

    The last batch of the user's, which may be short, stays the last.
    """

    def __init__(
        self, data: Any, draws: Draws, steps_per_epoch: int | None, seed: int | None, together: int = 1
    ) -> None:
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
        super().__init__(self._n // self._size + (left >= self._size), steps_per_epoch, seed, **workers)

    def part(self, turn: int, step: int) -> Any:
        parts = [self._part(rank, turn, step) for rank in self._ranks]
        return parts[0] if len(parts) == 1 else keras.tree.map_structure(lambda *rows: np.concatenate(rows), *parts)

    def _part(self, rank: int, turn: int, step: int) -> Any:
        low = step * self._size
        places = np.arange(low, min(low + self._size, self._n))
        inner = places[places < self._n - 1]
        places[: len(inner)] = self.order(inner, self._n - 1, turn) if len(inner) else inner
        if len(places) == self._size:
            return self._data[int(places[rank])]
        batches = [self._data[int(i)] for i in places]
        joined = keras.tree.map_structure(lambda *leaves: np.concatenate(leaves), *batches)
        start, stop = share(length(joined), self._size, rank)
        return take(joined, slice(start, stop))

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
    import tensorflow as tf

    if type(data).__name__ == "_ParallelInterleaveDataset":  # which alone does not keep what it was told
        graph = data._as_serialized_graph(external_state_policy=tf.data.experimental.ExternalStatePolicy.IGNORE)
        nodes = tf.compat.v1.GraphDef.FromString(graph.numpy()).node
        own = any(x.op.startswith("ParallelInterleave") and x.attr["deterministic"].s == b"false" for x in nodes)
    else:
        own = getattr(data, "_deterministic", "") == "false"
    return own or any(map(_any_order, data._inputs()))


def dataset_parts(data: Any, world: Communicator, batch: int) -> Any:
    """A tf.data.Dataset of batches of ``batch`` samples -> this rank's parts of global batches."""
    import tensorflow as tf

    def count(*element: Any) -> Any:
        return tf.shape(tf.nest.flatten(element)[0])[0]

    def part(*element: Any) -> Any:
        each, rest = tf.math.floordiv(count(*element), world.size), tf.math.floormod(count(*element), world.size)
        start = world.rank * each + tf.minimum(world.rank, rest)
        stop = start + each + tf.cast(world.rank < rest, tf.int32)
        parts = tf.nest.map_structure(lambda x: x[start:stop], element)
        return parts if isinstance(data.element_spec, tuple) else parts[0]

    steps, certain = -(-int(data.cardinality()) // world.size), int(data.cardinality()) % world.size != 1
    parts = data.rebatch(batch * world.size)
    if int(data.cardinality()) > 0 and certain and batch >= world.size:  # the last global batch has enough samples
        return parts.map(part).apply(tf.data.experimental.assert_cardinality(steps)).prefetch(2)
    return parts.filter(lambda *element: count(*element) >= world.size).map(part).prefetch(2)


def first_of(x: Any, y: Any, weight: Any) -> Any:
    """A batch of what a rank's ``fit`` gets: (x, y, ...)."""
    if isinstance(x, Epochs):
        return x.part(0, 0)
    kind = kind_of(x)
    return (x, y, weight) if kind == "arrays" else x[0] if kind == "sequence" else first_batch(x)


def first_batch(data: Any) -> Any:
    if kind_of(data) == "loader":
        return next(map(as_arrays, data), None)
    return next(iter(data.as_numpy_iterator()), None)


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


def training(
    x: Any, y: Any, weight: Any, *, batch: int, steps: int | None, seed: int | None, draws: Draws
) -> tuple[dict[str, Any], dict[str, str]]:
    """(what ``fit`` gets instead, what all ranks must have alike). ``steps``: ``steps_per_epoch``."""
    kind, where, world = kind_of(x), "model.fit", draws.world
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
        facts |= {
            "samples": str(n),
            BATCH_SIZE: str(batch),
            f"data ({DIFFERS})": digest(parts),
        }
        data: Any = ArrayParts(parts, batch * together, world, steps, seed)
        return {"x": data, "y": None, "sample_weight": None, "steps_per_epoch": None}, facts
    if kind == "loader":
        return _loader(x, steps, seed, together, world)
    x = in_order(x) if kind == "dataset" else x
    known = steps_of(kind, x, batch)
    if known is None and not steps:
        raise ConfigError("nobody knows how many batches the data set has", where=where, fix="give steps_per_epoch=")
    if kind == "sequence":
        if known is None:
            raise ConfigError("a PyDataset without end cannot be divided", where=where, fix="give it num_batches")
        first = x[0]
        size = length(first)
        _enough(known * size, "samples", world)
        data = SequenceParts(x, draws, steps, seed, together)
        steps = None
    else:
        first = first_batch(x)
        size = length(first) if first is not None else 0
        _enough(size if known == 1 else (known or world.size) * size, "samples", world)
        data = dataset_parts(x, world, size * together)
        data = data.repeat() if steps and known is None else data
    facts |= {
        "batches": str(known),
        BATCH_SIZE: str(size),
        f"first batch ({DIFFERS})": digest(first),
    }
    return {"x": data, "y": None, "sample_weight": None, "steps_per_epoch": steps}, facts


def _loader(
    x: Any, steps: int | None, seed: int | None, together: int, world: Communicator
) -> tuple[dict[str, Any], dict[str, str]]:
    """PyTorch's DataLoader, as ``ht.shard`` divides it: its own shuffle, samplers and workers."""
    from hvd_train.attach import pt_passes, pt_share

    pt_share.check(x)
    loader = pt_passes.shared(x, seed or 0, world.rank, world.size, together=together)
    facts = pt_share.facts(x) | {"data": "loader", BATCH_SIZE: str(x.batch_size or BATCH)}
    return {"x": loader, "y": None, "sample_weight": None, "steps_per_epoch": steps}, facts


def undivided(
    x: Any, *, batch: int, steps: int | None, columns_: tuple[Any, Any, Any], draws: Draws
) -> tuple[dict, dict[str, str]]:
    """Data that the user has divided: only the number of steps must be the same on all ranks."""
    kind = kind_of(x)
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
    data = {"x": x, "y": columns_[1], "sample_weight": columns_[2], "steps_per_epoch": steps}
    return data, {"steps in an epoch (make them equal: .take(...) or steps_per_epoch=)": count}


def scoring(
    x: Any, y: Any, weight: Any, steps: int | None, world: Communicator
) -> tuple[tuple[Any, Any, Any], bool, dict[str, str]]:
    """(this rank's part, whether it is only a part, what all ranks must have alike).

    Too few samples or batches, or an unknown number of them, are scored whole on every rank.
    """
    kind = kind_of(x)
    x = in_order(x) if kind == "dataset" else x
    if kind == "arrays":
        parts = columns(x, y, weight)
        count, same = length(parts), digest(parts)
    else:
        count = (steps_of(kind, x, 1) or 0) if kind in ("sequence", "dataset") else 0
        same = "" if not count else digest(x[0] if kind == "sequence" else first_batch(x))
    facts = {f"data to score ({DIFFERS})": f"{kind} of {count}, {same}"}
    if steps or count < world.size:
        return (x, y, weight), False, facts
    start, stop = share(count, world.size, world.rank)
    if kind == "arrays":
        mine = take(parts, slice(start, stop))
        return (mine + (None, None))[:3], True, facts
    part = SequenceRange(x, start, stop) if kind == "sequence" else x.skip(start).take(stop - start)
    return (part, None, None), True, facts


def split(x: Any, y: Any, weight: Any, fraction: float) -> tuple[Any, Any]:
    """Training and validation parts of arrays: the last ``fraction`` validates, as in Keras."""
    parts = columns(x, y, weight)
    at = math.floor(length(parts) * (1 - fraction))
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

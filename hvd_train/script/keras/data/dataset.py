"""A tf.data.Dataset, divided among ranks: each rank reads all of it and takes its part of each global batch."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

from hvd_train.errors import ConfigError
from hvd_train.protocol import Communicator
from hvd_train.script.keras.data.leaves import caches, is_ragged, keep_first, kind_of

WATCHED = 4096  # values per batch that are hashed to compare orders
BATCHED = ("_BatchDataset", "_ParallelBatchDataset", "_PaddedBatchDataset")
BATCH_NODES = ("BatchDataset", "ParallelBatchDataset", "PaddedBatchDataset", "RebatchDataset")  # in a graph
# Steps after which batches are as they were.
KEEPING = (
    "Map",
    "Shuffle",
    "Prefetch",
    "Cache",
    "Options",
    "Take",
    "Skip",
    "Repeat",
    "AssertCardinality",
    "Concatenate",
)
MIXING = ("Repeat", "Concatenate", "Shuffle", "Interleave")  # steps of a pipeline after which any batch may be short


def in_order(data: Any) -> Any:
    """Give a tf.data.Dataset the same order on all ranks. Raises ConfigError if a step has deterministic=False."""
    import tensorflow as tf

    if _any_order(data):
        what = "the data set may give its samples in any order, which would differ between ranks"
        raise ConfigError(what, where="tf.data", fix="leave deterministic=False out of its map, interleave and batch")
    if data.options().deterministic is not False:
        return data
    options = tf.data.Options()
    options.deterministic = True
    return data.with_options(options)


def _any_order(data: Any) -> bool:
    """Return whether a step of the pipeline has deterministic=False."""
    if type(data).__name__ == "_ParallelInterleaveDataset":  # the only one that does not keep the argument
        nodes = _graph_of(data).node
        free = any(x.op.startswith("ParallelInterleave") and x.attr["deterministic"].s == b"false" for x in nodes)
    else:
        free = getattr(data, "_deterministic", "") == "false"
    return free or any(map(_any_order, data._inputs()))


class BatchOrderDigest:
    """Hashes of a tf.data.Dataset's batches in order, which ranks compare.

    If only one rank fetches a batch early or draws random numbers, the data set's shuffle differs there.
    """

    def __init__(self) -> None:
        self._passes: list[list[int]] = []
        self._first = 0

    def begin(self) -> None:
        """Ignore passes before this one. All ranks made them outside of training."""
        self._first = len(self._passes)

    def watched(self, data: Any) -> Any:
        """Return ``data`` with a step that records a hash of each batch."""
        import tensorflow as tf

        def number() -> Any:
            self._passes.append([])
            yield len(self._passes) - 1

        def note(number: Any, batch_hash: Any) -> Any:
            self._passes[number].append(int(batch_hash))
            return batch_hash

        def noted(element: Any, number: Any) -> Any:
            # Hash targets if there are any: inputs may be augmented with numbers that each rank draws.
            hashed = element[1] if isinstance(element, tuple) and len(element) > 1 else element
            leaves = [leaf for leaf in tf.nest.flatten(hashed) if isinstance(leaf, tf.Tensor) and leaf.shape.rank]
            # Only the first rows, about WATCHED values: hashing all would cost a pass over the batch.
            rows = [leaf[: max(1, WATCHED // (math.prod(d or 1 for d in leaf.shape[1:]) or 1))] for leaf in leaves]
            text = tf.strings.join([tf.io.serialize_tensor(x) for x in rows]) if rows else tf.constant("")
            tf.numpy_function(note, [number, tf.strings.to_hash_bucket_fast(text, (1 << 63) - 1)], tf.int64)
            return element

        # Python numbers the passes: a Dataset does not know how often it was iterated.
        numbers = tf.data.Dataset.from_generator(number, output_signature=tf.TensorSpec([], tf.int64))
        numbers = numbers.flat_map(lambda k: tf.data.Dataset.from_tensors(k).repeat())
        watched, count = tf.data.Dataset.zip((data, numbers)).map(noted), int(data.cardinality())
        return watched.apply(tf.data.experimental.assert_cardinality(count)) if count >= 0 else watched

    def __len__(self) -> int:
        return sum(map(len, self._passes[self._first :]))

    def order(self, batches: int) -> bytes:
        """Return a digest of the first ``batches`` batches."""
        notes = [x for each in self._passes[self._first :] for x in each][:batches]
        return hashlib.sha256(repr(notes).encode()).digest()

    def last(self) -> bytes:
        """Return a digest of the last pass' first batch."""
        return repr(self._passes[-1][:1] if self._passes else []).encode()


def varies(data: Any) -> bool:
    """Return whether the samples of a tf.data.Dataset may differ in length, as texts do."""
    import tensorflow as tf

    return any(
        spec.shape.rank is None or None in spec.shape[1:].as_list() for spec in tf.nest.flatten(data.element_spec)
    )


def _may_be_short(data: Any) -> bool:
    """Return whether batches of a tf.data.Dataset before the last may be short, as in batch(6).repeat(4)."""
    import tensorflow as tf

    name = type(data).__name__
    shapes = [getattr(spec, "shape", None) for spec in tf.nest.flatten(data.element_spec)]  # a window has none
    if "Batch" in name or all(shape is not None and shape.rank and shape[0] for shape in shapes):
        return False
    return any(x in name for x in MIXING) or any(map(_may_be_short, data._inputs()))


def drops_rest(data: Any) -> bool:
    """Return whether a tf.data.Dataset leaves out a short last batch, as ``batch(6, drop_remainder=True)`` does."""
    import tensorflow as tf

    # Then TensorFlow knows the size of each batch. It also does if the script has told it, in a generator's signature.
    shapes = [getattr(spec, "shape", None) for spec in tf.nest.flatten(data.element_spec)]
    if not all(shape is not None and shape.rank and shape[0] for shape in shapes):
        return False
    return any(
        node.op.startswith(BATCH_NODES) and bool(constants.get(node.input[-1].split(":")[0], False))
        for constants, node in _nodes(data)
    )


def batch_size(data: Any) -> int:
    """Return the argument of the last ``batch(n)`` or ``padded_batch(n)`` of a pipeline; 0 if it is unknown."""
    name = type(data).__name__
    if name in BATCHED:
        return int(data._batch_size)
    keeps = "FlatMap" not in name and any(x in name for x in KEEPING)
    sizes = set(map(batch_size, data._inputs())) if keeps else set()
    return sizes.pop() if len(sizes) == 1 else 0


def _full_batches(data: Any) -> tuple[int, Fraction] | None:
    """Return (samples of a full batch, samples of all batches as a multiple of it); None if they are not known."""
    name = type(data).__name__
    if name in BATCHED:
        size, samples = int(data._batch_size), int(data._input_dataset.cardinality())
        samples -= samples % size if bool(data._drop_remainder) else 0
        return None if samples < 0 else (size, Fraction(samples, size))
    parts = [_full_batches(x) for x in data._inputs()]
    found = [part for part in parts if part]
    if "Zip" in name:  # a batch of each
        return parts[0] if len(found) == len(parts) and len(set(found)) == 1 else None
    times = int(data._count) if "Repeat" in name else 1
    batches = times * sum(int(x.cardinality()) for x in data._inputs())  # others than these after take or zip
    if not found or len(found) < len(parts) or len(dict(found)) > 1 or batches != int(data.cardinality()):
        return None
    return found[0][0], times * sum((count for _, count in found), Fraction())


def joined(data: Any, count: int) -> Any:
    """Concatenate every ``count`` batches of a tf.data.Dataset; elements become tuples.

    Samples are padded to the longest, with the data set's own padding value; a RaggedTensor remains one.
    """
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

    def with_rows(*element: Any) -> Any:
        return element, rows_in(element)

    def one(element: Any, rows: Any) -> Any:
        # (batches, longest): padded_batch also pads the number of samples.
        there = tf.sequence_mask(rows)
        return tf.nest.map_structure(lambda x: tf.boolean_mask(x, there), element)

    whole = data.map(with_rows)
    packed_values = tf.nest.pack_sequence_as(whole.element_spec[0], values)
    return whole.padded_batch(count, padding_values=(packed_values, tf.constant(0))).map(one)


def rows_in(element: Any) -> Any:
    """Return the number of samples in a batch of a tf.data.Dataset."""
    import tensorflow as tf

    first = tf.nest.flatten(element)[0]
    return tf.cast(first.nrows(), tf.int32) if is_ragged(first) else tf.shape(first)[0]


def paddings(data: Any) -> list[Any]:
    """Return the padding value of each leaf, from the data set's graph.

    Raises ConfigError if it is unknown: a padded_batch of other elements, with values other than zero.
    """
    import tensorflow as tf

    types = [spec.dtype for spec in tf.nest.flatten(data.element_spec)]
    zeros = [tf.zeros([], kind) for kind in types]
    padding = _padded_batches(data)
    if all(value is not None and not value for values in padding for value in values):  # 0, False, empty string
        return zeros
    if len(padding) == 1 and all(value is not None for value in padding[0]):
        values = [tf.constant(value) for value in padding[0]]
        if [value.dtype for value in values] == types:
            return values
    what = "its batches have different lengths, and their padding value cannot be determined"
    raise ConfigError(what, where="tf.data", fix="pad with zeros, or to one length: padded_batch(n, padded_shapes=...)")


def _padded_batches(data: Any) -> list[list[Any]]:
    """Return each leaf's padding value, or None if it is computed, for each padded_batch in the data set."""

    padding = []
    for constants, node in _nodes(data):
        if node.op.startswith("PaddedBatchDataset"):
            # Inputs of PaddedBatchDatasetV2: data set, batch size, the leaves' shapes, the leaves' padding values.
            leaves = len(node.attr["Toutput_types"].list.type)
            inputs = [name.split(":")[0] for name in node.input]
            values = [constants.get(name) for name in inputs[2 + leaves : 2 + 2 * leaves]]
            padding.append([None if x is None else x.item() if x.dtype.hasobject else x[()] for x in values])
    return padding


def _nodes(data: Any) -> Iterator[tuple[dict[str, Any], Any]]:
    """Yield the nodes of the data set's graph, each with the constants {name: array} of its function."""
    import tensorflow as tf

    graph = _graph_of(data)
    for nodes in (graph.node, *(function.node_def for function in graph.library.function)):
        constants = {
            x.name: tf.make_ndarray(x.attr["value"].tensor)
            for x in nodes
            if x.op == "Const" and x.attr["dtype"].type != tf.resource.as_datatype_enum  # of a shuffle's seeds
        }
        for node in nodes:
            yield constants, node


def _graph_of(data: Any) -> Any:
    import tensorflow as tf

    # IGNORE: tables and generators cannot be serialized, but the graph is only read.
    graph = data._as_serialized_graph(external_state_policy=tf.data.experimental.ExternalStatePolicy.IGNORE)
    return tf.compat.v1.GraphDef.FromString(graph.numpy())


def dataset_parts(
    data: Any, world: Communicator, batch: int, order_digest: BatchOrderDigest | None = None, together: int = 1
) -> Any:
    """Return this rank's part of each global batch of a tf.data.Dataset, whose batches have ``batch`` samples.

    A global batch is ``together`` times the batches of all ranks.
    """
    import tensorflow as tf

    def count(*element: Any) -> Any:
        return rows_in(element)

    def part(*element: Any) -> Any:
        # As in data.order.share, the first ``rest`` ranks have one sample more.
        each, rest = tf.math.floordiv(count(*element), world.size), tf.math.floormod(count(*element), world.size)
        start = world.rank * each + tf.minimum(world.rank, rest)
        stop = start + each + tf.cast(world.rank < rest, tf.int32)
        parts = tf.nest.map_structure(lambda x: x[start:stop], element)
        return parts if isinstance(data.element_spec, tuple) else parts[0]

    whole, known = world.size * together, int(data.cardinality())
    padded = varies(data)
    if drops_rest(data):  # so does one process with batches as large as these together, whose steps all have one size
        if padded:
            parts = joined(data, whole).filter(lambda *x: count(*x) == batch * whole)
        else:
            parts = data.rebatch(batch * whole, drop_remainder=True)
        parts = parts if order_digest is None else order_digest.watched(parts)
        parts = parts.map(part)
        if known > 0:  # without it Keras finds the end within a step that has already counted
            parts = parts.apply(tf.data.experimental.assert_cardinality(known // whole))
        return _peekable(parts.prefetch(2))
    even = known % whole == 0
    steps, certain = -(-known // whole), even if padded else even or (known % whole != 1 and batch >= world.size)
    may_be_short, rest = _may_be_short(data), Fraction()
    if known > 0 and (may_be_short or not even):
        # ``rebatch`` fills up a short batch with samples of the next ones, so there may be fewer steps.
        size, full = _full_batches(data) or (0, Fraction())
        if not size or batch % size:  # unknown, or the first batch is short; a map may make several samples of each
            known = -1 if may_be_short else known
        elif not (padded and may_be_short):
            rest = full % whole * batch  # samples of the last global batch; 0: it is full
            steps, certain = math.ceil(full / whole), True
    left_out = certain and 0 < rest < world.size
    if padded:
        parts = joined(data, whole)
    else:
        parts = _checked(data, batch, known if known > 0 and not may_be_short else 0).rebatch(batch * whole)
    parts = parts if order_digest is None else order_digest.watched(parts)
    # Without a known number Keras finds the end within a step that has already counted, in Adam's correction as well.
    if known > 0 and certain and not left_out:
        return _peekable(parts.map(part).apply(tf.data.experimental.assert_cardinality(steps)).prefetch(2))
    parts = parts.filter(lambda *element: count(*element) >= world.size).map(part)
    told = known > 0 and left_out and steps > 1
    if told:
        parts = parts.apply(tf.data.experimental.assert_cardinality(steps - 1))
    parts = _peekable(parts.prefetch(2))
    parts.overruns = not told and int(data.cardinality()) > 0
    return parts


def _checked(data: Any, batch: int, known: int) -> Any:
    """Return the data set with a check of each batch: it must not have more samples than ``batch``.

    ``known``: the number of batches. Then only the last of them may have fewer samples; with 0 any of them may.
    """
    import tensorflow as tf

    what = f"the batches of the data set have other numbers of samples than {batch}, by which they are divided"
    text = f"{what}; tf.data; end it with .rebatch({batch}), or .unbatch().batch({batch})"

    def checked(number: Any, *element: Any) -> Any:
        rows = rows_in(element)
        good = rows <= batch if not known else (rows == batch) | ((rows < batch) & (number >= known - 1))
        with tf.control_dependencies([tf.debugging.Assert(good, [text])]):
            element = tf.nest.map_structure(tf.identity, element, expand_composites=True)
        return element if isinstance(data.element_spec, tuple) else element[0]

    unpacked = isinstance(data.element_spec, tuple)
    return data.enumerate().map(lambda number, element: checked(number, *(element if unpacked else (element,))))


def _peekable(data: Any) -> Any:
    """Make it safe to read only a part of the first pass, as Keras does to build a model, of a pipeline that caches."""
    if not caches(data):
        return data

    class Peekable(type(data)):  # type: ignore[misc]
        def __iter__(self) -> Any:
            iterator = super().__iter__()
            keep_first(self, iterator)
            return iterator

    data.__class__ = Peekable
    return data


def ends(x: Any) -> bool:
    """Return whether a tf.data.Dataset is finite, but its number of batches is known only at its end.

    All ranks read all of it, and reach the end in the same step.
    """
    return kind_of(x) == "dataset" and int(x.cardinality()) == -2  # tf.data.UNKNOWN_CARDINALITY

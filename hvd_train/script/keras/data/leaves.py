"""Batches and data sets as a script passes them: their kind, their leaves, rows of them, and a digest."""

from __future__ import annotations

import hashlib
import math
from typing import Any

import keras
import numpy as np

from hvd_train.errors import ConfigError, DataError

BATCH = 32  # Keras' default
BATCH_SIZE = "batch_size"  # key of a fact that ranks compare: samples per rank in all steps but an epoch's last
DIFFERS = (
    "drawn at random? call keras.utils.set_random_seed(n) first; divided already? hk.distribute(model, shard=False)"
)
SAMPLED = 64  # evenly spread rows of an array that are hashed to compare ranks


def kind_of(x: Any) -> str:
    """Return arrays, dataset (tf.data), sequence (PyDataset), loader (PyTorch's DataLoader) or other."""
    if isinstance(x, keras.utils.PyDataset):
        return "sequence"
    # By name, to import neither TensorFlow nor torch.
    if any(c.__name__ == "DatasetV2" for c in type(x).__mro__):
        return "dataset"
    if any(c.__name__ == "DataLoader" and c.__module__.startswith("torch.") for c in type(x).__mro__):
        return "loader"
    leaves = [leaf for leaf in keras.tree.flatten(x) if leaf is not None]
    # A data frame has a type for each of its columns.
    arrays = (hasattr(x, "shape") and (hasattr(x, "dtype") or hasattr(x, "to_numpy")) for x in leaves)
    return "arrays" if leaves and all(arrays) else "other"


def columns(x: Any, y: Any, sample_weight: Any) -> tuple[Any, ...]:
    """Return (x,), (x, y) or (x, y, sample_weight) with NumPy leaves; floats have Keras' floatx, as in ``fit``.

    As in Keras, a data frame becomes an array, a series a column. TensorFlow's strings become an array of bytes. A
    RaggedTensor remains one.
    """

    def array(leaf: Any) -> Any:
        if leaf is None:
            return None
        if is_ragged(leaf):
            return keras.ops.cast(leaf, keras.config.floatx()) if leaf.dtype.is_floating else leaf
        if hasattr(leaf, "tocsr") or hasattr(leaf, "dense_shape"):
            what = f"a {type(leaf).__name__} cannot be divided among ranks"
            raise ConfigError(what, where="hvd_train.keras", fix="give a dense array: .toarray(), tf.sparse.to_dense")
        if getattr(getattr(leaf, "dtype", None), "name", "") == "string" and hasattr(leaf, "numpy"):
            return leaf.numpy()
        # Keras turns a pandas series, which has one axis, into a column.
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
    """Return the input of ``train_step``: a single x unpacked, a sample weight for each target."""
    x, y, weight = (*parts, None, None)[:3]
    # (samples,) or (samples, 1): one weight for all targets of a sample
    if keras.tree.is_nested(y) and hasattr(weight, "shape"):
        if weight.shape not in ((len(weight),), (len(weight), 1)):
            what = f"sample_weight has the shape {weight.shape}, but there are several targets"
            raise ConfigError(what, where="model.fit", fix="give one weight per sample, or one array per target")
        weight = keras.tree.map_structure(lambda _: weight, y)
    return keras.utils.pack_x_y_sample_weight(x, y, weight)


def as_arrays(batch: Any) -> Any:
    """Return a DataLoader's batch as Keras' adapter does: a tuple of arrays."""
    arrays = keras.tree.map_structure(lambda leaf: np.asarray(leaf), batch, none_is_leaf=False)
    return tuple(arrays) if isinstance(arrays, list) else arrays


def is_ragged(leaf: Any) -> bool:
    """Return whether it is a RaggedTensor."""
    return hasattr(leaf, "ragged_rank")


def take(parts: Any, places: Any) -> Any:
    def rows(a: Any) -> Any:
        if a is None or not is_ragged(a) or isinstance(places, slice):
            return None if a is None else a[places]
        import tensorflow as tf

        return tf.gather(a, places)

    return keras.tree.map_structure(rows, parts)


def texts(parts: Any) -> Any:
    """Convert arrays of strings to tensors, as Keras needs them."""
    if keras.backend.backend() != "tensorflow":
        return parts
    import tensorflow as tf

    return keras.tree.map_structure(lambda a: tf.constant(a) if holds_texts(a) else a, parts)


def holds_texts(a: Any) -> bool:
    if not isinstance(a, np.ndarray) or not a.size:
        return False
    return a.dtype.kind in "US" or a.dtype.kind == "O" and isinstance(a.flat[0], str | bytes)


def length(parts: Any) -> int:
    counts = {int(leaf.shape[0]) for leaf in keras.tree.flatten(parts) if leaf is not None}
    if len(counts) != 1:
        raise DataError(f"the arrays have {sorted(counts)} samples", where="fit", fix="give arrays of one length")
    return counts.pop()


def digest(parts: Any) -> str:
    """Return a short hash of structure, shapes, dtypes and up to ``SAMPLED`` rows of every array."""
    total = hashlib.sha256()
    for leaf in keras.tree.flatten(parts):
        if leaf is not None and is_ragged(leaf):
            total.update(_of_ragged(leaf))
            continue
        array = np.asarray(leaf if leaf is not None else ())
        # Only some rows: the data may fill the memory, and each rank holds all of it.
        rows = np.unique(np.linspace(0, len(array) - 1, SAMPLED).astype(np.int64)) if array.ndim and len(array) else ...
        total.update(f"{array.shape}{array.dtype}".encode())
        chosen = array[rows]
        total.update(repr(chosen.tolist()).encode() if chosen.dtype.hasobject else np.ascontiguousarray(chosen).data)
    return total.hexdigest()[:12]


def _of_ragged(x: Any) -> bytes:
    """Return the bytes to hash of a RaggedTensor or a RaggedTensorValue."""
    n = int(x.shape[0])
    few = take(x, np.unique(np.linspace(0, n - 1, SAMPLED).astype(np.int64))) if hasattr(x, "numpy") and n else x
    return repr([n, x.dtype, few.to_list()]).encode()


def concatenated(*arrays: Any) -> np.ndarray:
    """Concatenate the rows of all arrays, padded with zeros to the longest."""
    parts = [np.asarray(a) for a in arrays]
    # (axes - 1,): the longest in each axis but the first
    longest = np.max([a.shape[1:] for a in parts], axis=0, initial=0)
    blank: dict[str, Any] = {"O": "", "U": "", "S": b""}
    sides = [[(0, 0), *((0, int(n) - m) for n, m in zip(longest, a.shape[1:], strict=True))] for a in parts]
    padded = [np.pad(a, s, constant_values=blank.get(a.dtype.kind, 0)) for a, s in zip(parts, sides, strict=True)]
    return np.concatenate(padded)


def first_batch(data: Any) -> Any:
    if kind_of(data) == "loader":
        return next(map(as_arrays, data), None)
    import tensorflow as tf

    iterator = iter(data)
    keep_first(data, iterator)
    for batch in iterator:
        return tf.nest.map_structure(lambda leaf: leaf if is_ragged(leaf) else leaf.numpy(), batch)
    return None


def keep_first(data: Any, iterator: Any) -> None:
    """Keep the first iterator of a tf.data.Dataset with a ``cache()`` as long as the data set.

    If an iterator ends while a thread reads ahead for it, TensorFlow 2.21 sometimes takes what the cache holds so far
    for the whole data set: later passes have a few batches.
    """
    import tensorflow as tf

    if kind_of(data) == "dataset" and caches(data) and tf.executing_eagerly():
        data.__dict__.setdefault("_first_iterator", iterator)


def caches(data: Any) -> bool:
    """Return whether the pipeline of a tf.data.Dataset has a ``cache()``."""
    return type(data).__name__ == "CacheDataset" or any(map(caches, data._inputs()))


def steps_of(kind: str, x: Any, batch: int) -> int | None:
    """Return the number of batches in one pass over this rank's data; None if unknown or infinite."""
    if kind == "arrays":
        return math.ceil(length(x) / batch)
    if kind == "sequence":
        return x.num_batches
    if kind == "loader":
        return len(x) if hasattr(x.dataset, "__len__") else None
    count = int(x.cardinality()) if kind == "dataset" else -1
    return count if count >= 0 else None

"""``hk.shard`` and ``hk.reduce``, for training loops of the script: this rank's batches, sums and means over ranks."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar

import keras

from hvd_train.core.agreement import agree, collectively
from hvd_train.core.reductions import FLOATS
from hvd_train.errors import ConfigError
from hvd_train.launch.environment import world as launched
from hvd_train.script.keras.backends import opened
from hvd_train.script.keras.data.epochs import Epochs
from hvd_train.script.keras.data.leaves import BATCH_SIZE, as_arrays, kind_of
from hvd_train.script.keras.data.training import divide_training, pass_seed
from hvd_train.script.keras.gradients import Reduction, check_real
from hvd_train.script.keras.rng import Draws
from hvd_train.script.shared import weight_check
from hvd_train.script.shared.main_rank import UnsharedSums
from hvd_train.script.shared.pass_order import PassNumbers
from hvd_train.script.shared.record import recording

WHERE = "hk.shard"
WIRE = ("float32", "float64", "int64")  # dtypes that are sent unchanged; a sum of 16 bits may overflow
INT64 = 2**63 - 1  # the largest integer that is sent
TOO_LARGE = "may make a sum over the ranks that does not fit into its type"
CURE = 'hk.reduce(total, op="sum") gives all ranks the sum'
# Calls of reduce in each graph, which number their transfers: one rank may trace a step again for another batch length.
_calls: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
_iterations: dict[int, Any] = {}  # of all optimizers so far; ranks free them at different times


def follow(optimizers: Iterable[Any]) -> None:
    """Count the steps of ``optimizers``, which number passes over the data; also on a single rank."""
    counts = [getattr(x, "inner_optimizer", x)._iterations for x in optimizers]
    _iterations.update((id(count), count) for count in counts)


@functools.cache
def _unshared() -> UnsharedSums:
    return UnsharedSums(launched().rank == 0 and launched().size > 1, CURE)


def _steps() -> int:
    """Return the number of all steps so far, the same on all ranks."""
    return sum(int(keras.ops.convert_to_numpy(count)) for count in _iterations.values())


class Batches:
    """This rank's batches: each ``for`` is an epoch of them.

    The order changes after an optimizer's step, or a complete pass. So inspecting a batch shifts nothing, on one rank
    or on all, and a loop that ends early does not begin with the same samples again. In the mean over ranks, a batch is
    weighted by its samples. After an epoch with steps, running statistics are averaged. One rank alone may make a pass
    without steps.
    """

    def __init__(self, epoch: Callable[[int], Iterable], steps: int | None, batch_size: int) -> None:
        self._epoch, self._steps, self._batch_size = epoch, steps, batch_size
        self._numbers = PassNumbers(_steps, _steps())

    def __len__(self) -> int:
        if self._steps is None:
            raise TypeError("this data set has no length")
        return self._steps

    def __iter__(self) -> Iterator[Any]:
        loop_pass = _Pass(self._batch_size)
        try:
            for batch in self._epoch(self._numbers.next):
                Reduction.count_graph_steps()
                batch = keras.tree.map_structure(keras.ops.convert_to_tensor, batch, none_is_leaf=False)
                loop_pass.begin_batch(len(keras.tree.flatten(batch)[0]))
                yield batch
            Reduction.count_graph_steps()
            self._numbers.skip()
            loop_pass.end()
        finally:
            loop_pass.close()

    def set_epoch(self, number: int) -> None:
        """Set the epoch of the next order; on all ranks."""
        self._numbers.set(number)


def shard(
    x: Any, y: Any = None, sample_weight: Any = None, *, batch_size: int = 32, shuffle: bool = True, seed: int = 0
) -> Any:  # fmt: skip
    """Return this rank's batches for your training loop: ``for x, y in hk.shard(x, y, batch_size=64)``, 64 a rank.

    Pass all of the data on every rank: arrays, a tf.data.Dataset of batches (then a Dataset is returned), a PyDataset
    or a PyTorch DataLoader. Each ``for`` is an epoch, in a new order if arrays or batches are shuffled. Call it on all
    ranks. Raises ConfigError or DataError on all of them.
    """
    world, _ = opened()
    draws, order_seed = Draws(world), pass_seed(seed, 0) if shuffle else None
    arguments, facts = collectively(
        world, lambda: divide_training(x, y, sample_weight, batch=batch_size, steps=None, seed=order_seed, draws=draws)
    )
    agree(world, facts)
    parts = arguments["x"]
    size = int(facts[BATCH_SIZE]) * (record.together if (record := recording()) else 1)
    Reduction.batches.begins(size)
    if kind_of(parts) == "dataset":
        return _followed_dataset(parts, size)
    if not isinstance(parts, Epochs):  # a sharded DataLoader

        def loaded(number: int) -> Iterable:
            parts.set_epoch(number)
            return map(as_arrays, parts)

        return Batches(loaded, None, size)

    def epoch(number: int) -> Iterator[Any]:
        parts.on_epoch_begin()
        yield from (parts.part(number, step) for step in range(len(parts)))
        parts.on_epoch_end()

    return Batches(epoch, len(parts), size)


def _followed_dataset(parts: Any, batch_size: int) -> Any:
    """Return this rank's batches as a tf.data.Dataset; its iterations in Python count passes like ``Batches``."""
    import tensorflow as tf

    dataset = parts.with_options(tf.data.Options())  # a new object without other references
    kind = type(dataset)

    def iterate(self: Any) -> Any:
        batches = kind.__iter__(self)
        if not tf.executing_eagerly():
            return batches
        iterator, loop_pass = type(batches), _Pass(batch_size)
        weakref.finalize(batches, loop_pass.close).atexit = False

        def following(self: Any) -> Any:
            Reduction.count_graph_steps()
            try:
                batch = iterator.__next__(self)
            except StopIteration:
                loop_pass.end()
                raise
            loop_pass.begin_batch(len(tf.nest.flatten(batch)[0]))
            return batch

        # A subclass, not a generator: the script may use the API of TensorFlow's iterator.
        batches.__class__ = type(iterator.__name__, (iterator,), {"__next__": following})
        return batches

    dataset.__class__ = type(kind.__name__, (kind,), {"__iter__": iterate})
    return dataset


class _Pass:
    """A pass of the script over this rank's batches, which begins now."""

    _fresh: ClassVar[list[_Pass]] = []  # a pass for each batch that was taken since the last step
    _seen = 0  # steps at the last batch of any pass

    def __init__(self, batch_size: int) -> None:
        self._before, self._batches, self._batch_size = _steps(), 0, batch_size
        self._early = False  # whether the script fetches one batch ahead, as prefetchers do
        self._part = 1.0  # samples of the last batch / those of a full one
        self._closed = False
        self._weights: dict[int, str] = {}  # digests of the models' weights, in a pass without steps
        _unshared().begins()

    def begin_batch(self, samples: int) -> None:
        """Record that the script has taken a batch."""
        self._batches, part, stepped = self._batches + 1, samples / self._batch_size, self._has_stepped()
        if self._batches == 2 and _steps() == self._before:
            self._weights = weight_check.digests()  # this pass may train without optimizers
            self._early = True
        elif self._batches > 2 and self._early:
            self._early = stepped
        _Pass._fresh = [*([] if stepped else _Pass._fresh), self]
        several = len(set(map(id, _Pass._fresh))) > 1
        Reduction.batches.taken(
            samples,
            self._part if self._early else part,
            ordered=len(_Pass._fresh) == 1 and not self._early,
            early=self._early and not several,
            several=several,
        )
        self._part = part

    def _has_stepped(self) -> bool:
        """Return whether there was a step since the last batch of any pass."""
        before, _Pass._seen = _Pass._seen, _steps()
        return _Pass._seen != before

    def end(self) -> None:
        """If the pass has made steps, synchronize weights or statistics, on all ranks together."""
        # If the script fetches one batch ahead, the step of the last batch is still to come.
        self._leave(self._part if self._early and self._has_stepped() else 1.0)
        if _steps() > self._before:
            Reduction.average_moved_statistics()
        else:
            weight_check.pass_ended(self._weights, "the end of a pass over hk.shard")
            _unshared().passed()

    def close(self) -> None:
        """Record that the script has left the loop before its end; no rank waits for another."""
        if self._batches and not (self._closed or sys.is_finalizing()):
            Reduction.left = Reduction.left or _steps() > self._before
            self._leave()

    def _leave(self, part: float = 1.0) -> None:
        self._closed = True
        fresh = [] if _steps() != _Pass._seen else [x for x in _Pass._fresh if x is not self]
        _Pass._fresh = fresh
        # A batch of another loop may still be without its step.
        Reduction.batches.ended(fresh[-1]._part if fresh else part, within=bool(fresh))


def average_statistics() -> None:
    """Average running statistics after steps of the script's loop; on all ranks together."""
    Reduction.count_graph_steps()
    Reduction.average_moved_statistics(local=False)


def _as_tensor(x: Any, op: str, size: int) -> Any:
    """Convert a value of ``reduce`` to a tensor, of 64 bits for Python's numbers."""
    if isinstance(x, float) or (isinstance(x, int) and op == "mean"):
        return keras.ops.convert_to_tensor(float(x), "float64")
    if isinstance(x, int) and abs(x) > INT64 // size:
        raise ConfigError(f"{x} {TOO_LARGE}", where="hk.reduce", fix=FLOATS)
    return keras.ops.convert_to_tensor(x, "int64" if isinstance(x, int) else None)


def _check_range(x: Any, least: int, most: int, backend: Any) -> None:
    """Raise an error if an entry of ``x``, an int64 tensor, is less than ``least`` or larger than ``most``."""
    outside = (x < least) | (x > most)
    backend.refuse(keras.ops.any(outside), f"an integer outside of {least} to {most} {TOO_LARGE}", "hk.reduce", FLOATS)


def reduce(values: Any, op: str = "mean") -> Any:
    """Return the mean over ranks of tensors, arrays or numbers, in lists or dicts, or their sum with op="sum".

    Works eagerly and in a ``tf.function``; call it on all ranks. Python's numbers and the mean of integers have 64
    bits, floats of 16 bits get 32. The sum of integers is exact: int32 for int32, else int64. Raises ConfigError if it
    may need more bits, in a ``tf.function`` InvalidArgumentError.
    """
    world, backend = opened()
    graph = backend.graph()
    if op not in ("mean", "sum"):
        raise ConfigError(f"op={op!r}", where="hk.reduce", fix="it is mean or sum")
    _unshared().shared(graph is not None)
    if graph is None:
        weight_check.summed("hk.reduce", world)
    name = "keras.reduce"
    if graph is not None:
        _calls[graph] = _calls.get(graph, 0) + 1
        name += f"{_calls[graph]}"
    flat = [_as_tensor(x, op, world.size) for x in keras.tree.flatten(values)]
    Reduction.adds_arrays |= any(len(x.shape) > 0 for x in flat)
    for x in flat:  # check all before any is sent
        check_real(keras.backend.standardize_dtype(x.dtype), "a value", "hk.reduce")
    sent, kinds = [], []
    for k, x in enumerate(map(keras.ops.stop_gradient, flat)):
        kind = keras.backend.standardize_dtype(x.dtype)
        # All integers are sent in 64 bits: a batch's length may be a number in one rank's graph, and a tensor in
        # another's.
        wire = kind if kind in WIRE else "float32" if "float" in kind else "int64"
        wire = "float64" if op == "mean" and "int" in wire else wire
        if wire == "int64" and "64" in kind:
            most = INT64 // world.size
            _check_range(keras.ops.cast(x, wire), 0 if kind == "uint64" else -most, most, backend)
        kinds.append(kind)
        sent.append(world.allreduce_async(keras.ops.copy(keras.ops.cast(x, wire)), f"{name}.{k}"))
    sums = [world.synchronize(handle) for handle in sent]
    if op == "mean":
        return keras.tree.pack_sequence_as(values, [x / world.size for x in sums])
    for k, kind in enumerate(kinds):
        if kind == "int32" and op == "sum":
            _check_range(sums[k], -(2**31), 2**31 - 1, backend)
            sums[k] = keras.ops.cast(sums[k], kind)
    return keras.tree.pack_sequence_as(values, sums)

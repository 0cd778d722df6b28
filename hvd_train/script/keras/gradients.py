"""The gradients of a user's Keras 3 model, averaged over ranks before its optimizer uses them.

Law: the optimizer gets the gradient of the mean over all samples of the step, on any rank. Each rank's gradient is the
mean over its samples, weighted by its share of the step's samples.

Uncompressed gradients need not wait for the other ranks' sample counts n_r. With N ranks and b = ``batch``, ranks send
n_r / b times their gradient, and the mean over ranks is divided by the mean of n_r / b. Compressed gradients wait for
the counts, because what one step omits must have the same weight in the next.
"""

from __future__ import annotations

import atexit
import functools
import itertools
import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import keras
import numpy as np

from hvd_train.compression.uncompressed import Uncompressed
from hvd_train.errors import ConfigError
from hvd_train.launch.environment import world as launched
from hvd_train.protocol import Communicator, Compressor, Ops, TensorSpec
from hvd_train.script.keras.eval_window import EvalWindow, tensor_of
from hvd_train.script.keras.loop_batches import (
    DOUBT,
    FIT,
    HEAD,
    KINDS,
    ROWS,
    LoopBatches,
    warn_of_own_statistics,
    warn_of_same_loop,
    warn_of_unknown_batch,
)
from hvd_train.script.keras.patches import Patches
from hvd_train.script.shared.same_work import PASSES
from hvd_train.script.shared.world import NamedTransfers
from hvd_train.update.exchange import Exchange

WIRE = ("float16", "float32", "float64")  # dtypes that Horovod can add
MOST_CALLS = 64  # inputs of a step whose rows are kept


def wire_dtype(variable: Any) -> str:
    """Return the dtype in which values of ``variable`` are sent: its own, or float32 where Horovod cannot add it."""
    kind = keras.backend.standardize_dtype(variable.dtype)
    return kind if kind in WIRE else "float32"


def check_real(kind: str, what: str, where: str) -> None:
    """Raise ConfigError for complex numbers: the cast for Horovod would drop their imaginary part."""
    if kind.startswith("complex"):
        fix = "give the real and the imaginary part by themselves"
        raise ConfigError(f"{what} is of {kind}, which cannot be exchanged", where=where, fix=fix, common=True)


class Reduction:
    """The gradients of ``variables``, averaged over the ranks.

    ``count``: this rank's samples of the step, set while its ``train_step`` runs (None: all ranks have equal weight).
    ``batch``: the usual number, equal on all ranks. ``stop`` is exchanged too: after a step, ``stopped`` > 0 on all
    ranks if any rank had set it.
    """

    _numbers = itertools.count()
    traced: weakref.WeakSet[Reduction] = weakref.WeakSet()  # those whose steps run in graphs
    # {number of a model with steps since: (averages its statistics, whether it trains locally)}
    moved: ClassVar[dict[int, tuple[Callable[[], None], bool]]] = {}
    batches: ClassVar = LoopBatches()  # of loops over hk.shard, for all models
    left = False  # whether a loop with steps was left before its end, and running statistics are each rank's own
    doubts: Any = None  # steps in graphs that may belong to another batch
    adds_arrays = False  # whether the script adds up arrays over ranks itself, such as its gradients

    def __init__(
        self, variables: Sequence[Any], compressor: Compressor, communicator: Communicator, backend: Any
    ) -> None:
        self.variables = list(variables)
        self._positions = {id(v): i for i, v in enumerate(self.variables)}
        kinds = [keras.backend.standardize_dtype(v.dtype) for v in self.variables]
        for v, kind in zip(self.variables, kinds, strict=True):
            check_real(kind, f"'{v.path}'", "hk.distribute")
        self._wire = list(map(wire_dtype, self.variables))
        # What float8 layers pass as a gradient is the new value: the largest numbers that they have seen, and scales.
        self._overwritten = [i for i, v in enumerate(self.variables) if getattr(v, "overwrite_with_gradient", False)]
        self._kinds = kinds
        specs = [TensorSpec(v.path, tuple(v.shape), kind) for v, kind in zip(self.variables, self._wire, strict=True)]
        self.number = next(Reduction._numbers)  # equal on all ranks: scripts call ``distribute`` in one order
        named: Any = NamedTransfers(communicator, self.number)
        self._communicator, self._size, self._backend, self.eager = named, communicator.size, backend, backend.eager
        self._rank = communicator.rank
        self.ops: Ops = backend.ops
        self._whole = isinstance(compressor, Uncompressed)
        # Compressed gradients are weighted before (``_joined``), and summed.
        op = "average" if self._whole else "sum"
        packing = backend.packing(communicator)
        self._exchange = Exchange(specs, packing, compressor, named, backend.ops, op=op)
        self._states = [
            tuple(keras.Variable(a, trainable=False, dtype=a.dtype.name, name="compression") for a in arrays)
            for arrays in self._exchange.init_state()
        ]
        self.count: Any = None
        self.stepped: Callable[[int], None] = lambda steps: None  # called after steps of the script's loop
        self._graph_steps_reported = 0  # of those that graphs count
        self.paused: Callable[[], bool] = lambda: False  # whether their report must wait
        self.steps = keras.Variable(0, trainable=False, dtype="int64", name="steps")
        self.gathers: Callable[[], bool] = lambda: False  # whether the model has running statistics
        self.rows: list[Any] = []  # of the model's inputs since the last step of the script's loop
        Reduction.batches.add_variable()
        if Reduction.doubts is None:
            Reduction.doubts = keras.Variable(0.0, trainable=False, dtype="float64", name="doubts")
            atexit.register(Reduction.tell_doubts)  # of steps after the last batch
        self.window = EvalWindow(backend)
        self.unprobed = False  # whether the user's losses could not be classified
        self.losses = 0  # of this step that have exchanged values with other ranks
        self._means: list[tuple[Callable[[Any, Any], None], Any]] = []  # of this step's metrics that count batches
        # The step's samples on all ranks over ``batch``; 0 until an optimizer has run.
        self.present = keras.Variable(0.0, trainable=False, dtype="float64", name="present")
        self.batch = keras.Variable(32.0, trainable=False, dtype="float64", name="batch")
        self.stop = keras.Variable(0.0, trainable=False, dtype="float64", name="stop")
        self.stopped = keras.Variable(0.0, trainable=False, dtype="float64", name="stopped")
        # Steps of the script's loops, until PASSES, and those in which all ranks had the same gradients.
        self.compared = keras.Variable([0.0, 0.0], trainable=False, dtype="float64", name="compared")
        self._all_compared = False  # known of eager steps alone

    @classmethod
    def count_graph_steps(cls) -> None:
        """Report the steps that were made in graphs; at the same point of the loop on all ranks."""
        for reduction in sorted(cls.traced, key=lambda each: each.number):
            if reduction.paused():
                continue
            steps = int(reduction.steps.numpy()) - reduction._graph_steps_reported
            reduction._graph_steps_reported += steps
            if steps:
                reduction.stepped(steps)
        cls.tell_doubts()

    @classmethod
    def tell_doubts(cls) -> None:
        """Warn once, on rank 0, if steps in graphs may have got the weight of another batch, or all ranks the same."""
        if not cls.traced or launched().rank:
            return
        if cls.doubts is not None and float(cls.doubts.numpy()):
            warn_of_unknown_batch()
        for reduction in cls.traced:
            reduction._tell_same_work()

    def _tell_same_work(self) -> None:
        # Gradients that the script has added up are the same on all ranks.
        if not Reduction.adds_arrays and float(keras.ops.convert_to_numpy(self.compared)[1]) >= PASSES:
            warn_of_same_loop()

    def _checksum(self, gradients: Sequence[Any]) -> Any:
        """Return the sum of the smallest gradient, float64, in a step of the script's loop; else 0."""
        found = [
            (v, g)
            for v, g in zip(self.variables, gradients, strict=True)
            if g is not None and not hasattr(g, "dense_shape")
        ]
        if self.count is not None or self._all_compared or not found:
            return keras.ops.convert_to_tensor(np.float64(0.0))
        _, smallest = min(found, key=lambda pair: math.prod(pair[0].shape))
        return keras.ops.sum(keras.ops.cast(keras.ops.stop_gradient(smallest), "float64"))

    def _compare(self, total: Any, own: Any) -> None:
        """Count a step, and whether all ranks have this rank's ``_checksum``, of which ``total`` is the sum."""
        if self.count is not None or self._all_compared:
            return
        # A sum of 0 does not count, because all gradients may be zero.
        near = keras.ops.abs(total - self._size * own) <= 1e-12 * keras.ops.abs(total)
        same = keras.ops.cast(keras.ops.logical_and(near, keras.ops.not_equal(own, 0.0)), "float64")
        before = tensor_of(self.compared)
        begins = keras.ops.cast(before[0] < PASSES, "float64")
        self.compared.assign(before + begins * keras.ops.stack([keras.ops.ones_like(same), same]))
        if self._backend.eager():
            self._all_compared = float(keras.ops.convert_to_numpy(self.compared)[0]) >= PASSES
            if not self._rank:
                self._tell_same_work()

    @classmethod
    def average_moved_statistics(cls, local: bool = True) -> None:
        """Average the running statistics of models trained in the script's loops; at the same point on all ranks.

        Includes deleted models, because Python frees them at different times on different ranks. ``local``: synchronize
        models in local training, too.
        """
        cls.left = False
        for number, (average, trains_locally) in sorted(cls.moved.items()):
            if local or not trains_locally:
                del cls.moved[number]
                average()

    def called(self, inputs: Any) -> None:
        """Record the rows of the inputs with which the script's loop calls a model within a tape."""
        if self.count is not None or self.window.samples is not None:
            return
        if not self._backend.records():
            self.uses_statistics()
        elif len(self.rows) < MOST_CALLS:
            self.rows += [keras.ops.shape(x)[0] for x in keras.tree.flatten(inputs) if getattr(x, "shape", ())]

    def uses_statistics(self) -> None:
        """Warn once, on rank 0, if the script uses running statistics that are of this rank alone."""
        if Reduction.left and not self._rank and self.gathers():
            warn_of_own_statistics()

    def _numbers_of_step(self) -> Any:
        """Return the first numbers of the step's exchange, (5,); see ``LoopBatches.of_step``."""
        if self.count is not None:
            part = keras.ops.cast(self.count, "float64") / tensor_of(self.batch)
            return keras.ops.stack([part, *[keras.ops.zeros_like(part)] * (HEAD - 1)])
        graph = self._backend.graph()
        # A graph keeps the numbers of rows; another one's are not of this step.
        rows = [n for n in self.rows if isinstance(n, int) or getattr(n, "graph", None) is graph]
        self.rows = []
        numbers = Reduction.batches.of_step(rows, self._backend.eager())
        Reduction.batches.stepped(self._backend.eager())
        return numbers

    def __call__(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Average the gradients of ``variables`` over ranks; one that no rank has stays None."""
        positions = [self._position(v) for v in variables]
        local: list[Any] = [None] * len(self.variables)
        for i, gradient in zip(positions, gradients, strict=True):
            local[i] = gradient
        by_rows, numbers = bool(self.count is None and self.rows), self._numbers_of_step()
        # (variables,) float64: 1 where this rank has a gradient
        used = keras.ops.convert_to_tensor(np.array([g is not None for g in local], np.float64))
        checksum = self._checksum(local)
        # (HEAD + 2 + variables,) float64: the step's numbers, stop, checksum, used
        head = keras.ops.concatenate([numbers, keras.ops.stack([tensor_of(self.stop), checksum]), used])
        *dense, head = self._backend.dense([*local, head])
        joined, sums = self._backend.awaited([*dense, head], lambda: self._joined(dense, head, numbers, by_rows))
        pairs = zip(self._exchange.from_buckets(joined), self._kinds, strict=True)
        reduced = [keras.ops.cast(x, kind) for x, kind in pairs]
        if self._overwritten:
            self._take_maxima(local, reduced)
        there = [g is not None for g in local]
        self._compare(sums[HEAD + 1], checksum)
        if self._backend.eager():  # in a graph all ranks run the same; eagerly, the variables used may differ
            known = keras.ops.convert_to_numpy(sums)
            there = [n > 0 for n in known[HEAD + 2 :]]
            if self._doubtful(known, numbers) and not self._rank:
                warn_of_unknown_batch()
        return [reduced[i] if there[i] else None for i in positions]

    def _take_maxima(self, local: Sequence[Any], reduced: list[Any]) -> None:
        """Replace the means of overwritten variables by the ranks' maxima, as one process sees the whole batch."""
        values = [keras.ops.reshape(self._as_sent(i, local[i]), (-1,)) for i in self._overwritten]
        flat = keras.ops.concatenate([keras.ops.cast(x, "float32") for x in values])
        own = keras.ops.expand_dims(keras.ops.arange(self._size), 1) == self._rank  # (ranks, 1)
        # (ranks, numbers): each rank fills its row.
        rows = keras.ops.where(own, flat, keras.ops.zeros_like(flat))
        sent = self._communicator.allreduce_async(rows, "keras.maxima")
        largest, start = keras.ops.max(self._communicator.synchronize(sent), axis=0), 0
        for i, x in zip(self._overwritten, values, strict=True):
            part = largest[start : start + x.shape[0]]
            reduced[i] = keras.ops.cast(keras.ops.reshape(part, self.variables[i].shape), self._kinds[i])
            start += x.shape[0]

    def _doubtful(self, sums: Any, own: Any) -> Any:
        """Return whether the step may belong to another batch, and ranks' parts of a batch have differed."""
        differ = keras.ops.abs(sums[KINDS] - self._size * own[KINDS]) > 1e-9
        return keras.ops.logical_and(sums[DOUBT] > 0, differ)

    def _all_fit(self, sums: Any) -> Any:
        """Return whether the inputs of all ranks have as many rows as one of their batches."""
        return sums[FIT] > self._size - 0.5

    def _weight(self, own: Any, sums: Any) -> Any:
        """Return this rank's weight in the step. In a graph a rank waits for the others only if it depends on them."""
        by_rows = lambda: keras.ops.where(self._all_fit(sums), own[ROWS], own[0])  # noqa: E731
        return keras.ops.cond(_depends(own), by_rows, lambda: keras.ops.copy(own[0]))

    def _joined(self, dense: list[Any], head: Any, own: Any, by_rows: bool) -> tuple[list[Any], Any]:
        """Return (flat gradients, sums over ranks).

        The sums are of ``_numbers_of_step``, ``stop``, ``_checksum``, and for each tensor how many ranks have its
        gradient.

        ``own``: this rank's numbers, as PyTorch's transfer overwrites ``head``. ``by_rows``: whether the step's weight
        may be the number of the inputs' rows.
        """
        # Sent first, so that these few numbers arrive before the gradients.
        sent = self._communicator.allreduce_async(head, "keras.counts")
        flats = self._exchange.to_buckets([self._as_sent(i, g) for i, g in enumerate(dense)])
        # Uncompressed gradients are sent at once, weighted by n_r / b; see the top of this file.
        waits = by_rows and (not self._backend.eager() or bool(_depends(own)))
        sums = self._communicator.synchronize(sent) if waits else None
        started = self._start(flats, own[0] if sums is None else self._weight(own, sums)) if self._whole else []
        sums = self._communicator.synchronize(sent) if sums is None else sums
        self.stopped.assign(sums[HEAD])
        total = keras.ops.where(self._all_fit(sums), sums[ROWS], sums[0])
        self.present.assign(total)
        if not self._backend.eager():
            Reduction.doubts.assign_add(keras.ops.cast(self._doubtful(sums, own), "float64"))
        if self._whole:
            return _times(self._finish(started), self._size / total), sums
        return self._finish(self._start(flats, self._weight(own, sums) / total)), sums

    def of_others(self, compressor: Compressor, communicator: Communicator) -> Callable[[list[Any]], Reduction]:
        """Return a function that makes a reduction for another optimizer's variables, in the same steps.

        Such an optimizer shows its variables only in its first step.
        """
        made: dict[tuple[int, ...], Reduction] = {}

        def of(variables: list[Any]) -> Reduction:
            key = tuple(id(v) for v in variables)
            if key not in made:
                # The variables must outlive the graph of the optimizer's first step.
                with self._backend.lifted():
                    made[key] = Reduction(variables, compressor, communicator, self._backend)
                made[key].batch, made[key].stop, made[key].stopped = self.batch, self.stop, self.stopped
                made[key].present = self.present
            made[key].count = self.count
            return made[key]

        return of

    def whole(self, value: Any, weight: Any = None) -> Any:
        """Rescale ``value``, a local sum or weighted mean, so that the mean over samples is that of all ranks.

        The factor is the rank's share of the weight over its share of the samples. So the results' mean over samples is
        the sum, or the weighted mean, over all ranks.
        """
        local = [keras.ops.cast(self.count, "float64")]
        local += [] if weight is None else [keras.ops.cast(weight, "float64")]
        sent = keras.ops.stop_gradient(keras.ops.stack(local))
        name = f"keras.loss{self.losses}"
        self.losses += 1
        total = self._communicator.synchronize(self._communicator.allreduce_async(sent, name))
        # total, local (1 or 2,): samples, and the weight if there is one
        factor = total[0] / local[0]
        if weight is not None:
            factor = factor * keras.ops.divide_no_nan(local[1], total[1])
        return value * keras.ops.cast(keras.ops.stop_gradient(factor), value.dtype)

    def batch_mean(self, value: Any, add: Callable[[Any, Any], None]) -> None:
        """Add this batch's part of the global batch's mean by ``add(total, count)``.

        ``value``: the mean over the batch. The step's samples on all ranks are known only after an optimizer has run.
        Until then each rank assumes full batches, and ``step_made`` corrects that.
        """
        if self.window.samples is not None:
            add(*self.window.batch_mean(value))
        elif self.count is not None:
            share = keras.ops.cast(self.count, "float64") / (tensor_of(self.batch) * self._size)
            add(value * share, share)
            self._means.append((add, value))
        else:
            add(value, keras.ops.ones_like(value))

    def in_step(self) -> bool:
        """Return whether a step of the model runs, in training or evaluation."""
        return self.count is not None or self.window.samples is not None

    def begin_step(self, samples: Any) -> None:
        self.count, self.losses, self._means = samples, 0, []

    def step_made(self) -> None:
        """Correct this step's batch means by the number of samples on all ranks, which is now known."""
        if not self._means:
            return
        full, present = keras.ops.convert_to_tensor(float(self._size), "float64"), tensor_of(self.present)
        whole = keras.ops.where(present > 0, present, full)  # unknown if no optimizer has run
        part = keras.ops.cast(self.count, "float64") / tensor_of(self.batch)
        # part / full of each mean was added; its share is part / whole.
        more = part / whole - part / full
        for add, value in self._means:
            add(value * more, more)
        self._means = []
        self.present.assign(0.0)

    def with_step_made(self, logs: Any, metrics: Sequence[Any]) -> Any:
        """Call ``step_made``; return ``logs``, the user step's results, with the updated ``metrics``."""
        if not self._means:
            return logs
        named = {x.name: x for x in metrics if isinstance(x, keras.metrics.Mean)} if isinstance(logs, dict) else {}
        results = {name: x.result() for name, x in named.items() if name in logs}
        # A step may return another number under a metric's name.
        same = {k: keras.ops.equal(logs[k], x) for k, x in results.items() if getattr(logs[k], "dtype", "") == x.dtype}
        self.step_made()
        return logs | {k: keras.ops.where(x, named[k].result(), logs[k]) for k, x in same.items()} if same else logs

    def _position(self, variable: Any) -> int:
        if id(variable) not in self._positions:
            raise ConfigError(
                f"the optimizer updates '{variable.path}', which the model did not have at hk.distribute",
                where="hvd_train.keras",
                fix="give each model its own optimizer; after a change of layers or of 'trainable' call compile and "
                "hk.distribute again",
            )
        return self._positions[id(variable)]

    def _as_sent(self, i: int, gradient: Any) -> Any:
        """Cast a gradient for the exchange; zeros if this rank has none."""
        if gradient is None:
            return keras.ops.zeros(self.variables[i].shape, self._wire[i])
        return keras.ops.cast(gradient, self._wire[i])

    def _start(self, flats: list[Any], part: Any) -> list[Any]:
        states = [tuple(tensor_of(v) for v in state) for state in self._states]
        return [self._exchange.start(b, flat, states[b]) for b, flat in enumerate(_times(flats, part))]

    def _finish(self, started: Sequence[Any]) -> list[Any]:
        joined, states = self._exchange.finish(started)
        for old, new in zip(self._states, states, strict=True):
            for variable, value in zip(old, new, strict=True):
                variable.assign(value)
        return joined


def _depends(own: Any) -> Any:
    """Return whether this rank's weight depends on the inputs of the others."""
    return keras.ops.logical_and(own[FIT] > 0, keras.ops.abs(own[ROWS] - own[0]) > 1e-12)


def _times(flats: list[Any], factor: Any) -> list[Any]:
    """Multiply, unless the factor is 1 as in all steps but an epoch's last: that saves a pass over memory."""
    return keras.ops.cond(keras.ops.abs(factor - 1) < 1e-12, lambda: flats, lambda: _scaled(flats, factor))


def _scaled(flats: list[Any], factor: Any) -> list[Any]:
    return [flat * keras.ops.cast(factor, flat.dtype) for flat in flats]


def connect(optimizer: Any, reduction: Reduction, backend: Any, patches: Patches, of: Any = None) -> None:
    """Make this outermost optimizer average gradients first, before its finite check, clipping and EMA.

    ``of``: variables -> the reduction of another optimizer. Only the instance is patched: what is saved is a plain
    Keras optimizer.
    """
    backend.fuse(optimizer)
    # ``apply``, not ``apply_gradients``: all calls go through it.
    apply = optimizer.apply

    def apply_reduced(grads: Sequence[Any], trainable_variables: Any = None) -> Any:
        own = getattr(optimizer, "_trainable_variables", None) if optimizer.built else None
        variables = list(trainable_variables or own or reduction.variables)
        result = apply((of(variables) if of else reduction)(list(grads), variables), trainable_variables)
        if reduction.count is None:
            backend.after_step(reduction)
        return result

    patches.put(optimizer, "apply", backend.untouched(apply_reduced))


def count_samples(model: Any, reduction: Reduction, backend: Any, patches: Patches) -> None:
    """Set the reduction's sample counts in the model's ``train_step`` and ``test_step``."""
    step, score = model.train_step, model.test_step

    def samples(data: Any) -> Any:
        return keras.ops.shape(next(leaf for leaf in keras.tree.flatten(data) if leaf is not None))[0]

    def distributed_train_step(data: Any) -> Any:
        backend.draw_apart()
        reduction.begin_step(samples(data))
        try:
            return reduction.with_step_made(step(data), model.metrics)
        finally:
            reduction.count = None

    def distributed_test_step(data: Any) -> Any:
        reduction.window.begin_batch(samples(data))
        try:
            logs = score(data)
            reduction.window.end_batch()
            return logs
        finally:
            reduction.window.samples = None

    patches.put(model, "train_step", backend.untouched(distributed_train_step))
    patches.put(model, "test_step", backend.untouched(distributed_test_step))


def watch_inputs(model: Any, reduction: Reduction, patches: Patches) -> None:
    """Let the reduction know the inputs of the model, and of models within it."""

    def watched(check: Callable[[Any], None], inputs: Any) -> None:
        check(inputs)
        reduction.called(inputs)

    for one in {id(x): x for x in (model, *model._flatten_layers()) if isinstance(x, keras.Model)}.values():
        # Keras calls it with the first argument of each call; a subclass cannot replace a model's ``__call__``.
        name = "_assert_input_compatibility"
        patches.put(one, name, functools.partial(watched, getattr(one, name)))

"""The gradients of a user's own Keras 3 model, joined over the ranks as the first thing that its optimizer does.

Law: what the optimizer receives is the gradient of the mean over all samples of the step, on whatever ranks they are:
each rank's gradient is the mean over its own samples and counts by their share of the step's samples.

Whole gradients do not wait for the number of samples on other ranks: with n_r of them on rank r, N ranks and b =
``batch``, ranks send n_r / b times their gradient, and what arrives, the mean over ranks, is divided by the mean of
n_r / b. What is compressed waits for it: what one step leaves out must count in the next as much as its own gradient.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import keras
import numpy as np

from hvd_train.compression.uncompressed import Uncompressed
from hvd_train.errors import ConfigError
from hvd_train.launch.environment import world
from hvd_train.protocol import Communicator, Compressor, Ops, Packing, TensorSpec
from hvd_train.script.world import NamedTransfers
from hvd_train.update.exchange import Exchange

WIRE = ("float16", "float32", "float64")  # what Horovod can add; other types travel as float32


MARK = "_hvd_train"  # an attribute of a model, and of its optimizer


class Changes:
    """What ``hk.distribute`` changes in instances, never in their classes, and the way back.

    ``compiled``: what each ``compile`` makes anew; ``fits``: calls of ``fit`` so far; ``optimizers``: of a loop of the
    user's own.
    """

    def __init__(self, compiled: Any, fits: int = 0, optimizers: Sequence[Any] = ()) -> None:
        self.compiled, self.fits, self.optimizers = compiled, fits, tuple(optimizers)
        self._back = contextlib.ExitStack()
        self.undo = self._back.close
        self.on_undo = self._back.callback

    def put(self, owner: Any, name: str, value: Any) -> None:
        """Sets an attribute of this instance."""
        if name in vars(owner):
            self.on_undo(setattr, owner, name, vars(owner)[name])
        else:
            self.on_undo(delattr, owner, name)
        setattr(owner, name, value)


def optimizers_of(model: Any) -> list[Any]:
    """Those given to ``hk.distribute`` or the one given to ``compile`` first, then those in attributes of the model,
    also in their lists and dicts."""
    changes = getattr(model, MARK, None)
    found = [*(changes.optimizers if changes else ()), getattr(model, "optimizer", None)]
    found = [x for x in found if x is not None]
    for value in vars(model).values():
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else [value]
        found += [x for x in inner if isinstance(x, keras.optimizers.Optimizer)]
    return list({id(x): x for x in found}.values())


def with_rates(optimizers: Sequence[Any]) -> list[Any]:
    """Those within them that have a learning rate: the inner one of loss scaling, the several of a MultiOptimizer."""
    inner = [getattr(x, "inner_optimizer", x) for x in optimizers]
    found = [x for own in inner for x in getattr(own, "optimizers", [own])]
    return list({id(x): x for x in found}.values())


class OnTensorFlow:
    """What differs between Keras' backends; a transfer is an operation of the graph that is traced."""

    framework = "tensorflow"
    _waits: Any = None  # seconds within the transfers of graphs, of all models

    def __init__(self) -> None:
        import tensorflow as tf

        from hvd_train.frontends.tensorflow.graphs import awaited, seconds_waited
        from hvd_train.frontends.tensorflow.model import packing
        from hvd_train.frontends.tensorflow.ops import TensorFlowOps

        self.tf, self._awaited = tf, awaited
        if OnTensorFlow._waits is None:
            with tf.init_scope():
                OnTensorFlow._waits = seconds_waited()
        self.ops: Ops = TensorFlowOps()
        self.packing: Callable[[Communicator], Packing] = packing
        self.lifted = tf.init_scope  # out of the graph that is traced

    def untouched(self, function: Callable) -> Callable:
        """Not rewritten by AutoGraph when a user's own tf.function reaches it."""
        return self.tf.autograph.experimental.do_not_convert(function)

    def eager(self) -> bool:
        return self.tf.executing_eagerly()

    def graph(self) -> Any:
        """That is traced; None: operations run at once."""
        return None if self.eager() else self.tf.compat.v1.get_default_graph()

    def after_step(self, reduction: Reduction) -> None:
        """In a loop of the user's own. A graph counts its steps; Python asks with the next batch (Reduction.hear): a
        transfer that Python starts within a graph would wait for the thread that it keeps."""
        if self.eager():
            reduction.stepped(1)
        else:
            reduction.steps.value.assign_add(1)
            Reduction.traced.add(reduction)

    def draw_apart(self) -> None:
        """The graph that is traced here draws other numbers on each rank."""
        graph = self.tf.compat.v1.get_default_graph()
        if not self.eager() and graph.seed is not None:
            self.tf.random.set_seed((graph.seed + world().rank * 0x9E3779B9) % (1 << 31))  # of this graph alone

    def dense(self, gradients: list[Any]) -> list[Any]:
        """Tensors of IndexedSlices. On a CPU none is sent before all are there: the thread that carries a transfer
        would take the time from those that compute."""
        gradients = [None if g is None else self.tf.convert_to_tensor(g) for g in gradients]
        if self.tf.config.get_visible_devices("GPU"):
            return gradients
        with self.tf.control_dependencies([g for g in gradients if g is not None]):
            return [None if g is None else self.tf.identity(g) for g in gradients]

    def awaited(self, gradients: Sequence[Any], transfer: Callable[[], Any]) -> Any:
        """What ``transfer`` gives; of a graph, the seconds that it waited are counted here."""
        if self.eager():
            return transfer()
        return self._awaited(self._waits, [g for g in gradients if g is not None], transfer)

    def waited(self) -> float:
        return float(self._waits)

    def settle(self, optimizer: Any) -> None:
        from hvd_train.keras.fused import fuse

        fuse(optimizer)


class OnTorch:
    framework = "pytorch"

    def __init__(self) -> None:
        import torch

        from hvd_train.frontends.pytorch.model import PyTorchFrontEnd
        from hvd_train.frontends.pytorch.ops import TorchOps

        self.ops: Ops = TorchOps(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
        self.packing: Callable[[Communicator], Packing] = lambda _: PyTorchFrontEnd.packing
        self.lifted = contextlib.nullcontext

    def untouched(self, function: Callable) -> Callable:
        return function

    def eager(self) -> bool:
        return True

    def graph(self) -> Any:
        return None

    def after_step(self, reduction: Reduction) -> None:
        reduction.stepped(1)

    def draw_apart(self) -> None:
        """There is no graph."""

    def dense(self, gradients: list[Any]) -> list[Any]:
        return [g.to_dense() if g is not None and g.is_sparse else g for g in gradients]

    def awaited(self, gradients: Sequence[Any], transfer: Callable[[], Any]) -> Any:
        return transfer()

    def waited(self) -> float:
        return 0.0  # the communicator counts all

    def settle(self, optimizer: Any) -> None:
        """Keras takes torch's own fused updates here."""


class Reduction:
    """Joins the gradients of ``variables``. ``count``: this rank's samples of the step, set while its ``train_step``
    runs (None: every rank counts alike). ``batch``: their usual number, the same on all ranks. ``stop`` travels along:
    after a step ``stopped`` > 0 on all ranks if any rank had set it before."""

    _numbers = itertools.count()
    traced: weakref.WeakSet[Reduction] = weakref.WeakSet()  # whose steps are made in graphs
    moved: ClassVar[dict[int, Callable[[], None]]] = {}  # by number, of models with steps since: averages statistics
    part: Any = None  # in loops over hk.shard, of all models: samples of this rank's batch over their usual number

    def __init__(
        self, variables: Sequence[Any], compressor: Compressor, communicator: Communicator, backend: Any
    ) -> None:
        self.variables = list(variables)
        self._positions = {id(v): i for i, v in enumerate(self.variables)}
        kinds = [keras.backend.standardize_dtype(v.dtype) for v in self.variables]
        self._wire = [kind if kind in WIRE else "float32" for kind in kinds]
        self._kinds = kinds
        specs = [TensorSpec(v.path, tuple(v.shape), kind) for v, kind in zip(self.variables, self._wire, strict=True)]
        self.number = next(Reduction._numbers)  # models are given to ``distribute`` in one order
        named: Any = NamedTransfers(communicator, self.number)
        self._communicator, self._size, self._backend, self.eager = named, communicator.size, backend, backend.eager
        self.ops: Ops = backend.ops
        self._whole = isinstance(compressor, Uncompressed)
        op = "average" if self._whole else "sum"
        packing = backend.packing(communicator)
        self._exchange = Exchange(specs, packing, compressor, named, backend.ops, op=op)
        self._states = [
            tuple(keras.Variable(a, trainable=False, dtype=a.dtype.name, name="compression") for a in arrays)
            for arrays in self._exchange.init_state()
        ]
        self.count: Any = None
        self.stepped: Callable[[int], None] = lambda steps: None  # after steps of a loop of the user's own
        self._heard = 0  # of the steps that graphs count
        self.steps = keras.Variable(0, trainable=False, dtype="int64", name="steps")
        if Reduction.part is None:
            Reduction.part = keras.Variable(1.0, trainable=False, dtype="float64", name="part")
        self.scoring: Any = None  # samples of the batch that is scored, while a ``test_step`` runs
        self.window = keras.Variable(1, trainable=False, dtype="int64", name="window")  # batches that are a global one
        self.place = keras.Variable(0, trainable=False, dtype="int64", name="place")  # of a batch in its window
        self.parts = keras.Variable(1.0, trainable=False, dtype="float64", name="parts")  # of which none has more ranks
        self.uncut = False  # whether evaluation divides the data by global batches
        self._scores: list[Any] = []  # of each loss, the window's sums so far: samples, weight, loss times weight
        self.losses = 0  # of this step that asked for those of the other ranks, or of the window
        self._means: list[tuple[Callable[[Any, Any], None], Any]] = []  # of this step's metrics that count batches
        # The samples of a step on all ranks over ``batch``; 0 until an optimizer has made it.
        self.present = keras.Variable(0.0, trainable=False, dtype="float64", name="present")
        self.batch = keras.Variable(32.0, trainable=False, dtype="float64", name="batch")
        self.stop = keras.Variable(0.0, trainable=False, dtype="float64", name="stop")
        self.stopped = keras.Variable(0.0, trainable=False, dtype="float64", name="stopped")

    @classmethod
    def hear(cls) -> None:
        """Of steps that were made in graphs, on all ranks at the same place of their loops."""
        for reduction in sorted(cls.traced, key=lambda each: each.number):
            steps = int(reduction.steps.numpy()) - reduction._heard
            reduction._heard += steps
            if steps:
                reduction.stepped(steps)

    @classmethod
    def settle(cls) -> None:
        """Averages the running statistics of what was trained in loops of the user's own, on all ranks at the same
        place of them. Models that have gone are here still: when one goes is chance."""
        for number in sorted(cls.moved):
            cls.moved.pop(number)()

    @classmethod
    def counts(cls, part: float) -> None:
        if cls.part is not None:  # else this process is alone
            cls.part.assign(part)

    def __call__(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Gradients of ``variables`` -> the same, joined; one that no rank has stays None."""
        positions = [self._position(v) for v in variables]
        given: list[Any] = [None] * len(self.variables)
        for i, gradient in zip(positions, gradients, strict=True):
            given[i] = gradient
        part = _tensor(Reduction.part)
        if self.count is not None:
            part = keras.ops.cast(self.count, "float64") / _tensor(self.batch)
        used = keras.ops.convert_to_tensor(np.array([g is not None for g in given], np.float64))
        head = keras.ops.concatenate([keras.ops.stack([part, _tensor(self.stop)]), used])
        *dense, head = self._backend.dense([*given, head])
        joined, sums = self._backend.awaited([*dense, head], lambda: self._joined(dense, head, part))
        pairs = zip(self._exchange.split(joined), self._kinds, strict=True)
        reduced = [keras.ops.cast(x, kind) for x, kind in pairs]
        there = [g is not None for g in given]
        if self._backend.eager():  # traced, all ranks run the same graph; eagerly, what is used may differ
            there = [n > 0 for n in keras.ops.convert_to_numpy(sums)[2:]]
        return [reduced[i] if there[i] else None for i in positions]

    def _joined(self, dense: list[Any], head: Any, part: Any) -> tuple[list[Any], Any]:
        """(flat gradients, of all ranks: sums of parts, wishes to stop, ranks with a gradient of tensor 0, ...)."""
        sent = self._communicator.allreduce_async(head, "keras.counts")
        flats = self._exchange.join([self._own(i, g) for i, g in enumerate(dense)])
        started = self._start(flats, part) if self._whole else []
        sums = self._communicator.synchronize(sent)
        self.stopped.assign(sums[1])
        self.present.assign(sums[0])
        if self._whole:
            return _times(self._finish(started), self._size / sums[0]), sums
        return self._finish(self._start(flats, part / sums[0])), sums

    def of_others(self, compressor: Compressor, communicator: Communicator) -> Callable[[list[Any]], Reduction]:
        """For an optimizer that tells its variables at its first step: variables -> their own reduction in the same
        steps as this one's."""
        made: dict[tuple[int, ...], Reduction] = {}

        def of(variables: list[Any]) -> Reduction:
            key = tuple(id(v) for v in variables)
            if key not in made:
                with self._backend.lifted():
                    made[key] = Reduction(variables, compressor, communicator, self._backend)
                made[key].batch, made[key].stop, made[key].stopped = self.batch, self.stop, self.stopped
                made[key].present = self.present
            made[key].count = self.count
            return made[key]

        return of

    def whole(self, value: Any, weight: Any = None) -> Any:
        """``value``, this rank's sum or its mean by ``weight`` in all, as a part of that of all ranks: times its share
        of the weight over its share of the samples, so that the mean over samples is the sum, or the mean, of all."""
        own = [keras.ops.cast(self.count, "float64")]
        own += [] if weight is None else [keras.ops.cast(weight, "float64")]
        sent = keras.ops.stop_gradient(keras.ops.stack(own))
        name = f"keras.loss{self.losses}"
        self.losses += 1
        total = self._communicator.synchronize(self._communicator.allreduce_async(sent, name))
        factor = total[0] / own[0]
        if weight is not None:
            factor = factor * keras.ops.divide_no_nan(own[1], total[1])
        return value * keras.ops.cast(keras.ops.stop_gradient(factor), value.dtype)

    def scored(self, value: Any, weight: Any = None) -> Any:
        """``value``, a sum over a batch that is scored or its mean by ``weight``, as what the batch adds to the loss of
        its window: times the samples, these add up to the loss of the global batch that one process would take."""
        x = keras.ops.cast(value, "float64")
        w = keras.ops.ones_like(x) if weight is None else keras.ops.cast(weight, "float64")
        samples, before, after = self._summed(w, x * w)

        def total(of: Any) -> Any:
            return of[0] * (of[2] * _tensor(self.parts) if weight is None else keras.ops.divide_no_nan(of[2], of[1]))

        return keras.ops.cast((total(after) - total(before)) / samples, value.dtype)

    def _summed(self, *values: Any) -> tuple[Any, Any, Any]:
        """(samples of this batch, (samples, two sums) of the window before it, and with its two ``values``)."""
        while len(self._scores) <= self.losses:
            with self._backend.lifted():
                zeros = np.zeros(3)
                self._scores.append(keras.Variable(zeros, trainable=False, dtype="float64", name="scores"))
        sums = self._scores[self.losses]
        self.losses += 1
        samples = keras.ops.cast(self.scoring, "float64")
        before = keras.ops.where(_tensor(self.place) > 0, _tensor(sums), keras.ops.zeros((3,), "float64"))
        after = before + keras.ops.stack([samples, *values])
        sums.assign(after)
        return samples, before, after

    def batch_mean(self, value: Any, add: Callable[[Any, Any], None]) -> None:
        """Calls ``add`` with what this rank's batch, whose mean is ``value``, adds to the sum of the means of global
        batches, and to their number. Of a step's samples on all ranks one knows when it is made: until then every rank
        counts as if its batch were full, and ``step_made`` adds the rest."""
        one = keras.ops.ones_like(value)
        if self.scoring is not None:
            samples = keras.ops.cast(self.scoring, "float64")
            _, before, after = self._summed(samples * value, one)
            begins = keras.ops.cast(_tensor(self.place) == 0, "float64")
            means = [keras.ops.divide_no_nan(x[1], x[0]) for x in (before, after)]
            add(means[1] - means[0], begins)
        elif self.count is not None:
            share = keras.ops.cast(self.count, "float64") / (_tensor(self.batch) * self._size)
            add(value * share, share)
            self._means.append((add, value))
        else:
            add(value, one)

    def begin_step(self, samples: Any) -> None:
        self.count, self.losses, self._means = samples, 0, []

    def step_made(self) -> None:
        """Corrects the shares of this step's batch means."""
        if not self._means:
            return
        full, present = keras.ops.convert_to_tensor(float(self._size), "float64"), _tensor(self.present)
        whole = keras.ops.where(present > 0, present, full)  # no optimizer's step: nobody knows
        part = keras.ops.cast(self.count, "float64") / _tensor(self.batch)
        more = part / whole - part / full
        for add, value in self._means:
            add(value * more, more)
        self._means = []
        self.present.assign(0.0)

    def scored_batch(self) -> None:
        """The next batch has the next place in its window."""
        if self.losses:
            self.place.assign((_tensor(self.place) + 1) % _tensor(self.window))

    def begin_scoring(self, window: int = 1, parts: int = 1) -> None:
        self.window.assign(window)
        self.place.assign(0)
        self.parts.assign(parts)

    def _position(self, variable: Any) -> int:
        if id(variable) not in self._positions:
            raise ConfigError(
                f"the optimizer is to update '{variable.path}', which hk.distribute did not see",
                where="hvd_train.keras",
                fix="give each model its own optimizer; after a change of layers or of 'trainable' call compile and "
                "hk.distribute again",
            )
        return self._positions[id(variable)]

    def _own(self, i: int, gradient: Any) -> Any:
        """As it travels; zeros where this rank has none."""
        if gradient is None:
            return keras.ops.zeros(self.variables[i].shape, self._wire[i])
        return keras.ops.cast(gradient, self._wire[i])

    def _start(self, flats: list[Any], part: Any) -> list[Any]:
        states = [tuple(_tensor(v) for v in state) for state in self._states]
        return [self._exchange.start(b, flat, states[b]) for b, flat in enumerate(_times(flats, part))]

    def _finish(self, started: Sequence[Any]) -> list[Any]:
        joined, states = self._exchange.finish(started)
        for own, new in zip(self._states, states, strict=True):
            for variable, value in zip(own, new, strict=True):
                variable.assign(value)
        return joined


def _times(flats: list[Any], factor: Any) -> list[Any]:
    """Without a pass over them where the factor is 1: in all steps of an epoch but its last."""
    return keras.ops.cond(keras.ops.abs(factor - 1) < 1e-12, lambda: flats, lambda: _scaled(flats, factor))


def _scaled(flats: list[Any], factor: Any) -> list[Any]:
    return [flat * keras.ops.cast(factor, flat.dtype) for flat in flats]


def _tensor(variable: Any) -> Any:
    """A variable's present value; Keras 3 hands its own variables out unread."""
    return keras.ops.convert_to_tensor(variable.value)


def connect(optimizer: Any, reduction: Reduction, backend: Any, changes: Changes, of: Any = None) -> None:
    """Puts the reduction before everything that this optimizer, the outermost one, does: finite check, clipping, EMA.
    ``of``: variables -> the reduction of a further optimizer.

    The instance alone is changed, its class is not: what is saved is a plain Keras optimizer.
    """
    backend.settle(optimizer)
    apply = optimizer.apply

    def apply_reduced(grads: Sequence[Any], trainable_variables: Any = None) -> Any:
        variables = reduction.variables if trainable_variables is None else list(trainable_variables)
        found = apply((of(variables) if of else reduction)(list(grads), variables), trainable_variables)
        if reduction.count is None:
            backend.after_step(reduction)
        return found

    changes.put(optimizer, "apply", backend.untouched(apply_reduced))


def count_samples(model: Any, reduction: Reduction, backend: Any, changes: Changes) -> None:
    """Tells the reduction how many samples this rank's part of a step has, whatever ``train_step`` the model has, and
    each batch that is scored."""
    step, score = model.train_step, model.test_step

    def samples(data: Any) -> Any:
        return keras.ops.shape(next(leaf for leaf in keras.tree.flatten(data) if leaf is not None))[0]

    def counted_step(data: Any) -> Any:
        backend.draw_apart()
        reduction.begin_step(samples(data))
        try:
            found = step(data)
            reduction.step_made()
            return found
        finally:
            reduction.count = None

    def scored_step(data: Any) -> Any:
        reduction.scoring, reduction.losses = samples(data), 0
        try:
            found = score(data)
            reduction.scored_batch()
            return found
        finally:
            reduction.scoring = None

    changes.put(model, "train_step", backend.untouched(counted_step))
    changes.put(model, "test_step", backend.untouched(scored_step))

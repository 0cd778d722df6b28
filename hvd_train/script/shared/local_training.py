"""Local training in scripts: ``mode="outer"`` and ``"streaming"`` of ``ht.distribute`` and ``hk.distribute``.

Each rank steps by its local gradients, with the user's optimizer. Now and then the update of ``exchange.mode``
synchronizes the weights, as in ``hvd-train fit``. The global weights are those of the last synchronization.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import numpy as np

from hvd_train.compression import make
from hvd_train.config import ExchangeConfig
from hvd_train.config.conflicts import LOCAL, LOCAL_SCRIPT, VERIFY, Feature, check_together
from hvd_train.core.reductions import differing, mean
from hvd_train.errors import CommunicationError, ConfigError, NonFiniteError, amount
from hvd_train.frontends.base import checksum
from hvd_train.frontends.serial import Serial
from hvd_train.protocol import Communicator, Groups, Ops, Packing, Placement, Tensor, TensorSpec, Tree
from hvd_train.script.shared.record import recording
from hvd_train.script.shared.world import NamedTransfers
from hvd_train.update import make_update
from hvd_train.update.exchange import Exchange
from hvd_train.update.outer import Outer
from hvd_train.update.state import read
from hvd_train.update.streaming import PART

DIGESTS = 1 << 20  # digests are below this, so sums of their squares are exact in 64 bits
# Parameters.in_background
InBackground = Callable[[Callable[..., Any], Callable[[Any], Any]], Callable[..., Callable[[], Any]]]
FIX = "lower the learning rate, clip gradients, or look for NaN in the data"


class Variable(NamedTuple):
    """Access to a tensor of the user's model; ``write`` changes it in place."""

    name: str
    read: Callable[[], Tensor]
    write: Callable[[Tensor], None]


class ScriptWeights:
    """An adapter from a script's model to the ``Parameters`` of an update."""

    def __init__(
        self,
        variables: Sequence[Variable],
        ops: Ops,
        packing: Packing,
        communicator: Communicator,
        in_background: InBackground,
    ) -> None:
        self.variables, self.ops, self.packing, self.in_background = list(variables), ops, packing, in_background
        self.groups = Groups.of(communicator)
        tensors = [v.read() for v in self.variables]
        self._specs = [
            TensorSpec(v.name, tuple(x.shape), ops.dtype(x)) for v, x in zip(self.variables, tensors, strict=True)
        ]

    def specs(self) -> list[TensorSpec]:
        return self._specs

    def connect(self, update: Any) -> ScriptOptimizer:
        self._optimizer = ScriptOptimizer(self, update.buckets)
        return self._optimizer

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return function

    def run_queued(self) -> None:
        """Do nothing: no step is queued."""

    def retrace(self) -> None:
        """Do nothing: nothing is traced."""

    def flat_weights(self) -> list[Tensor]:
        return [self._optimizer.weights(b) for b in range(len(self._optimizer.buckets))]

    def state(self, into: Tree | None = None) -> Tree:
        return {name: read() for name, read in self.views()}

    def views(self) -> Iterator[tuple[str, Callable[[], np.ndarray]]]:
        for v in self.variables:
            yield f"weights/{v.name}", lambda v=v: self.ops.to_numpy(v.read())  # type: ignore[misc]

    def load(self, tree: Mapping[str, np.ndarray]) -> None:
        for v in self.variables:
            if (x := tree.get(f"weights/{v.name}")) is not None:
                v.write(self.ops.from_numpy(x))

    def to_canonical(self, name: str, stored: np.ndarray) -> np.ndarray:
        return stored

    def to_stored(self, name: str, canonical: np.ndarray) -> np.ndarray:
        return canonical


class ScriptOptimizer:
    """An ``Optimizer`` without steps and state, because the script's own optimizer has them."""

    def __init__(self, model: ScriptWeights, buckets: Sequence[Sequence[int]]) -> None:
        self._model, self.buckets = model, buckets

    def step(self, gradients: Sequence[Tensor], learning_rate: Any) -> None:
        raise NotImplementedError

    def weights(self, bucket: int) -> Tensor:
        return self._model.ops.concat(self.parts(bucket))

    def parts(self, bucket: int) -> list[Tensor]:
        return [self._model.ops.reshape(self._model.variables[i].read(), (-1,)) for i in self.buckets[bucket]]

    def take(self, bucket: int, weights: Tensor) -> None:
        ops, specs, members = self._model.ops, self._model.specs(), self.buckets[bucket]
        for i, part in zip(members, ops.split(weights, [specs[i].size for i in members]), strict=True):
            self._model.variables[i].write(ops.reshape(part, specs[i].shape))

    def views(self) -> Iterable[tuple[str, Callable[[], np.ndarray]]]:
        return ()

    def load(self, tree: Mapping[str, np.ndarray]) -> None:
        """Do nothing: there is no state."""


class LocalTraining:
    """Local training of a script's model: counts steps, synchronizes weights, and loads the global ones.

    The ranks synchronize after every ``outer_steps`` steps, or ``outer_steps / fragments``, and in ``synchronize``.
    Each rank counts the same in the mean, whatever the lengths of its batches. Running statistics are averaged then.
    Other buffers stay local.

    ``stop_requested``: whether this rank wants to stop; ``stops``: whether any rank wanted to at the last sync.
    """

    def __init__(
        self,
        weights: ScriptWeights,
        statistics: Sequence[Variable],
        options: ExchangeConfig,
        communicator: Communicator,
        where: str,
    ) -> None:
        self._weights, self._statistics, self._ops = weights, list(statistics), weights.ops
        # Without a model's prefix in names: for bytes.
        self._communicator, self._size, self.where = communicator, communicator.size, f"{where}(mode=...)"
        compressor = make(
            options.compression, communicator.size, communicator.rank, **options.options(options.compression)
        )

        def build(over: Communicator) -> Exchange:
            return Exchange(weights.specs(), weights.packing, compressor, over, weights.ops)

        update = make_update(options, weights, build, Serial())
        assert isinstance(update, Outer)  # or a subclass: ``exchange_options`` checks that
        self.update: Outer = update
        self._step = 0  # since all ranks had the same weights
        self.taken, self._ever_synchronized = 0, False  # steps of this process
        self.within = False  # whether the model temporarily holds the global weights
        self.stop_requested = self.stops = False
        self._common = self._read_statistics()
        # The global weights that the script has replaced since the last sync, and a digest of the new ones; 0: none.
        self._replaced: Sequence[Tensor] = []
        self._digest = 0

    # ---- steps and synchronization

    def stepped(self, steps: int = 1) -> None:
        """Count steps of the user's optimizer, and synchronize when due; all ranks call it alike."""
        for _ in range(steps):
            self._step += 1
            self.taken += 1
            due = self._step % self.update.interval == 0
            if due:
                self._agree()
            self.update.before_step(self._step, self._size)
            self.update.after_step(self._step, 1)
            if due:
                self._after_sync()

    def synchronize(self) -> None:
        """Synchronize the weights if they have changed since the last synchronization; all ranks call it."""
        if self.update.diverged:
            self._agree()
            self.update.join_all()
            self._step = 0
            self._after_sync()

    def _after_sync(self) -> None:
        """Finish a synchronization; all ranks call it."""
        self._average_statistics()

    def _agree(self) -> None:
        """Raise the same error on all ranks if weights are not finite or step counts differ; exchange stop requests."""
        ops, communicator = self._ops, self._weights.groups.data
        finite = all(bool(ops.to_numpy(ops.all_finite(x))) for x in self._weights.flat_weights())
        local = [not finite, self.stop_requested, self.taken, self.taken**2, self._digest, self._digest**2]
        total = communicator.synchronize(
            communicator.allreduce_async(ops.from_numpy(np.array(local, np.float64)), "sync")
        )
        broken, stop_requests, steps, squares, digests, their_squares = ops.to_numpy(total)
        self.stops = stop_requests > 0
        # Weights that a script sets to different values on each rank (noise) count as part of its local training.
        if self._replaced and self._size * their_squares != digests**2:
            self.update.set_common_weights(self._replaced)
        self._replaced, self._digest = [], 0
        if self._size * squares != steps**2:
            counts = [part.decode() for part in self._communicator.allgather_bytes(str(self.taken).encode(), "steps")]
            what = f"the ranks have made unequal numbers of steps: {', '.join(counts)} on rank 0, 1, ..."
            fix = "make equally many on all ranks (GradScaler skips some), and load weights on all of them"
            raise CommunicationError(what, where=self.where, fix=fix, common=True)
        if broken:
            what = f"the weights of {amount(int(broken), 'rank')} are not finite after step {self.taken}"
            raise NonFiniteError(what, where=self.where, fix=FIX, common=True)

    def _average_statistics(self) -> None:
        local = self._read_statistics()
        names = differing(local.items(), self._communicator)
        means = mean({name: local[name] for name in names}, self._communicator, self._ops)
        self._write_statistics(means)
        self._common = local | means
        self._ever_synchronized = True

    # ---- the global weights

    def begin_step(self) -> None:
        """Prepare a step. Raises ConfigError within ``global_weights``.

        Weights that the script has set since the last sync, such as a loaded part of the model, become global weights.
        Otherwise the next outer step would pull them back to the old values. See ``_agree``.
        """
        if self.within:
            raise self._step_would_be_lost()
        if self.update.diverged:
            return
        weights, common = self._weights.flat_weights(), self.update.common_weights()
        arrays = [self._ops.to_numpy(x) for x in weights]
        if all(np.array_equal(x, self._ops.to_numpy(y)) for x, y in zip(arrays, common, strict=True)):
            return
        self._replaced, self._digest = common, 1 + sum(map(checksum, arrays)) % DIGESTS
        self.update.set_common_weights(weights)

    def _step_would_be_lost(self) -> ConfigError:
        fix = "leave the context before the next step"
        return ConfigError("a step within global_weights would be lost", where=self.where, fix=fix)

    def check_load(self) -> None:
        """Raise ConfigError within ``global_weights``, whose end would undo the load."""
        if self.within:
            fix = "leave the context before the load"
            raise ConfigError("weights loaded within global_weights would be lost", where=self.where, fix=fix)

    def warn_if_never_synchronized(self) -> None:
        """Warn once if the global weights are used before the first synchronization."""
        if self.taken and not self._ever_synchronized and self._communicator.rank == 0:
            self._ever_synchronized = True
            what = f"no synchronization in {amount(self.taken, 'step')}: the global weights are still the first ones"
            warnings.warn(f"{what}; {self.where}; set outer_steps to less than {self.update.steps}", stacklevel=4)

    @contextmanager
    def global_weights(self) -> Iterator[None]:
        """Put the global weights and statistics into the model within this context, without communication."""
        if self.within or not self.update.diverged:
            yield
            return
        local = self._read_statistics()
        self.take_global()
        self.within = True
        try:
            yield
        finally:
            self.within = False
            self.update.take_local_weights()
            self._write_statistics(local)

    def take_global(self) -> None:
        """Load the global weights and statistics into the model."""
        if self.update.diverged:
            self.update.take_global_weights()
            self._write_statistics(self._common)

    def begin_round(self) -> None:
        """Set the global weights to the model's, which are equal on all ranks, and restart the step count."""
        self.update.finish_transfers()  # of outdated weights, because transfer names are reused
        self.update.load({}, Placement.PER_RANK)
        self._step, self._replaced, self._digest = 0, [], 0
        self._common = self._read_statistics()

    def _read_statistics(self) -> Tree:
        return {v.name: self._ops.to_numpy(v.read()) for v in self._statistics}

    def _write_statistics(self, tree: Tree) -> None:
        for v in self._statistics:
            if v.name in tree:
                v.write(self._ops.from_numpy(tree[v.name]))

    def checksums(self) -> dict[str, int]:
        """Return a checksum of each global weight."""
        with self.global_weights():
            return {v.name: checksum(self._ops.to_numpy(v.read())) for v in self._weights.variables}

    # ---- the outer optimizer's state

    def state(self) -> Tree:
        """Copy the state of the outer optimizer, equal on all ranks, without transfers in flight."""
        tree = read(self.update.state(), Placement.REPLICATED)
        return {name: x for name, x in tree.items() if not name.startswith(PART)}

    def load(self, tree: Mapping[str, np.ndarray]) -> None:
        """Load arrays of ``state``; all ranks call it."""
        self.update.load(tree, Placement.REPLICATED)


def check_mode(mode: str, options: Mapping[Feature, str], where: str) -> None:
    """Raise ConfigError for an option that conflicts with ``mode``. ``options``: as in ``check_together``."""
    name = f"mode={mode!r}"
    verify = "hvd-train verify" * bool(recording())
    check_together({**options, VERIFY: verify, LOCAL: name, LOCAL_SCRIPT: name}, where)


def named(communicator: Communicator, number: int) -> Communicator:
    """Wrap the communicator for the transfers of one model."""
    return cast(Communicator, NamedTransfers(communicator, number))

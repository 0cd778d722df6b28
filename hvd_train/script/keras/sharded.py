"""A user's Keras optimizer, sharded: each rank keeps the slots of its part of the weights (ZeRO, stage 1).

Gradients are whole on all ranks, so loss scaling, clipping, accumulation, moving averages and constraints do not
change. Only ``update_step`` runs on flat pieces of the variables, and the ranks gather the new weights.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from itertools import count
from typing import Any, ClassVar, NamedTuple

import keras
import numpy as np
from keras.src.utils.tracking import DotNotTrackScope

from hvd_train.errors import ConfigError
from hvd_train.protocol import Communicator, TensorSpec
from hvd_train.script.keras.gradients import wire_dtype
from hvd_train.script.keras.model_state import to_numpy
from hvd_train.script.keras.patches import Patches
from hvd_train.script.shared.broadcast import broadcast_parts
from hvd_train.update.buckets import plan
from hvd_train.update.sharded import part_sizes, pieces

# Attributes with a variable for each weight that are not divided: copies of weights and of gradients.
WHOLE = ("_variables", "_trainable_variables", "_accumulated_gradients", "_model_variables_moving_average")


class Part(NamedTuple):
    """The entries [first, last) of a flat variable that this rank updates; ``bounds``: those of all ranks.

    ``weight``: a variable with these entries, for the optimizer to update.
    """

    variable: Any
    bounds: list[tuple[int, int]]
    first: int
    last: int
    weight: Any  # (last - first,)

    def part_of(self, x: Any) -> Any:
        return keras.ops.reshape(keras.ops.stop_gradient(keras.ops.convert_to_tensor(x)), (-1,))[self.first : self.last]


class ShardedUpdate:
    """The sharded update and slots of ``optimizer``; with loss scaling, of the inner one.

    Only the instance is patched. It is divided when it is built, or at its first step.
    """

    _count: ClassVar = count()

    def __init__(self, outer: Any, communicator: Communicator, backend: Any, patches: Patches) -> None:
        self._outer, self.optimizer = outer, getattr(outer, "inner_optimizer", outer)
        self._communicator, self._backend, self._patches = communicator, backend, patches
        self._number = next(self._count)  # scripts distribute optimizers in the same order on all ranks
        self._parts: list[Part] = []
        self._buckets: tuple[tuple[int, ...], ...] = ()
        self._index: dict[Any, int] = {}  # {key of a part's variable: number of the whole one}
        self.slots: dict[int, tuple[Any, Part]] = {}  # by id: this rank's pieces
        self._loaded: tuple[int, list[np.ndarray]] | None = None  # steps and whole slots when rank 0 loaded them
        self._held: list[np.ndarray] | None = None  # whole slots, while rank 0 saves
        apply = outer.apply

        def divided_first(grads: Sequence[Any], trainable_variables: Any = None) -> Any:
            if not self._parts:
                with backend.lifted():  # outside the graph of the first step
                    if not outer.built:
                        outer.build(list(trainable_variables))
                    self._divide()
            return apply(grads, trainable_variables)

        if outer.built:
            self._divide()
        patches.put(outer, "apply", backend.untouched(divided_first))

    # ---- dividing the slots

    def _divide(self) -> None:
        """Replace whole slots by this rank's pieces."""
        optimizer, size, rank = self.optimizer, self._communicator.size, self._communicator.rank
        variables = list(optimizer._trainable_variables)
        specs = [TensorSpec(v.path, tuple(v.shape), wire_dtype(v)) for v in variables]
        self._buckets = plan(specs, self._backend.packing(self._communicator))
        bounds: dict[int, list[tuple[int, int]]] = {i: [] for i in range(len(variables))}
        for members in self._buckets:
            sizes = [specs[i].size for i in members]
            parts = part_sizes(sum(sizes), size)
            for other in range(size):
                edges = pieces(sizes, sum(parts[:other]), sum(parts[: other + 1]))
                for i, edge in zip(members, edges, strict=True):
                    bounds[i].append(edge)
        for i, v in enumerate(variables):
            first, last = bounds[i][rank]
            weight = keras.Variable(np.zeros(last - first), dtype=v.dtype, trainable=False, name=f"{v.name}_part")
            self._parts.append(Part(v, bounds[i], first, last, weight))
            self._index[optimizer._var_key(weight)] = i
        for name, held in self._lists().items():
            made = [x if x is None else self._piece(x, part) for x, part in zip(held, self._parts, strict=True)]
            self._put(name, held, made)
        self._check_rest()
        self._patch()

    def _check_rest(self) -> None:
        """Raise ConfigError if slots are not kept in lists with one for each variable."""
        whole = {id(v) for name in WHOLE[1:] for v in getattr(self.optimizer, name, None) or ()}
        rest = [v for v in self.optimizer._variables if id(v) not in self.slots and id(v) not in whole and len(v.shape)]
        if rest:
            kind = type(self.optimizer).__name__
            what = f"{kind} cannot be sharded: it keeps '{rest[0].name}' outside of lists with an entry for each weight"
            raise ConfigError(what, where="hk.distribute(sharded=True)", fix="leave sharded=True out", common=True)

    def _lists(self) -> dict[str, list[Any]]:
        """Return {attribute: list of slots, one for each variable or None}."""
        shapes = [tuple(part.variable.shape) for part in self._parts]
        lists = {name: x for name, x in vars(self.optimizer).items() if isinstance(x, list) and name not in WHOLE}
        return {
            name: list(held)
            for name, held in lists.items()
            if len(held) == len(shapes)
            and any(x is not None for x in held)
            and all(
                x is None or (isinstance(x, keras.Variable) and tuple(x.shape) == shape)
                for x, shape in zip(held, shapes, strict=True)
            )
        }

    def _piece(self, slot: Any, part: Part) -> Any:
        values = to_numpy(slot).reshape(-1)[part.first : part.last]
        made = keras.Variable(values, dtype=slot.dtype, trainable=False, name=slot.name)
        self.slots[id(made)] = made, part
        return made

    def _put(self, name: str, before: list[Any], after: list[Any]) -> None:
        """Replace the variables in an attribute, and in the list of all the optimizer's variables."""
        tracked = {id(v): k for k, v in enumerate(self.optimizer._variables)}
        for old, new in zip(before, after, strict=True):
            if old is not None:
                self.optimizer._variables[tracked[id(old)]] = new
        if hasattr(self.optimizer._variables, "_last_wrapped_list_snapshot"):
            # TensorFlow's list keeps its first content, and so the memory of whole slots.
            self.optimizer._variables._last_wrapped_list_snapshot = list(self.optimizer._variables)
        # Keras must not track them twice. TensorFlow must, because it keeps an attribute's earlier value.
        with DotNotTrackScope():
            setattr(self.optimizer, name, after)

    def _patch(self) -> None:
        optimizer, put = self.optimizer, self._patches.put
        kind = type(optimizer)

        def index(variable: Any) -> int:
            i = self._index.get(optimizer._var_key(variable))
            return kind._get_variable_index(optimizer, variable) if i is None else i

        def use_weight_decay(variable: Any) -> bool:
            i = self._index.get(optimizer._var_key(variable))
            if i is not None:  # use the whole variable: its name, and whether it is excluded
                whole = self._parts[i].variable
                variable = whole if isinstance(variable, keras.Variable) else whole.value
            return kind._use_weight_decay(optimizer, variable)

        self._patches.on_undo(self._undo)
        put(optimizer, "_get_variable_index", index)
        put(optimizer, "_use_weight_decay", use_weight_decay)
        put(optimizer, "_apply_weight_decay", lambda variables: None)  # applied to parts, in the update
        put(optimizer, "_backend_update_step", self._backend.untouched(self._update))
        for owner in {id(x): x for x in (optimizer, self._outer)}.values():
            put(owner, "save_own_variables", lambda store, owner=owner: self._save(owner, store))
            put(owner, "load_own_variables", lambda store, owner=owner: self._load(owner, store))

    # ---- a step

    def _update(self, grads: Sequence[Any], variables: Sequence[Any], learning_rate: Any) -> None:
        optimizer, kind = self.optimizer, type(self.optimizer)
        positions = [optimizer._get_variable_index(v) for v in variables]
        pairs = [(self._parts[i], g) for i, g in zip(positions, grads, strict=True)]
        # Some formulas, such as Nadam's, update a number for all variables on every rank: keep one part, if empty.
        pairs = [pair for pair in pairs if pair[0].last > pair[0].first] or pairs[:1]
        weights = [part.weight for part, _ in pairs]
        for part, _ in pairs:
            part.weight.assign(part.part_of(part.variable))
        if any(optimizer._use_weight_decay(weight) for weight in weights):
            kind._apply_weight_decay(optimizer, weights)
        kind._backend_update_step(optimizer, [part.part_of(g) for part, g in pairs], weights, learning_rate)
        self._gather(set(positions))

    def _gather(self, moved: set[int]) -> None:
        """Gather the updated weights of all ranks. ``moved``: updated in this step, the same on all ranks."""
        started = []
        for b, members in enumerate(self._buckets):
            if moved.isdisjoint(members):
                continue
            parts = [self._parts[i] for i in members]
            values = [
                part.weight if i in moved else part.part_of(part.variable)
                for i, part in zip(members, parts, strict=True)
            ]
            values = [keras.ops.cast(x, wire_dtype(part.variable)) for x, part in zip(values, parts, strict=True)]
            joined = keras.ops.concatenate(values) if len(values) > 1 else values[0]
            name = f"optimizer{self._number}.weights{b}"
            started.append((parts, self._communicator.allgather_async(keras.ops.stop_gradient(joined), name)))
        for parts, handle in started:
            sizes = [int(np.prod(part.variable.shape)) for part in parts]
            whole = keras.ops.reshape(self._communicator.synchronize(handle), (sum(sizes),))
            ends = np.cumsum(sizes).tolist()
            for part, size, end in zip(parts, sizes, ends, strict=True):
                value = keras.ops.reshape(whole[end - size : end], part.variable.shape)
                part.variable.assign(keras.ops.cast(value, part.variable.dtype))

    # ---- state

    def whole(self, everywhere: bool) -> list[np.ndarray]:
        """Return whole slots in the order of ``slots``, on rank 0 or ``everywhere``; all ranks call it."""
        # A user reads this name in the error if a rank does not call it.
        self._communicator.allgather_bytes(b"", "slots_of_a_sharded_optimizer_which_all_ranks_must_save")
        local = b"".join(np.ascontiguousarray(to_numpy(v)).tobytes() for v, _ in self.slots.values())
        received = [memoryview(part) for part in self._communicator.gather_bytes(local)]
        arrays = []
        for slot, part in self.slots.values() if received else ():
            kind, pieces = to_numpy(slot).dtype, []
            for rank, (first, last) in enumerate(part.bounds):
                length = (last - first) * kind.itemsize
                pieces.append(np.frombuffer(received[rank][:length], kind))
                received[rank] = received[rank][length:]
            arrays.append(np.concatenate(pieces).reshape(tuple(part.variable.shape)))
        return self._from_rank_0(arrays) if everywhere else arrays

    def _from_rank_0(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        flat = [np.ascontiguousarray(a).reshape(-1).view(np.uint8) for a in arrays]
        _, parts = broadcast_parts(self._communicator, None, flat)
        kinds = ((to_numpy(slot).dtype, tuple(part.variable.shape)) for slot, part in self.slots.values())
        return [np.frombuffer(x, kind).reshape(shape) for x, (kind, shape) in zip(parts, kinds, strict=True)]

    def hold(self) -> None:
        """Collect whole slots before rank 0 saves; on all ranks together."""
        self._held = self.whole(everywhere=False)

    def release(self) -> None:
        self._held = None

    def _save(self, owner: Any, store: Any) -> None:
        held = self.whole(everywhere=True) if self._held is None else self._held
        whole = dict(zip(self.slots, held, strict=True))
        for i, variable in enumerate(owner.variables):
            store[str(i)] = whole[id(variable)] if id(variable) in whole else to_numpy(variable)

    def _load(self, owner: Any, store: Any) -> None:
        if len(store.keys()) != len(owner.variables):
            what = f"optimizer '{owner.name}' has {len(owner.variables)} variables, the saved one {len(store.keys())}"
            warnings.warn(f"{what}: it is not loaded", stacklevel=2)
            return
        whole: dict[int, np.ndarray] = {}
        for i, variable in enumerate(owner.variables):
            if id(variable) in self.slots:
                whole[id(variable)] = np.array(store[str(i)])
            else:
                variable.assign(store[str(i)])
        arrays = [whole[key] for key in self.slots]
        self._take(arrays)
        if not self._communicator.rank:
            self._loaded = int(to_numpy(self.optimizer._iterations)), arrays

    def _take(self, arrays: Sequence[np.ndarray]) -> None:
        for (slot, part), array in zip(self.slots.values(), arrays, strict=True):
            slot.assign(array.reshape(-1)[part.first : part.last])

    def take_from_rank_0(self) -> None:
        """Give all ranks their pieces of the slots that only rank 0 may have loaded; on all ranks together."""
        steps, arrays = self._loaded or (-1, [])
        self._loaded = None
        # Steps since then have updated what was loaded.
        new = bool(arrays) and steps == int(to_numpy(self.optimizer._iterations))
        if self._communicator.broadcast_bytes(bytes([new])) == bytes([1]):
            self._take(self._from_rank_0(arrays))

    def _undo(self) -> None:
        """Restore the optimizer's whole slots, before it is distributed again; on all ranks together."""
        whole = dict(zip(self.slots, self.whole(everywhere=True), strict=True))
        for name, held in vars(self.optimizer).copy().items():
            if isinstance(held, list) and name != "_variables" and any(id(x) in whole for x in held):
                made = [
                    keras.Variable(whole[id(x)], dtype=x.dtype, trainable=False, name=x.name) if id(x) in whole else x
                    for x in held
                ]
                self._put(name, list(held), made)
        self.slots, self._parts = {}, []

"""The table's formulas over JAX's arrays: one jitted call updates all weights and their slots."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hvd_train.config.optimizers import OPTIMIZERS
from hvd_train.frontends.named_arrays import NamedArrays
from hvd_train.update import layerwise
from hvd_train.update.parameter_groups import rule_of, step_key

Arrays = dict[str, jax.Array]


class JaxOptimizer(NamedArrays):
    words = 2

    def __init__(self, frontend: Any) -> None:
        self._frontend, self.layouts, self._options = frontend, frontend.layouts, frontend.config.optim
        self._spec = OPTIMIZERS[self._options.name]
        self._rules = {name: rule_of(self._options, name) for name in frontend._unfrozen}
        slots = self._spec.slots_of(self._options.momentum)
        self.slots = {slot: {name: jnp.zeros_like(frontend.w[name]) for name in self._rules} for slot in slots}
        keys = {step_key(rule) for rule in self._rules.values()} if self._spec.counts_steps else ()
        self.steps = {key: jnp.zeros((), "float32") for key in sorted(keys)}
        self._buckets = [[list(self._rules)[i] for i in members] for members in frontend.update.buckets]
        self._moved = jax.jit(self._move)

    def step(self, gradients: Sequence[jax.Array], learning_rate: Any) -> None:
        w = {name: self._frontend.w[name] for name in self._rules}
        w, slots, self.steps = self._moved(w, self.slots, self.steps, gradients, learning_rate)
        self._frontend.w.update(w)
        for slot, arrays in self.slots.items():  # jit sorts the keys of what it returns, and formulas go by their order
            arrays.update(slots[slot])

    def _move(self, w: Arrays, slots: dict[str, Arrays], steps: Arrays, flats: Sequence[jax.Array], rate: Any) -> Any:
        """Return the next weights, slots and steps. ``flats``: the gradient (n,) of each bucket."""
        steps = {key: count + 1 for key, count in steps.items()}
        new, after = dict(w), {slot: dict(arrays) for slot, arrays in slots.items()}
        for members, flat in zip(self._buckets, flats, strict=True):
            for name, g in zip(members, self._cut(members, flat), strict=True):
                rule, old = self._rules[name], [slots[slot][name] for slot in self.slots]
                # In 64 bits: 1 - beta^t cancels in 32.
                t = steps[step_key(rule)].astype("float64") if steps else None
                result = self._spec.formula(
                    w[name], g, old, t, rate * rule.factor, rule.options(self._options), self._frontend.ops
                )
                if self._spec.per_tensor:
                    (result,) = layerwise.side_by_side([result], layerwise.whole)
                loss, *values = result
                new[name] = w[name] - loss.astype(w[name].dtype)
                for slot, value in zip(self.slots, values, strict=True):
                    after[slot][name] = value.astype(w[name].dtype)
        return new, after, steps

    def _cut(self, members: Sequence[str], flat: jax.Array) -> list[jax.Array]:
        w = self._frontend.w
        parts = self._frontend.ops.split(flat, [w[name].size for name in members])
        return [part.reshape(w[name].shape) for name, part in zip(members, parts, strict=True)]

    def _joined(self, arrays: Arrays, bucket: int) -> jax.Array:
        return jnp.concatenate([arrays[name].reshape(-1) for name in self._buckets[bucket]])

    def weights(self, bucket: int) -> jax.Array:
        return self._joined(self._frontend.w, bucket)

    def slot(self, name: str, bucket: int) -> jax.Array:
        return self._joined(self.slots[name], bucket)

    def parts(self, bucket: int) -> list[jax.Array]:
        return [self._frontend.w[name].reshape(-1) for name in self._buckets[bucket]]

    def take(self, bucket: int, weights: jax.Array) -> None:
        members = self._buckets[bucket]
        self._frontend.w.update(zip(members, self._cut(members, weights), strict=True))

    def _readers(self) -> Mapping[str, Callable[[], np.ndarray]]:
        slots = {f"slots/{slot}/{name}": x for slot, arrays in self.slots.items() for name, x in arrays.items()}
        return {key: partial(np.asarray, x) for key, x in {**slots, **self.steps}.items()}

    def _assign(self, arrays: Mapping[str, np.ndarray]) -> None:
        for key, array in arrays.items():
            _, slot, *name = key.split("/")
            place, at = (self.slots[slot], name[0]) if name else (self.steps, key)
            place[at] = jnp.array(array, place[at].dtype)

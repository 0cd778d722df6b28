"""The process' generators of random numbers: each rank draws other numbers in a step, and the same for the order.

Law: while ``fit`` runs, a generator starts from its state before, the rank and the number of the call: ranks draw other
numbers, which repeat from run to run. What decides on the order of samples is drawn where rank 0 stood, on all ranks.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import random
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

from hvd_train.protocol import Communicator

PIPELINE = ("python", "numpy", "tensorflow")  # what a tf.data pipeline may draw from: the same on all ranks


class _Python:
    def get(self) -> Any:
        return random.getstate()

    def set(self, state: Any) -> None:
        # JSON has made lists of the tuples that random wants.
        version, words, gauss = state
        random.setstate((version, tuple(words), gauss))

    def seeded(self, seed: int) -> Any:
        return random.Random(seed).getstate()


class _NumPy:
    def get(self) -> Any:
        return self._state(np.random)

    def set(self, state: Any) -> None:
        name, key, *rest = state
        np.random.set_state((name, np.array(key, np.uint32), *rest))

    def seeded(self, seed: int) -> Any:
        return self._state(np.random.RandomState(seed))

    def _state(self, generator: Any) -> Any:
        name, key, *rest = generator.get_state()
        return [name, key.tolist(), *rest]


class _Torch:
    def __init__(self, device: str) -> None:
        import torch

        self.torch, self.device = torch, device
        self._generator = torch.default_generator if device == "cpu" else torch.cuda.default_generators[int(device)]

    def get(self) -> Any:
        return self._generator.get_state().tolist()

    def set(self, state: Any) -> None:
        self._generator.set_state(self.torch.tensor(state, dtype=self.torch.uint8))

    def seeded(self, seed: int) -> Any:
        return self.torch.Generator(self._generator.device).manual_seed(seed).get_state().tolist()


class _TensorFlow:
    """The seed of operations outside of a graph, from which a traced graph starts, too. None: nobody has set it."""

    def __init__(self) -> None:
        from tensorflow.python.eager import context

        self._context = context.context()

    def get(self) -> Any:
        seed = self._context._seed
        return None if seed is None else [int(seed), self._context._rng.getstate()]

    def set(self, state: Any) -> None:
        if state is not None:
            self._context._seed, (version, words, gauss) = state
            self._context._rng = random.Random()
            self._context._rng.setstate((version, tuple(words), gauss))

    def seeded(self, seed: int) -> Any:
        return [seed, random.Random(seed).getstate()]


class _Keras:
    """The generator of ``keras.random`` where no seed is given."""

    def __init__(self) -> None:
        from keras.src.random.seed_generator import global_seed_generator

        before = random.getstate()  # Keras seeds a new one from it: weights to come are not to depend on this
        self._generator = global_seed_generator()
        random.setstate(before)

    def get(self) -> Any:
        import keras

        return keras.ops.convert_to_numpy(self._generator.state).tolist()

    def set(self, state: Any) -> None:
        self._generator.state.assign(state)

    def seeded(self, seed: int) -> Any:
        return [seed, 0]


def generators() -> dict[str, Any]:
    """Return the generators of all libraries that this process has loaded, by name."""
    loaded: dict[str, Any] = {}
    if "keras" in sys.modules:
        loaded["keras"] = _Keras()
    loaded |= {"python": _Python(), "numpy": _NumPy()}
    if "tensorflow" in sys.modules:
        loaded["tensorflow"] = _TensorFlow()
    if "torch" in sys.modules:
        loaded["torch"] = _Torch("cpu")
        if sys.modules["torch"].cuda.is_initialized():
            loaded["cuda"] = _Torch(str(sys.modules["torch"].cuda.current_device()))
    return loaded


class Draws:
    """The generators as one rank of ``world`` uses them."""

    def __init__(self, world: Communicator) -> None:
        self.world = world
        self._common: dict[str, Any] | None = None
        self._generators: dict[str, Any] = {}

    @contextlib.contextmanager
    def apart(self, number: int, keep: tuple[str, ...] = ()) -> Iterator[None]:
        """Let this rank draw other numbers than other ranks within this context, others for each ``number``.

        Afterwards all is as before, but for what was drawn in ``common``. ``keep``: generators that are left alone. All
        ranks enter it.
        """
        self._generators = {name: each for name, each in generators().items() if name not in keep}
        local = self._states()
        # Rank 0's states, by name: {generator: state}
        common = json.loads(self.world.broadcast_bytes(json.dumps(local).encode()))
        self._common = {name: state for name, state in common.items() if name in local}  # not all may have loaded torch
        equal = {name for name, state in local.items() if state == self._common.get(name)}  # torch's need not be
        self._set({name: self._apart(name, state, number) for name, state in local.items()})
        try:
            yield
        finally:
            # What was equal on all ranks stays equal: later draws of the order must be.
            self._set({name: self._common[name] if name in equal else state for name, state in local.items()})
            self._common = None

    @contextlib.contextmanager
    def common(self, *, keep: bool = False) -> Iterator[None]:
        """Let all ranks draw the same numbers within this context; ``keep``: and draw them again later."""
        if self._common is None:
            yield
            return
        local = self._states()
        self._set(self._common)
        try:
            yield
        finally:
            # The next ``common`` goes on where this one ended.
            self._common = self._common if keep else self._states()
            self._set(local)

    def _apart(self, name: str, state: Any, number: int) -> Any:
        if state is None:
            return None
        # Of the state as well: a script that seeds otherwise draws otherwise.
        digest = hashlib.sha256(f"{json.dumps(state)} {self.world.rank} {number}".encode()).digest()
        return self._generators[name].seeded(int.from_bytes(digest[:4], "big") >> 1)

    def _states(self) -> dict[str, Any]:
        return json.loads(json.dumps({name: each.get() for name, each in self._generators.items()}))

    def _set(self, states: dict[str, Any]) -> None:
        for name, state in states.items():
            self._generators[name].set(state)

"""Random generators in Keras scripts: different on each rank within steps, equal for the order of samples.

While ``fit`` runs, a generator is seeded from its earlier state, the rank and the number of the call. So ranks draw
different numbers, reproducible from run to run. The order of samples is drawn from rank 0's state on all ranks.
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

PIPELINE = ("python", "numpy", "tensorflow")  # the generators that a tf.data pipeline may use: equal on all ranks


class _Python:
    def get(self) -> Any:
        return random.getstate()

    def set(self, state: Any) -> None:
        # JSON turns the tuples that random needs into lists.
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
    """TensorFlow's eager seed, which also seeds traced graphs. None: not set."""

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
    """The default generator of ``keras.random``."""

    def __init__(self) -> None:
        from keras.src.random.seed_generator import global_seed_generator

        before = random.getstate()  # a new Keras generator is seeded from it; later weights must not depend on that
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
    """Return the generators of all loaded libraries, by name."""
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
    """The random generators of one rank of ``world``."""

    def __init__(self, world: Communicator) -> None:
        self.world = world
        self._common: dict[str, Any] | None = None
        self._generators: dict[str, Any] = {}

    @contextlib.contextmanager
    def per_rank(self, number: int, keep: tuple[str, ...] = ()) -> Iterator[None]:
        """Draw different random numbers on each rank, and for each ``number``, within this context.

        Afterwards the generators are restored, except for numbers drawn in ``common``. ``keep``: generators to leave
        unchanged. All ranks enter it.
        """
        self._generators = {name: each for name, each in generators().items() if name not in keep}
        local = self._states()
        # Rank 0's states, by name: {generator: state}
        common = json.loads(self.world.broadcast_bytes(json.dumps(local).encode()))
        self._common = {name: state for name, state in common.items() if name in local}  # some may lack torch
        equal = {name for name, state in local.items() if state == self._common.get(name)}  # torch's may differ
        self._set({name: self._seeded(name, state, number) for name, state in local.items()})
        try:
            yield
        finally:
            # Generators that were equal on all ranks stay equal, for later orders of samples.
            self._set({name: self._common[name] if name in equal else state for name, state in local.items()})
            self._common = None

    @contextlib.contextmanager
    def common(self, *, keep: bool = False) -> Iterator[None]:
        """Draw the same random numbers on all ranks within this context; ``keep``: a later one repeats them."""
        if self._common is None:
            yield
            return
        local = self._states()
        self._set(self._common)
        try:
            yield
        finally:
            # The next ``common`` continues where this one ended.
            self._common = self._common if keep else self._states()
            self._set(local)

    def _seeded(self, name: str, state: Any, number: int) -> Any:
        if state is None:
            return None
        # The state is included, so that the script's seed matters.
        digest = hashlib.sha256(f"{json.dumps(state)} {self.world.rank} {number}".encode()).digest()
        return self._generators[name].seeded(int.from_bytes(digest[:4], "big") >> 1)

    def _states(self) -> dict[str, Any]:
        return json.loads(json.dumps({name: each.get() for name, each in self._generators.items()}))

    def _set(self, states: dict[str, Any]) -> None:
        for name, state in states.items():
            self._generators[name].set(state)

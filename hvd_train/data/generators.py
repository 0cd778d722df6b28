"""Is a sample of a user's code a function of its index? Random numbers, and samples that are read beside it.

Generators are the global ones of a process, and those that an object holds.
"""

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

import numpy as np

from hvd_train.data.order import mix

BESIDE = 6  # samples beside which the first one is read
MOST_OBJECTS = 2000  # looked at for generators of their own


def seed_all(key: int, own: list[Any] | None = None) -> None:
    """Seed the global generators of Python, NumPy and PyTorch (if it is imported), and ``own`` ones."""
    random.seed(key)
    np.random.seed(key % 2**32)
    if torch := sys.modules.get("torch"):
        # Not torch.manual_seed, which seeds those of GPUs as well, and writes down the stack for each: 0.2 ms.
        torch.default_generator.manual_seed(key)
    for number, one in enumerate(own or ()):
        seed = mix(key, number)
        if isinstance(one, np.random.Generator):
            one.bit_generator.state = type(one.bit_generator)(seed).state
        elif hasattr(one, "manual_seed"):
            one.manual_seed(seed)
        else:
            one.seed(seed % 2**32)


def generators_of(value: Any) -> list[Any]:
    """Return the generators that an object holds: its attributes, and those of objects and lists in them."""
    found, seen, left = list[Any](), set[int](), deque([value])
    while left and len(seen) < MOST_OBJECTS:
        one = left.popleft()  # what is near comes before the samples of a long list
        if id(one) in seen or isinstance(one, str | bytes | int | float | np.ndarray | None):
            continue
        seen.add(id(one))
        if _is_generator(one):
            found.append(one)
        elif isinstance(one, dict):
            left.extend(islice(one.values(), MOST_OBJECTS))
        elif isinstance(one, list | tuple):
            left.extend(islice(one, MOST_OBJECTS))
        elif hasattr(one, "__dict__") and not isinstance(one, type) and type(one).__name__ != "module":
            left.extend(vars(one).values())
    return found


def _is_generator(one: Any) -> bool:
    if isinstance(one, random.Random | np.random.Generator | np.random.RandomState):
        return True
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(one, torch.Generator)


def beside(count: int) -> tuple[list[int], list[int]]:
    """Return two lists of samples, of ``count``, that have the first one alone in common; [] and [] for less than 3.

    What is made of the first one must not depend on the list.
    """
    rows = np.unique(np.linspace(0, count - 1, 2 * BESIDE + 1).astype(int)).tolist()
    each = (len(rows) - 1) // 2
    return (rows[: each + 1], [rows[0], *rows[each + 1 : 2 * each + 1]]) if each else ([], [])


def states(own: list[Any]) -> tuple[Any, ...]:
    """Return the states of the global generators and of ``own`` ones, to be compared."""
    torch = sys.modules.get("torch")
    drawn = torch.get_rng_state().numpy().tobytes() if torch else b""
    _, keys, *place = np.random.get_state(legacy=True)
    return random.getstate(), np.asarray(keys).tobytes(), place, drawn, [repr(_state(one)) for one in own]


def _state(one: Any) -> Any:
    if isinstance(one, np.random.Generator):
        return one.bit_generator.state
    if isinstance(one, np.random.RandomState):
        return [np.asarray(x).tolist() for x in one.get_state(legacy=True)]
    return one.getstate() if isinstance(one, random.Random) else one.get_state().tolist()


@contextmanager
def generators_kept() -> Iterator[None]:
    """Give the global generators their states back after a block."""
    python, numpy, torch = random.getstate(), np.random.get_state(), sys.modules.get("torch")
    state = torch.get_rng_state() if torch else None
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        if torch and state is not None:
            torch.set_rng_state(state)

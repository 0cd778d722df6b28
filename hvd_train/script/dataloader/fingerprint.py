"""Contents of a data set, compared between ranks: an order may come of a set or a folder, or be random."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import PurePath
from posixpath import commonprefix
from typing import Any

import numpy as np
import torch
from torch.utils import data

SPLIT_FIX = "make and split data with a seed, before ht.distribute"
SORT_FIX = "sort what comes from a set or a folder, and seed what is drawn, before ht.distribute"
PROBES = 64  # rows of an array
ENTRIES, FEWER, INNER = 4096, 256, 16  # of a list; while the script trains; of a list in it
SHORT = 16  # from here on a list of numbers is one of samples: shorter ones are sizes, times, (rank, ranks)
LARGEST = 2**20  # entries of what is looked at as a whole, to see that it was shuffled
RANK_WORDS = ("cache", "memo", "rank")  # in names of what a rank has by itself
SCALARS = (str, bytes, int, float, PurePath, np.generic)
LISTS = (list, tuple)
SETS = (set, frozenset)
ARRAYS = (np.ndarray, torch.Tensor)


def content(samples: Any) -> dict[str, str]:
    """Return hashes of all that can be read without a call of user code: {"data: files": "0123456789ab; ..."}."""
    texts = {}
    for name, owner in _within(samples, "data"):
        if isinstance(owner, data.Subset):
            chosen = hashlib.sha256(np.asarray(owner.indices).astype(np.int64).tobytes()).hexdigest()[:12]
            texts[f"{name}: indices"] = f"{chosen}; {SPLIT_FIX}"
            continue
        count = _length(owner)
        for attribute, x in _attributes(owner):
            if digest := _digest(x, count):
                texts[f"{name}{attribute}"] = (
                    f"{digest}; {SPLIT_FIX if type(owner) is data.TensorDataset else SORT_FIX}"
                )
    return texts


class Orders:
    """Lists and arrays with an entry for each sample, and which of them a script has shuffled since.

    One that a rank fills by itself, as a cache, is not shuffled: it holds other entries than before.
    """

    def __init__(self, samples: Any) -> None:
        self._known: list[tuple[str, Any, str, list, list[int]]] = []
        self._moved: dict[str, tuple[list, str]] = {}  # last
        for name, owner in _within(samples, "data"):
            count = _length(owner)
            for attribute, x in _attributes(owner):
                if attribute and isinstance(x, (list, *ARRAYS)) and 1 < _length(x) == count and _entries(x) <= LARGEST:
                    self._known.append((f"{name}{attribute}", owner, attribute[2:], _look(x), [*_sums(x)]))

    def moved(self) -> dict[str, str]:
        """Return {"data: files": a hash of the new order} of those that were shuffled."""
        digests = {}
        for name, owner, attribute, first, sums in self._known:
            x = vars(owner).get(attribute)
            # Called at every comparison of weights: whole lists are read only where 64 entries of one have moved.
            look = _look(x) if isinstance(x, (list, *ARRAYS)) else first
            if look == first:
                continue
            if self._moved.get(name, (None,))[0] != look:
                same = any(a == b for a, b in zip(_sums(x), sums, strict=False))
                self._moved[name] = look, _digest(x, len(x), FEWER) if same else ""
            if self._moved[name][1]:
                digests[name] = self._moved[name][1]
        return digests


def _within(samples: Any, name: str, visited: tuple[int, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Yield a data set and those in it, by name. What a stream holds is not what it gives."""
    if isinstance(samples, data.IterableDataset) or id(samples) in visited:
        return
    yield name, samples
    for attribute, x in list(getattr(samples, "__dict__", {}).items()):
        inner = name if isinstance(samples, data.Subset | data.ConcatDataset) else f"{name}.{attribute}"
        if isinstance(x, data.Dataset) or (isinstance(samples, data.Subset) and attribute == "dataset"):
            yield from _within(x, inner, (*visited, id(samples)))
        elif isinstance(x, LISTS) and isinstance(samples, data.ConcatDataset | data.StackDataset):
            for i, each in enumerate(x):
                yield from _within(each, f"{inner}[{i}]", (*visited, id(samples)))


def _attributes(owner: Any) -> list[tuple[str, Any]]:
    """Return the attributes of a data set by name; of a list or an array, itself."""
    if isinstance(owner, (*LISTS, *ARRAYS)):
        return [("", owner)]
    pairs = getattr(owner, "__dict__", {}).items()
    return [(f": {name}", x) for name, x in pairs if not any(word in name.lower() for word in RANK_WORDS)]


def _length(x: Any) -> int:
    with suppress(Exception):  # a user's own
        return len(x)
    return -1


def _digest(x: Any, count: int, most: int = ENTRIES) -> str:
    """Return a hash of ``x``; "" where it may belong to this rank alone. ``count``: of samples."""
    parts = list(_telling(x, count, most))
    folder = commonprefix([part for part in parts if "/" in part]).rpartition("/")[0]  # it may lie elsewhere
    parts = [part.removeprefix(folder) for part in parts]
    return hashlib.sha256("\n".join(parts).encode(errors="surrogatepass")).hexdigest()[:12] if parts else ""


def _telling(x: Any, count: int, most: int) -> Iterator[str]:
    if isinstance(x, dict):
        values = list(x.values())
        numbers = all(type(v) is int for v in values) and set(values) == set(range(len(x)))
        # 0 to n - 1 in a dict: a vocabulary or class numbers, whose order matters.
        if len(x) > 1 and (numbers or len(x) == count):  # classes, words, samples
            yield from _parts(x, most)
            return
        for key in sorted((key for key in x if isinstance(key, SCALARS)), key=repr)[:most]:  # what is a list in it
            inner = list(_telling(x[key], count, _less(most)))
            yield from [repr(key), *inner] if inner else []
    elif isinstance(x, ARRAYS):
        yield from _parts(x, most) if x.ndim and len(x) > 1 else ()
    elif isinstance(x, LISTS + SETS) and (len(x) > 1 or isinstance(next(iter(x), None), ARRAYS)):
        short = len(x) < SHORT and len(x) != count and all(isinstance(v, int | float | np.generic) for v in x)
        inner = [] if short else list(_parts(x, most))
        yield from [str(len(x)), *inner] if inner else []


def _parts(x: Any, most: int) -> Iterator[str]:
    """Yield texts that are the same in every process; nothing of objects, nor of what lies deep."""
    if isinstance(x, PurePath | str):
        yield str(x)
    elif isinstance(x, SCALARS):
        yield repr(x)
    elif isinstance(x, ARRAYS):
        yield from _rows(x)
    elif isinstance(x, LISTS):
        for i in _spread(len(x), most):
            yield from _parts(x[i], _less(most))
    elif isinstance(x, SETS):
        texts = ("\t".join(_parts(each, _less(most))) for each in x)
        yield from _parts(sorted(text for text in texts if text), most)
    elif isinstance(x, dict):
        pairs = sorted(((repr(key), key) for key in x if isinstance(key, SCALARS)), key=lambda pair: pair[0])
        yield from _parts([(text, x[key]) for text, key in pairs], most)


def _less(most: int) -> int:
    """Return how many entries of a list within a list of ``most`` are read."""
    return INNER if most > INNER else most // 4


def _spread(count: int, most: int) -> np.ndarray:
    return np.arange(count) if count <= most else np.linspace(0, count - 1, most).astype(np.int64)


def _rows(x: Any) -> list[str]:
    # Rows evenly spread: a whole data set in memory takes too long to hash.
    rows: Any = _spread(len(x), PROBES) if x.ndim else ...
    if isinstance(x, torch.Tensor):
        if x.layout != torch.strided or x.is_meta or x.is_quantized:
            return []
        rows = torch.as_tensor(rows, device=x.device) if x.ndim else ...
        chosen = x.detach()[rows].cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    else:
        chosen = np.ascontiguousarray(x[rows])
        if x.dtype.hasobject:
            return list(_parts(chosen.reshape(-1).tolist(), ENTRIES))
    return [f"{tuple(x.shape)} {x.dtype} {hashlib.sha256(chosen.tobytes()).hexdigest()}"]


def _look(x: Any) -> list:
    """Return, quickly, what is another value once ``x`` was shuffled."""
    return [id(x[i]) for i in _spread(len(x), PROBES)] if isinstance(x, list) else _rows(x)


def _entries(x: Any) -> int:
    return len(x) if isinstance(x, list) else x.numel() if isinstance(x, torch.Tensor) else x.size


def _sums(x: Any) -> Iterator[int]:
    """Yield sums that are the same in any order, the quickest first.

    A list or array that has one of them as before has the same entries.
    """
    if isinstance(x, list):
        # The same objects as before, in any order; equal objects made anew have equal hashes at least.
        yield sum(map(id, x))
        with suppress(TypeError):
            yield sum(map(hash, x))
        return
    if isinstance(x, torch.Tensor):
        if x.layout != torch.strided or x.is_meta or x.dtype == torch.bfloat16:
            return
        x = x.detach().cpu().numpy()
    if not x.dtype.hasobject:
        size = x.dtype.itemsize
        # Bits, not values: NaN and rounding would hide or fake a change.
        words = np.ascontiguousarray(x).reshape(-1).view(f"u{size}" if size in (1, 2, 4, 8) else "u1")
        yield int(words.sum(dtype=np.uint64))

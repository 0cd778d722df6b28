"""Hashes of a data set, to compare between ranks: its order may depend on a set, a folder or chance."""

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
ENTRIES, FEWER, INNER = 4096, 256, 16  # hashed entries of a list; while training; of a nested list
SHORT = 16  # shorter lists of numbers are taken for sizes, times or (rank, ranks), not for samples
LARGEST = 2**20  # entries; larger lists are not checked for shuffling
RANK_WORDS = ("cache", "memo", "rank")  # in names of attributes that may differ between ranks
SCALARS = (str, bytes, int, float, PurePath, np.generic)
LISTS = (list, tuple)
SETS = (set, frozenset)
ARRAYS = (np.ndarray, torch.Tensor)


def content(samples: Any) -> dict[str, str]:
    """Return hashes of all attributes readable without running user code: {"data: files": "0123456789ab; ..."}."""
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
    """A check whether a script has shuffled lists and arrays with an entry for each sample.

    A cache that a rank fills does not count as shuffled, because its entries change. A subset's indices are no cache.
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
        """Return {"data: files": a hash of the new order} for shuffled lists and arrays."""
        digests = {}
        for name, owner, attribute, first, sums in self._known:
            x = vars(owner).get(attribute)
            # Called at every comparison of weights, so whole lists are read only if a sample of 64 entries differs.
            look = _look(x) if isinstance(x, (list, *ARRAYS)) else first
            if look == first:
                continue
            if self._moved.get(name, (None,))[0] != look:
                same = isinstance(owner, data.Subset) or any(a == b for a, b in zip(_sums(x), sums, strict=False))
                self._moved[name] = look, _digest(x, len(x), FEWER) if same else ""
            if self._moved[name][1]:
                digests[name] = self._moved[name][1]
        return digests


def _within(samples: Any, name: str, visited: tuple[int, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Yield a data set and its nested ones, with names; not streams, whose attributes do not show their samples."""
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
    """Return a data set's (name, attribute) pairs; for a list or an array, the object itself."""
    if isinstance(owner, (*LISTS, *ARRAYS)):
        return [("", owner)]
    pairs = getattr(owner, "__dict__", {}).items()
    return [(f": {name}", x) for name, x in pairs if not any(word in name.lower() for word in RANK_WORDS)]


def _length(x: Any) -> int:
    with suppress(Exception):  # user code
        return len(x)
    return -1


def _digest(x: Any, count: int, most: int = ENTRIES) -> str:
    """Return a hash of ``x``; "" if it may differ between ranks. ``count``: the number of samples."""
    parts = list(_telling(x, count, most))
    folder = commonprefix([part for part in parts if "/" in part]).rpartition("/")[0]  # paths may differ between hosts
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
        for key in sorted((key for key in x if isinstance(key, SCALARS)), key=repr)[:most]:  # only nested containers
            inner = list(_telling(x[key], count, _less(most)))
            yield from [repr(key), *inner] if inner else []
    elif isinstance(x, ARRAYS):
        yield from _parts(x, most) if x.ndim and len(x) > 1 else ()
    elif isinstance(x, LISTS + SETS) and (len(x) > 1 or isinstance(next(iter(x), None), ARRAYS)):
        short = len(x) < SHORT and len(x) != count and all(isinstance(v, int | float | np.generic) for v in x)
        inner = [] if short else list(_parts(x, most))
        yield from [str(len(x)), *inner] if inner else []


def _parts(x: Any, most: int) -> Iterator[str]:
    """Yield texts of values that are the same in every process; objects and deep nesting are skipped."""
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
    """Return the limit for a nested list, given the outer list's."""
    return INNER if most > INNER else most // 4


def _spread(count: int, most: int) -> np.ndarray:
    return np.arange(count) if count <= most else np.linspace(0, count - 1, most).astype(np.int64)


def _rows(x: Any) -> list[str]:
    # Evenly spaced rows, because hashing all data would take too long.
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
    """Return a quick fingerprint of ``x`` that changes if it is shuffled."""
    return [id(x[i]) for i in _spread(len(x), PROBES)] if isinstance(x, list) else _rows(x)


def _entries(x: Any) -> int:
    return len(x) if isinstance(x, list) else x.numel() if isinstance(x, torch.Tensor) else x.size


def _sums(x: Any) -> Iterator[int]:
    """Yield checksums that do not depend on the order, the quickest first.

    If one of them is unchanged, the list or array has the same entries.
    """
    if isinstance(x, list):
        # By identity; equal objects that were recreated have at least equal hashes.
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

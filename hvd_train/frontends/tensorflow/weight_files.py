"""Read files of Keras' weights as HDF5. The model's description is not read, because it could name code."""

from __future__ import annotations

import io
import re
import zipfile
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar

import h5py
import numpy as np
from keras.src.saving import saving_lib
from keras.src.utils.naming import to_snake_case

from hvd_train.checkpoint.serialize import from_bfloat16
from hvd_train.errors import ConfigError

T = TypeVar("T")
SKIPPED = ("optimizer", "seed_generator")
NUMBERED = re.compile(r"(.+?)(?:_([1-9]\d*))?")  # as Keras names layers: dense, dense_1, ...
Layers = dict[str, tuple[str | None, dict[str, T]]]  # {path in the file: (name; None in older files, {number: weight})}


# ---- the layers of a file and of a model, by the paths under which Keras saves them


def _opened(path: Path) -> h5py.File:
    if path.suffix != ".keras":
        return h5py.File(path, "r")
    with zipfile.ZipFile(path) as archive:
        return h5py.File(io.BytesIO(archive.read("model.weights.h5")), "r")


def _kept(layers: Layers[T]) -> Layers[T]:
    return {place: layer for place, layer in layers.items() if not set(SKIPPED) & set(place.split("/"))}


def _of_file(opened: h5py.File) -> Layers[h5py.Dataset]:
    layers: Layers[h5py.Dataset] = {}

    def take(path: str, group: h5py.Group | h5py.Dataset) -> None:
        place, _, last = path.rpartition("/")
        if last == "vars" and isinstance(group, h5py.Group):
            layers[place] = group.attrs.get("name"), dict(group.items())

    opened.visititems(take)
    return _kept(layers)


class _Places(saving_lib.H5IOStore):
    """A stand-in for a file, which collects what a model would save under which path, without a copy."""

    def __init__(self) -> None:
        self.layers: Layers[Any] = {}

    def __bool__(self) -> bool:
        return True

    def make(self, path: str, metadata: dict[str, str] | None = None) -> dict[str, Any]:
        self.layers[path] = (metadata or {}).get("name"), {}
        return self.layers[path][1]


def _of_model(model: Any) -> Layers[Any]:
    store = _Places()
    saving_lib._save_state(model, store, None, "", set())
    return _kept(store.layers)


def _names(layers: Layers[Any]) -> dict[str, str]:
    """Return {path: name} of layers with weights. Layers with the same name get their paths as names, with dots."""
    names = {place: name or place.rpartition("/")[2] for place, (name, weights) in layers.items() if weights}
    several = Counter(names.values())
    return {p: p.replace("/", ".") if p and several[name] > 1 else name for p, name in names.items()}


def numbered(model: Any, known: Mapping[str, T]) -> dict[str, T]:
    """Rekey ``known`` from the variables' paths, with dots, to their names in Keras' files."""
    layers, names = _of_model(model), {}
    for place, layer in _names(layers).items():
        for number, v in layers[place][1].items():
            if (path := getattr(v, "path", "").replace("/", ".")) in known:
                names[f"{layer}.{number}"] = known[path]
    return names


# ---- which layer of the file is which of the model


def names_here(path: Path, model: Any, given: Callable[[str], bool], where: str) -> dict[str, str]:
    """Return {name in the file: name in this model; "": none}; ``given``: whether the user maps a name.

    Keras numbers the layers of a class across all models of a process: dense_1 of a file may be dense of this model.
    Raises ConfigError where numbers and paths contradict each other.
    """
    with _opened(path) as opened:
        file = {place: (name, dict.fromkeys(weights)) for place, (name, weights) in _of_file(opened).items()}
    layers = _of_model(model)
    there, here = _names(file), _names(layers)
    found, unsure = _paired(file, layers, _classes(model))
    names = {}
    for place, layer in there.items():
        other = found[place]
        for number in file[place][1]:
            name = f"{layer}.{number}"
            names[name] = f"{here[other]}.{number}" if other is not None and other in here else ""
            if unsure.get(place) in here and not given(name):
                pairs = {there[p]: here[q] for p, q in unsure.items() if p in there and q in here}
                raise _unsure(pairs, "place", where)
    return names


def _paired(file: Layers[Any], here: Layers[Any], automatic: set[str]) -> tuple[dict[str, str | None], dict[str, str]]:
    """Return {path in the file: path here, or None}, and the uncertain pairs, whose numbers differ.

    Names decide if no other model was built before. Otherwise paths do, if the numbers have the same order or a
    constant offset.
    """
    found: dict[str, str | None] = {"": ""}
    unsure: dict[str, str] = {}
    groups: dict[str, tuple[dict[str, int], dict[str, int]]] = defaultdict(lambda: ({}, {}))
    for side, layers in enumerate((file, here)):
        for place, (name, _) in layers.items():
            if place and name:
                base, number = _split(name, place, automatic)
                groups[base][side][place] = number
    found |= {place: place if place in here else None for place, (name, _) in file.items() if not name}
    both = [group for group in groups.values() if group[0]]
    for theirs, ours in sorted(both, key=lambda group: min(place.count("/") for place in group[0])):
        places = {place: _within(place, found) for place in theirs}
        shared = {place: there for place, there in places.items() if there in ours}
        numbers = [(theirs[place], ours[there]) for place, there in shared.items()]
        shift = min(theirs.values()) - min(ours.values()) if shared else 0
        same_layers = len(shared) == len(theirs) == len(ours) and _same_order(numbers)
        counted_on = all(a - b == shift for a, b in numbers) and (not shift or _from_zero(ours.values()))
        by_number = {number: place for place, number in ours.items()}
        named = {place: by_number.get(number) for place, number in theirs.items()}
        alone = _from_zero(theirs.values()) and _from_zero(ours.values())  # no other model was built before
        if alone and all(_within_same(place, there, found) for place, there in named.items()):
            found |= named
        elif same_layers or counted_on:
            found |= {place: shared.get(place) for place in theirs}
        else:
            found |= dict.fromkeys(theirs)
            unsure |= shared
    return found, unsure


def _split(name: str, place: str, automatic: set[str]) -> tuple[str, int]:
    """Return (class, number) of an automatic name, such as forward_lstm_1, and (name, 0) of others."""
    base, number = _numbered(name)
    classes = automatic | {_numbered(place.rpartition("/")[2])[0]}
    given = any(base == one or base.endswith(f"_{one}") for one in classes)
    return (base, number) if given else (name, 0)


def _numbered(name: str) -> tuple[str, int]:
    match = NUMBERED.fullmatch(name)
    return (match[1], int(match[2] or 0)) if match else (name, 0)


def _classes(model: Any) -> set[str]:
    """Return the names that Keras derives from the layers' classes."""
    return {to_snake_case(type(layer).__name__) for layer in model._flatten_layers()}


def _around(place: str, found: Collection[str]) -> str:
    """Return the path of the enclosing layer; "": the model."""
    while (place := place.rpartition("/")[0]) and place not in found:
        pass
    return place


def _within(place: str, found: Mapping[str, str | None]) -> str | None:
    """Return the path in the model that corresponds to ``place`` if its enclosing layer is matched, else None."""
    around = _around(place, found)
    there = found[around]
    return None if there is None else f"{there}{place.removeprefix(around)}"


def _within_same(place: str, there: str | None, found: Mapping[str, str | None]) -> bool:
    """Return whether ``there`` is inside the layer that matches the one around ``place``; True if unknown."""
    around = found[_around(place, found)]
    return not around or there is None or there.startswith(f"{around}/")


def _from_zero(numbers: Collection[int]) -> bool:
    return sorted(numbers) == list(range(len(numbers)))


def _same_order(pairs: list[tuple[int, int]]) -> bool:
    first, second = ({n: k for k, n in enumerate(sorted(set(side)))} for side in zip(*pairs, strict=True))
    return all(first[a] == second[b] for a, b in pairs)


def _unsure(pairs: Mapping[str, str], by: str, where: str) -> ConfigError:
    """Make the error for an ambiguous mapping; ``pairs``: {name in the file: name here} by path or by order."""
    first = next((old for old, new in pairs.items() if old != new), next(iter(pairs)))
    listed = ", ".join(f'"{old}.*": "{new}.*"' for old, new in pairs.items())
    what = "Keras has numbered the file's layers together with those of other models"
    what += f": {first} of the file stands where {pairs[first]} does here, and has another number"
    fix = f"say which layer is which; by their {by} it is model.init_from.rename: {{{listed}}}"
    return ConfigError(what, where=where, fix=fix)


# ---- checkpoints, which have no paths of layers


def paths_here(
    names: Collection[str], model: Any, known: Collection[str], given: Callable[[str], bool], where: str
) -> dict[str, str]:
    """Return {name in a checkpoint: name here} for automatic layer names that were numbered from another start.

    Names are paths of variables with dots. Raises ConfigError if the numbers do not identify the layers.
    """
    classes = _classes(model)
    theirs, ours = _numbers(names, classes), _numbers(known, classes)
    here: dict[str, dict[int, int]] = {}
    for base, numbers in theirs.items():
        if base in ours and numbers != ours[base] and not (_from_zero(numbers) and _from_zero(ours[base])):
            here[base] = dict(zip(sorted(numbers), sorted(ours[base]), strict=False))

    def renumbered(part: str) -> str:
        base, number = _split(part, "", classes)
        if base not in here:
            return part
        other = here[base].get(number)
        return f"unused.{part}" if other is None else f"{base}_{other}" if other else base

    found = {}
    for name in sorted(names):
        layer, _, last = name.rpartition(".")
        found[name] = ".".join([*map(renumbered, layer.split(".")), last])
    if set(found.values()) == set(known):
        return found
    others = {old: new for old, new in found.items() if old != new}
    if not all(given(name) for name in others):
        raise _unsure({old.rpartition(".")[0]: new.rpartition(".")[0] for old, new in others.items()}, "order", where)
    return {}


def _numbers(names: Collection[str], classes: set[str]) -> dict[str, set[int]]:
    """Return {layer name without its number: the numbers found} for all layers in these paths."""
    numbers: dict[str, set[int]] = defaultdict(set)
    for name in names:
        for part in name.split(".")[:-1]:
            base, number = _split(part, "", classes)
            numbers[base].add(number)
    return numbers


# ---- files


def _weights(path: Path) -> dict[str, dict[str, np.ndarray]]:
    """Return {'': {``LAYER.NUMBER``: array}}; the number is that of the variable in its layer."""
    arrays: dict[str, np.ndarray] = {}
    with _opened(path) as opened:
        layers = _of_file(opened)
        for place, layer in _names(layers).items():
            for number, x in layers[place][1].items():
                arrays[f"{layer}.{number}"] = np.asarray(x)
                if x.attrs.get("dtype") == "bfloat16":
                    arrays[f"{layer}.{number}"] = from_bfloat16(np.asarray(x))
    if not arrays:
        raise ValueError("it holds no weights as Keras 3 saves them")
    return {"": arrays}


WEIGHT_FILES = {".keras": _weights, ".weights.h5": _weights, ".h5": _weights}

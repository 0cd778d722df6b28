"""The state of layers besides variables: settings, vocabularies, statistics gathered by ``adapt``.

Each rank makes its own layers. If ``adapt`` saw only a rank's data, or a vocabulary is a ``list(set(...))``, the layers
differ, and equal weights mean different things. So all ranks get rank 0's state; other differences raise ConfigError.
"""

from __future__ import annotations

import hashlib
import json
import re
import types
import warnings
from typing import Any

import keras
import numpy as np
from keras.src.layers.preprocessing.index_lookup import IndexLookup

from hvd_train.core.agreement import agree, collectively
from hvd_train.errors import ConfigError, whole_reason
from hvd_train.frontends.user_model import finalizes
from hvd_train.protocol import Communicator

WHERE = "hk.distribute"
ADAPT_FIX = "adapt to all of the data on each rank, and sort words that come from a set"
ADAPTED = (IndexLookup, keras.layers.TextVectorization, keras.layers.Discretization)
SENT = ("vocabulary", "idf_weights", "vocabulary_size", "bin_boundaries")  # state that Keras stores as settings
MAY_DIFFER = ("name", "seed", "rank")  # settings that may differ: all ranks get rank 0's weights
ATTRIBUTES = re.compile("cache|memo|rank|seed|time|path|name|^built$")  # attributes of users' layers that may differ
SHORT = 60  # characters of a setting that a message shows


def agree_on_settings(model: Any, world: Communicator) -> None:
    """Raise ConfigError if layers' settings differ, and warn for users' attributes; on all ranks together."""
    layers = model._flatten_layers()
    # Rank 0's names: Keras numbers layers across all models of a process, so ranks may have other names.
    names = json.loads(world.broadcast_bytes(json.dumps([x.name for x in layers]).encode()))
    # The number first: the settings below are compared layer by layer.
    agree(world, {"layers of the model": f"{len(layers)}"})
    facts: dict[str, str] = {}
    for name, layer in zip(names, layers, strict=True):
        facts |= {f"layer {name}: {key}": value for key, value in _settings(layer).items()}
    agree(world, facts)
    digests = {f"{n}.{k}": v for n, layer in zip(names, layers, strict=True) for k, v in _attributes(layer).items()}
    everyone = [json.loads(part) for part in world.allgather_bytes(json.dumps(digests).encode())]
    differing = sorted(k for k in digests if len({each.get(k) for each in everyone}) > 1)
    if differing and world.rank == 0:
        what = f"attributes of layers differ between ranks and stay each rank's: {', '.join(differing)}"
        warnings.warn(f"{what} (make them equal on all ranks, or weights of the layer)", stacklevel=4)


class LayerStates:
    """This rank's states of a model's layers that are not variables."""

    def __init__(self, model: Any, world: Communicator) -> None:
        self._world = world
        kinds = (IndexLookup, keras.layers.Discretization, keras.layers.Normalization)
        self._layers = [x for x in model._flatten_layers() if isinstance(x, kinds)]
        texts = [x for x in model._flatten_layers() if isinstance(x, keras.layers.TextVectorization)]
        self._names = {id(x): x.name for x in self._layers} | {id(x._lookup_layer): x.name for x in texts}
        self._finalized = [x for x in model._flatten_layers() if finalizes(x)]
        self._read: dict[int, tuple[Any, Any]] = {}  # {id of a layer: (table, its vocabulary)}

    def finalize(self) -> None:
        """Let layers recompute their constants from the variables received from rank 0."""
        for layer in self._finalized:
            layer.finalize_state()

    def share(self, where: str) -> bool:
        """Give all ranks rank 0's states; return whether any differed. On all ranks together."""
        if not self._layers:
            return False
        # Compare hashes first: a vocabulary may have megabytes, and is mostly the same on all ranks.
        digests = [_digest(self._state(x)) for x in self._layers]
        everyone = [json.loads(part) for part in self._world.allgather_bytes(json.dumps(digests).encode(), "layers")]
        differing = [k for k, values in enumerate(zip(*everyone, strict=True)) if len(set(values)) > 1]
        if not differing:
            return False
        sent = {str(k): self._state(self._layers[k]) for k in differing} if self._world.rank == 0 else {}
        states = json.loads(self._world.broadcast_bytes(json.dumps(sent).encode()))

        def put() -> None:
            for k, state in states.items():
                if _digest(state) != digests[int(k)]:
                    layer = self._layers[int(k)]
                    _put(layer, self._names[id(layer)], state, where)

        collectively(self._world, put)
        if self._world.rank == 0:
            names = ", ".join(self._names[id(self._layers[k])] for k in differing)
            what = f"{names}: ranks had adapted to other data or had other words, and now have rank 0's state"
            warnings.warn(f"{what} ({ADAPT_FIX})", stacklevel=4)
        return True

    def _state(self, layer: Any) -> Any:
        if isinstance(layer, keras.layers.Normalization):
            # A given mean and variance are settings, and are compared as such.
            adapted = layer.built and layer.input_mean is None
            return {v.name: _plain(v) for v in (layer.adapt_mean, layer.adapt_variance)} if adapted else None
        if isinstance(layer, keras.layers.Discretization):
            return None if layer.bin_boundaries is None else _plain(layer.bin_boundaries)
        table = layer.lookup_table
        if self._read.get(id(layer), (None, None))[0] is not table:  # a changed vocabulary has a new table
            self._read[id(layer)] = (table, _plain(layer.get_vocabulary()) if int(table.size()) else None)
        words = self._read[id(layer)][1]
        weights = getattr(layer, "idf_weights_const", None)
        return words and [words, None if weights is None else _plain(weights)[: len(words)]]


def _put(layer: Any, name: str, state: Any, where: str) -> None:
    if state is None:
        raise ConfigError(f"{name} has no state on rank 0, and one on other ranks", where=where, fix=ADAPT_FIX)
    try:
        if isinstance(layer, keras.layers.Normalization):
            layer.adapt_mean.assign(state["mean"])
            layer.adapt_variance.assign(state["variance"])
            layer.finalize_state()
        elif isinstance(layer, keras.layers.Discretization):
            layer.bin_boundaries = state
        else:
            layer.set_vocabulary(*state)
    except (ValueError, RuntimeError) as error:
        what = f"{name} cannot take the state of rank 0: {whole_reason(error)}"
        raise ConfigError(what, where=where, fix=ADAPT_FIX) from error


def _is_users(layer: Any) -> bool:
    """Return whether the layer's class is the user's, not one of Keras."""
    return not type(layer).__module__.startswith("keras.")


def _plain(x: Any) -> Any:
    """Convert ``x`` to lists of Python's numbers or strings for JSON."""
    values = keras.ops.convert_to_numpy(x) if keras.ops.is_tensor(x) or isinstance(x, keras.Variable) else x
    return np.asarray(values.numpy() if hasattr(values, "numpy") else values).tolist()


def _digest(state: Any) -> str:
    return hashlib.sha256(json.dumps(state).encode()).hexdigest()


def _settings(layer: Any) -> dict[str, str]:
    """Return {name: value} of the layer's configuration, without what is in its weights or state."""
    if isinstance(layer, keras.layers.TorchModuleWrapper):  # its configuration is a pickle of the module's weights
        return {"module": repr(layer.module)}
    if isinstance(layer, keras.Model):  # its layers are compared one by one
        return {"class": type(layer).__name__}
    try:
        config = layer.get_config()
    except Exception:  # a class that cannot be saved has no configuration
        config = {}
    left_out = (*MAY_DIFFER, *(SENT if isinstance(layer, ADAPTED) else ()))
    shown = {k: v for k, v in config.items() if k not in left_out and "initializer" not in k}
    return {"class": type(layer).__name__} | {k: _short(json.dumps(comparable(v))) for k, v in shown.items()}


def _attributes(layer: Any) -> dict[str, str]:
    """Return {name: digest} of the numbers, strings and arrays in attributes of a user's layer."""
    if not _is_users(layer):
        return {}
    held = {k: comparable(v) for k, v in vars(layer).items() if not k.startswith("_") and not ATTRIBUTES.search(k)}
    return {k: _digest(v) for k, v in held.items() if v is not None}


def comparable(x: Any) -> Any:
    """Convert a value to JSON types for a comparison; None if it cannot be compared."""
    if x is None or isinstance(x, bool | int | float):
        return x
    if isinstance(x, str):
        return re.sub(r" at 0x[0-9a-f]+", "", x)
    if isinstance(x, bytes):
        return hashlib.sha256(x).hexdigest()
    if isinstance(x, dict):
        return {
            str(k): comparable(v) for k, v in x.items() if k not in (*MAY_DIFFER, "code")
        }  # code: of a lambda, with its file's path
    if isinstance(x, set | frozenset):
        return sorted(json.dumps(comparable(v)) for v in x)
    if isinstance(x, list | tuple):
        return [comparable(v) for v in x]
    if isinstance(x, types.FunctionType):
        # Compare a function's name, defaults and closure: its code has no comparable text.
        closed = [cell.cell_contents for cell in x.__closure__ or ()]
        return [x.__qualname__, comparable(x.__defaults__), comparable(closed)]
    if isinstance(x, keras.Variable):  # compared and sent as a weight
        return None
    if isinstance(x, np.ndarray | np.generic) or hasattr(x, "numpy") and hasattr(x, "dtype"):
        array = np.asarray(x.detach().cpu() if hasattr(x, "detach") else x.numpy() if hasattr(x, "numpy") else x)
        bits = repr(array.tolist()).encode() if array.dtype.hasobject else np.ascontiguousarray(array).tobytes()
        return [str(array.dtype), list(array.shape), hashlib.sha256(bits).hexdigest()]
    return None


def _short(text: str) -> str:
    if len(text) <= SHORT:
        return text
    return f"{text[:SHORT]}... ({hashlib.sha256(text.encode()).hexdigest()[:8]})"

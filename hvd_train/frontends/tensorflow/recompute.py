"""Activation checkpointing in TensorFlow (``model.recompute``): backward computes the outputs of layers again.

Not by ``keras.remat``: in its second pass layers draw other random numbers, and move running statistics again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import keras
import tensorflow as tf

from hvd_train.errors import ConfigError
from hvd_train.frontends.recompute import OTHER_VALUES, WHERE, WITHOUT, chosen
from hvd_train.frontends.tensorflow.variables import common_state, states

# Operations that draw other numbers each time, but StatefulPartitionedCall, which calls a function.
DRAWING = (
    "Random",
    "StatefulU",
    "StatefulS",
    "StatefulT",
    "StatefulR",
    "Rng",
    "Truncated",
    "Parameterized",
    "Multinomial",
)


@dataclass
class Passes:
    """What is being traced: a training step (``trains``), or its backward pass (``again``).

    ``raw``: {id of a variable of Keras: its variable of TensorFlow}.

    Within a layer of mixed precision a variable's value is a copy in 16 bits.
    """

    trains: bool = False
    again: bool = False
    raw: dict[int, Any] = field(default_factory=dict)


class _Again:
    """The call in training, mixed in before the layer's class: names, variables and evaluation do not change."""

    _passes: Passes

    def call(self, *inputs: Any, **named: Any) -> Any:
        plain, passes = super().call, self._passes  # type: ignore[misc]
        training = self._get_call_context().get_value("training")  # type: ignore[attr-defined]
        # A mask that travels with a tensor would not reach the second pass.
        masked = any(getattr(x, "_keras_mask", None) is not None for x in tf.nest.flatten((inputs, named)))
        if passes.again or masked or not (passes.trains and training):
            return plain(*inputs, **named)
        return again(plain, self, passes, inputs, named)


def again(call: Callable[..., Any], layer: Any, passes: Passes, inputs: Any, named: Any) -> Any:
    """Return the outputs of ``call``, of a layer; their gradient calls the layer a second time.

    The second time it begins with the same states: of random generators, and what it changes itself.
    """
    states = [passes.raw[id(v)] for v in _states(layer)]
    trained = [passes.raw[id(v)] for v in layer.trainable_variables]
    leaves = tf.nest.flatten((inputs, named))
    places = [i for i, x in enumerate(leaves) if tf.is_tensor(x)]
    structure: list[Any] = []

    def computed(call: Callable[..., Any], tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        filled = list(leaves)
        for i, x in zip(places, tensors, strict=True):
            filled[i] = x
        given, more = tf.nest.pack_sequence_as((inputs, named), filled)
        structure[:] = [call(*given, **more)]
        return [tf.convert_to_tensor(x) for x in tf.nest.flatten(structure[0])]

    def second(*given: Any, training: Any = None, **more: Any) -> Any:
        return layer(*given, **more, training=True)  # with Keras' contexts, which have ended

    @tf.custom_gradient
    def run(*tensors: tf.Tensor) -> Any:
        graph = tf.compat.v1.get_default_graph()
        count = len(graph.get_operations())
        first = [tf.identity(v) for v in states]
        outputs = computed(call, tensors)
        if any(op.type.startswith(DRAWING) for op in graph.get_operations()[count:]):
            raise ConfigError(f"layer {layer.name} {OTHER_VALUES}", where=WHERE, fix=f"take keras.random, or {WITHOUT}")

        def backward(*upstream: tf.Tensor, variables: Sequence[Any] = ()) -> Any:
            # Otherwise TensorFlow would take the two passes for one, and keep its activations.
            with tf.control_dependencies(upstream):
                given = [tf.identity(x) for x in tensors]
                last = [tf.identity(v) for v in states]
            for v, x in zip(states, first, strict=True):
                v.assign(x)
            floating = [x for x in given if x.dtype.is_floating]
            passes.again = True
            with tf.GradientTape(watch_accessed_variables=False) as tape:
                tape.watch([floating, trained])
                repeated = computed(second, given)
            passes.again = False
            for v, x in zip(states, last, strict=True):
                v.assign(x)
            none = tf.UnconnectedGradients.ZERO
            gradients = tape.gradient(repeated, [floating, trained], list(upstream), unconnected_gradients=none)
            of_inputs = iter(gradients[0])
            own = {id(v): g for v, g in zip(trained, gradients[1], strict=True)}
            return [next(of_inputs) if x.dtype.is_floating else None for x in given], [own[id(v)] for v in variables]

        return outputs, backward

    flat = run(*(leaves[i] for i in places))
    return tf.nest.pack_sequence_as(structure[0], tf.nest.flatten(flat))


def _states(layer: Any) -> list[Any]:
    """Return the variables that a call of a layer may change: not weights that are frozen."""
    own = [v for one in layer._flatten_layers() for v in one._non_trainable_variables]
    return [*{id(v): v for v in (*own, *states(layer), common_state())}.values()]


def take(model: keras.Model, patterns: Sequence[str] | bool, blocks: Sequence[Any], passes: Passes) -> list[str]:
    """Run the layers that ``patterns`` match (True: ``blocks``, or repeated layers) again in backward.

    The layers get another class. Returns their names. Raises ConfigError if there are none.
    """
    passes.raw |= {id(v): v.value for v in (*model.variables, common_state())}
    layers = dict(_named(model))
    if patterns is True and blocks:
        layers |= {block.name: block for block in blocks}
    names = chosen(layers, patterns, [block.name for block in blocks] or _repeated(layers))
    for name in names:
        layer, kind = layers[name], type(layers[name])
        if isinstance(layer, _Again):
            kind._passes = passes  # of an earlier training
        else:
            layer.__class__ = type(kind.__name__, (_Again, kind), {"_passes": passes, "__module__": kind.__module__})
    return names


def _named(layer: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted name, layer) of each layer: ``outer.inner``."""
    for one in layer._layers:
        yield (name := f"{prefix}{one.name}"), one
        yield from _named(one, f"{name}.")


def _repeated(layers: dict[str, Any]) -> list[str]:
    """Return the names of layers with layers of their own, of which there are several of a class."""
    kinds = {name: type(x).__mro__[2] if isinstance(x, _Again) else type(x) for name, x in layers.items()}
    blocks = {name: kind for name, kind in kinds.items() if layers[name]._layers}
    classes = Counter(blocks.values())
    return [name for name, kind in blocks.items() if classes[kind] > 1]

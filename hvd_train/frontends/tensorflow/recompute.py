"""Layers whose activations are not kept for backward, which runs them again (``model.recompute``), in TensorFlow.

Not by ``keras.remat``: in its second pass layers draw other random numbers, and move running statistics again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from hvd_train.frontends.recompute import chosen
from hvd_train.frontends.tensorflow.batchnorm import Context
from hvd_train.frontends.tensorflow.variables import common_state, states


class _Again:
    """The call in training, mixed in before the layer's class: names, variables and evaluation do not change."""

    _norms: Context

    def call(self, *inputs: Any, **named: Any) -> Any:
        plain = super().call  # type: ignore[misc]
        if self._norms.again or not self._norms.trains:
            return plain(*inputs, **named)
        return again(plain, self, self._norms, inputs, named)


def again(call: Callable[..., Any], layer: Any, norms: Context, inputs: Any, named: Any) -> Any:
    """Return the outputs of ``call``, of a layer; their gradient calls the layer a second time.

    The second time it draws the same random numbers.
    """
    drawn = [v.value for v in (*states(layer), common_state())]
    trained = [v.value for v in layer.trainable_variables]
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
        first = [tf.identity(v) for v in drawn]
        outputs = computed(call, tensors)

        def backward(*upstream: tf.Tensor, variables: Sequence[Any] = ()) -> Any:
            # Otherwise TensorFlow would take the two passes for one, and keep its activations.
            with tf.control_dependencies(upstream):
                given = [tf.identity(x) for x in tensors]
                last = [tf.identity(v) for v in drawn]
            for v, x in zip(drawn, first, strict=True):
                v.assign(x)
            floating = [x for x in given if x.dtype.is_floating]
            norms.again = True
            with tf.GradientTape(watch_accessed_variables=False) as tape:
                tape.watch([floating, trained])
                repeated = computed(second, given)
            norms.again = False
            for v, x in zip(drawn, last, strict=True):
                v.assign(x)
            none = tf.UnconnectedGradients.ZERO
            gradients = tape.gradient(repeated, [floating, trained], list(upstream), unconnected_gradients=none)
            of_inputs = iter(gradients[0])
            own = {id(v): g for v, g in zip(trained, gradients[1], strict=True)}
            return [next(of_inputs) if x.dtype.is_floating else None for x in given], [
                own.get(id(v)) for v in variables
            ]

        return outputs, backward

    flat = run(*(leaves[i] for i in places))
    return tf.nest.pack_sequence_as(structure[0], tf.nest.flatten(flat))


def take(model: keras.Model, patterns: Sequence[str] | bool, blocks: Sequence[Any], norms: Context) -> list[str]:
    """Run the layers that ``patterns`` match (True: ``blocks``, or repeated layers) again in backward.

    The layers get another class. Returns their names. Raises ConfigError if there are none.
    """
    layers = dict(_named(model))
    if patterns is True and blocks:
        layers |= {block.name: block for block in blocks}
    names = chosen(layers, patterns, [block.name for block in blocks] or _repeated(layers))
    for name in names:
        layer, kind = layers[name], type(layers[name])
        if isinstance(layer, _Again):
            kind._norms = norms  # of an earlier training
        else:
            layer.__class__ = type(kind.__name__, (_Again, kind), {"_norms": norms, "__module__": kind.__module__})
    return names


def _named(layer: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (name with the names of the layers around it, layer)."""
    for one in layer._layers:
        if not isinstance(one, keras.layers.BatchNormalization):
            yield (name := f"{prefix}{one.name}"), one
            yield from _named(one, f"{name}.")


def _repeated(layers: dict[str, Any]) -> list[str]:
    """Return the names of layers with layers of their own, of which there are several of a class."""
    blocks = {name: type(layer) for name, layer in layers.items() if layer._layers}
    classes = Counter(blocks.values())
    return [name for name, kind in blocks.items() if classes[kind] > 1]

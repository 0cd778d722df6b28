"""Graphs of TensorFlow, and the time that they wait for transfers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf


def graph(function: Callable, **options: Any) -> Any:
    """Make a ``tf.function`` that is traced as it stands, as Keras traces a model."""
    # AutoGraph, which would rewrite our ``if`` and ``for``, takes 0.6 of the time of a trace.
    return tf.function(function, autograph=False, **options)


def seconds_waited() -> tf.Variable:
    """Make the variable in which ``awaited`` counts."""
    with tf.device("/CPU:0"):
        return tf.Variable(0.0, trainable=False, dtype=tf.float64)


def awaited(waits: tf.Variable, gradients: Sequence[Any], transfer: Callable[[], Any]) -> Any:
    """Run ``transfer`` in a graph; ``waits`` counts the seconds from the last gradient to its end."""
    with tf.device("/CPU:0"), tf.control_dependencies(gradients):
        began = tf.timestamp()
    result = transfer()
    with tf.device("/CPU:0"), tf.control_dependencies(tf.nest.flatten(result)):
        waits.assign_add(tf.timestamp() - began)
    return result

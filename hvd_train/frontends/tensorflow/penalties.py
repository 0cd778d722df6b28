"""Losses of the regularizers of Keras' layers."""

from __future__ import annotations

import keras
import tensorflow as tf

from hvd_train.errors import ConfigError


def penalty(model: keras.Model, share: tf.Tensor, where: str) -> tf.Tensor | float:
    """Return the regularizers' losses times ``share``. A step's shares (ranks, micro-batches) add up to 1."""
    penalties = model._get_regularization_losses()
    if len(model.losses) > len(penalties):  # add_loss or an activity regularizer: a sum or a mean, perhaps over padding
        what = "the model adds a loss of its own (add_loss, an activity regularizer), which cannot be shared out"
        fix = "give what it is taken from as an output, and a loss of your own of all outputs"
        raise ConfigError(what, where=where, fix=fix)
    return tf.stop_gradient(share) * tf.cast(tf.add_n(penalties), share.dtype) if penalties else 0.0

"""A Keras optimizer of the user, run on Keras' variables in the traced step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvd_train.config import OptimConfig
from hvd_train.errors import ConfigError
from hvd_train.frontends.named_arrays import TensorLayout
from hvd_train.frontends.tensorflow.optimizers import BucketWeights, VariableOptimizer, view
from hvd_train.frontends.user_optimizer import build_optimizer

PREFIX = "slots/keras"


class UserOptimizer(BucketWeights):
    """``optim.name: package.module:function``. The schedule sets the learning rate.

    A checkpoint has its variables in order: ``slots/keras/NUMBER.PATH``.
    """

    def __init__(
        self,
        options: OptimConfig,
        trainable: Mapping[str, Any],
        layouts: Mapping[str, TensorLayout],
        from_buckets: Callable[[Sequence[tf.Tensor]], list[tf.Tensor]],
        buckets: Sequence[Sequence[int]],
    ) -> None:
        where = f"optim.name: {options.name}"
        self._from_buckets, self._buckets, self._weights = from_buckets, buckets, list(trainable.values())
        names = [layouts[path].name for path in trainable]
        self.optimizer = build_optimizer(options, self._weights, names, keras.optimizers.Optimizer)
        rate = getattr(self.optimizer, "_learning_rate", None)
        if not isinstance(rate, keras.Variable):
            what = f"the optimizer's learning rate is a {type(rate).__name__}"
            raise ConfigError(what, where=where, fix="give it a number, which optim.schedule then sets")
        self._check_fit_only(where)
        self.optimizer.build(self._weights)
        self._kept = {
            f"{PREFIX}/{number:04d}.{v.path.replace('/', '.')}": v
            for number, v in enumerate(self.optimizer.variables)
            if v is not rate
        }
        self._check_state(where)

    def _check_fit_only(self, where: str) -> None:
        """Reject options that only Keras' ``fit`` supports: loss scaling, and averages of the weights."""
        kind, factor = type(self.optimizer).__name__, self.optimizer.loss_scale_factor
        if self.optimizer.use_ema:
            what = f"use_ema of {kind} would end with the weights and not with their mean"
            raise ConfigError(what, where=where, fix="set ema.decay instead")
        if factor is not None:
            what = f"loss_scale_factor of {kind} would divide gradients by {factor}, and the loss is not multiplied"
            raise ConfigError(what, where=where, fix="leave it out; precision: 16-mixed scales the loss")

    def _check_state(self, where: str) -> None:
        """Reject an optimizer that wraps another one, or has a variable that Keras does not list."""
        known = {id(v.value) for v in self.optimizer.variables}
        # TensorFlow stores the same objects again under names that begin with _self_.
        for name, x in vars(self.optimizer).items():
            if name.startswith("_self_"):
                continue
            listed = x.values() if isinstance(x, dict) else x if isinstance(x, list | tuple) else [x]
            kind = type(self.optimizer).__name__
            if any(isinstance(y, tf.Variable) and id(y) not in known for y in listed):
                what = f"'{name}' of {kind} is a variable that no checkpoint would have"
                raise ConfigError(what, where=where, fix="make it with add_variable")
            if any(isinstance(y, keras.optimizers.Optimizer) for y in listed):
                what = f"'{name}' of {kind} is an optimizer with slots and rates of its own"
                raise ConfigError(what, where=where, fix="give an optimizer that moves the weights itself")

    def step(self, gradients: Sequence[tf.Tensor], learning_rate: tf.Tensor) -> None:
        rate = self.optimizer._learning_rate
        rate.assign(tf.cast(learning_rate, rate.dtype))
        self.optimizer.apply(self._from_buckets(gradients), self._weights)

    def views(self) -> Iterator[tuple[str, Callable[[], np.ndarray]]]:
        for key, v in self._kept.items():
            yield key, partial(view, v.value)

    def load(self, tree: Mapping[str, np.ndarray]) -> None:
        """Assign slots by these names; others do not change."""
        for key, v in self._kept.items():
            if key in tree:
                v.assign(np.asarray(tree[key]).astype(v.dtype))


def variable_optimizer(options: OptimConfig, *arguments: Any) -> VariableOptimizer | UserOptimizer:
    """Make the optimizer that ``optim.name`` names."""
    return (UserOptimizer if options.is_users else VariableOptimizer)(options, *arguments)

"""The losses of ``compile`` over a step's samples that lie on several ranks.

Law: what a rank's loss gives, weighted by its share of the step's samples, adds up over the ranks to the loss of all
of them, be it a mean over samples, over unmasked places, by weights, or a sum. Gradients are weighted like that, and
logs, so both come out as those of one process. A plain mean needs nothing for it, and costs nothing.
"""

from __future__ import annotations

import json
import warnings
from typing import Any

import keras

from hvd_train.attach.keras_exchange import Changes, Reduction
from hvd_train.errors import ConfigError
from hvd_train.protocol import Communicator

TOGETHER = (keras.losses.dice, keras.losses.tversky, keras.losses.circle)  # Keras' own that compare samples of a batch
SAMPLES = 8  # that show what a loss of the user's own is
FOUND = ("unknown", "mean", "sum", "neither")  # from the least certain on


class _Ones(keras.losses.Loss):
    """The sum of the weights and masks by which Keras multiplies ``values``."""

    def __init__(self, values: Any) -> None:
        super().__init__(reduction="sum", dtype=keras.backend.standardize_dtype(values.dtype))
        self._values = values

    def call(self, y_true: Any, y_pred: Any) -> Any:
        ones, mask = keras.ops.ones_like(self._values), _mask(self._values)
        return ones if mask is None else ones * keras.ops.cast(mask, ones.dtype)


class Shared:
    """Stands for a loss of ``compile``. ``kind``: what it is over samples, as ``probe`` finds."""

    def __init__(self, loss: Any, reduction: Reduction) -> None:
        self.loss, self.kind, self.probing = loss, "mean", False
        self._reduction = reduction

    def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        values, value = self._observed(y_true, y_pred, sample_weight)
        opaque = values is None or tuple(values.shape) == ()
        if self.probing:
            masked = not opaque and (_mask(y_pred) is not None or _mask(values) is not None)
            weights = None if self.loss.reduction == "mean_with_sample_weight" else sample_weight
            self.kind = "mean" if masked else _kind(self.loss, y_true, y_pred, weights)
        summed = self.kind == "sum" if opaque else self.loss.reduction == "sum"
        if self._reduction.count is None:  # outside of a training step
            return self._reduction.scored(value) if summed else value
        if summed:
            return self._reduction.whole(value)
        if opaque:
            return value
        weights = sample_weight if self.loss.reduction == "mean_with_sample_weight" else None
        if weights is None and _mask(y_pred) is None and _mask(values) is None:
            return value
        return self._reduction.whole(value, _Ones(values)(y_true, y_pred, weights))

    def _observed(self, *batch: Any) -> tuple[Any, Any]:
        """(what the loss has before Keras reduces it, or None where it reduces by itself; what it gives)."""
        seen: list[Any] = []
        call = self.loss.call

        def observed(*args: Any) -> Any:
            seen.append(call(*args))
            return seen[-1]

        self.loss.call = observed
        try:
            value = self.loss(*batch)
        finally:
            del self.loss.call
        return (seen[0] if len(seen) == 1 else None), value


def share_losses(model: Any, reduction: Reduction, changes: Changes) -> None:
    """Puts ``Shared`` in place of the model's losses."""
    owner = model._compile_loss
    if owner is None:
        return

    def put() -> None:
        owner._flat_losses = [entry._replace(loss=Shared(entry.loss, reduction)) for entry in owner._flat_losses]

    def take_back() -> None:
        if owner.built:
            owner._flat_losses = [entry._replace(loss=entry.loss.loss) for entry in owner._flat_losses]

    build = owner.build

    def built(*args: Any) -> None:
        build(*args)
        put()

    changes.put(owner, "build", built)  # Keras calls it with the first batch
    changes.on_undo(take_back)
    if owner.built:
        put()


def check(model: Any) -> None:
    """Raises ConfigError for a loss that no rank can take by itself."""
    for loss in keras.tree.flatten(getattr(model._compile_loss, "_user_loss", None)):
        if isinstance(loss, keras.losses.Loss) and loss.reduction in (None, "none") and not _own_step(model):
            what = f"the loss {loss.name} has reduction=None, so that it is a vector"
            raise ConfigError(what, where="hk.distribute", fix='give it reduction="sum_over_batch_size" or "sum"')


def needs_probe(model: Any) -> bool:
    """Whether there are losses that may be no mean over samples: the user's own functions or classes, some of Keras."""
    found = keras.tree.flatten(getattr(model._compile_loss, "_user_loss", None))
    found = [keras.losses.get(x) if isinstance(x, str) else x for x in found]
    kinds = [getattr(x, "fn", x if callable(x) and not isinstance(x, keras.losses.Loss) else type(x)) for x in found]
    strange = [k for k in kinds if not str(getattr(k, "__module__", "")).startswith(("keras.", "builtins"))]
    return bool(strange) or any(kind in TOGETHER for kind in kinds)


def probe(model: Any, batch: Any, world: Communicator) -> None:
    """Finds by trying on samples of ``batch`` whether losses are means or sums over samples; on all ranks. What is
    neither is told by a warning on rank 0."""
    x, y, weight = keras.utils.unpack_x_y_sample_weight(
        keras.tree.map_structure(lambda a: None if a is None else keras.ops.convert_to_tensor(a[:SAMPLES]), batch)
    )
    owner = model._compile_loss
    predicted = model(x, training=False) if model._call_has_training_arg else model(x)
    owner(y, predicted, weight)  # built, at the latest now
    losses = [entry.loss for entry in owner._flat_losses]
    for loss in losses:
        loss.probing = True
    try:
        owner(y, predicted, weight)
    finally:
        for loss in losses:
            loss.probing = False
    everyone = [json.loads(part) for part in world.allgather_bytes(json.dumps([s.kind for s in losses]).encode())]
    for loss, kinds in zip(losses, zip(*everyone, strict=True), strict=True):
        loss.kind = max(kinds, key=FOUND.index)
        if {"mean", "sum"} <= set(kinds):
            loss.kind = "neither"
        if loss.kind == "neither" and world.rank == 0:
            warnings.warn(
                f"the loss {loss.loss.name} is neither a mean nor a sum over samples: each rank takes it over its own, "
                "which is not the loss of all of them (return one value a sample to have their mean)",
                stacklevel=2,
            )


def _kind(loss: Any, *batch: Any) -> str:
    """What ``loss`` is by its values on a whole batch and on two parts of it."""
    count = int(next(leaf for leaf in keras.tree.flatten(batch) if leaf is not None).shape[0])
    if count < 2:
        return "unknown"
    at = count // 2 + (count > 2)  # parts of unequal lengths

    def part(rows: slice) -> float:
        return float(keras.ops.sum(loss(*keras.tree.map_structure(lambda a: None if a is None else a[rows], batch))))

    whole = loss(*batch)
    try:
        first, last, both = part(slice(0, at)), part(slice(at, None)), float(keras.ops.sum(whole))
    except Exception:  # pairs of samples, a batch of a fixed length
        return "neither"
    # On PyTorch Keras 3.15 takes some losses in 32 bits, whatever their type is afterwards.
    bound = (1e-2 if "16" in keras.backend.standardize_dtype(whole.dtype) else 1e-5) * (abs(first) + abs(last))
    if not abs(both) + abs(first) + abs(last) > 0:
        return "unknown"
    if abs(both - (at * first + (count - at) * last) / count) <= bound:
        return "mean"
    return "sum" if abs(both - first - last) <= bound else "neither"


def _mask(x: Any) -> Any:
    return getattr(x, "_keras_mask", None)


def _own_step(model: Any) -> bool:
    return not str(getattr(type(model).train_step, "__module__", "")).startswith("keras.")

"""The losses of ``compile`` for a step whose samples are on several ranks.

Law: the ranks' losses, weighted by their shares of the step's samples, add up to the loss over all of them, whether it
is a mean over samples, over unmasked positions, by weights, or a sum. Gradients and logs have the same weights, so both
are those of one process. A plain mean needs no correction, and costs nothing.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import keras
import numpy as np

from hvd_train.errors import ConfigError
from hvd_train.launch.environment import world
from hvd_train.protocol import Communicator
from hvd_train.script.keras.gradients import Reduction
from hvd_train.script.keras.patches import Patches

TOGETHER = (keras.losses.dice, keras.losses.tversky, keras.losses.circle)  # these compare samples of a batch
SAMPLES = 64  # of a batch, to classify losses
KINDS = ("unknown", "mean", "sum", "neither")  # in order of certainty


class _Ones(keras.losses.Loss):
    """The sum of the weights and masks by which Keras multiplies ``values``."""

    def __init__(self, values: Any) -> None:
        super().__init__(reduction="sum", dtype=keras.backend.standardize_dtype(values.dtype))
        self._values = values

    def call(self, y_true: Any, y_pred: Any) -> Any:
        ones, mask = keras.ops.ones_like(self._values), _mask(self._values)
        return ones if mask is None else ones * keras.ops.cast(mask, ones.dtype)


class DistributedLoss:
    """Replaces a loss of ``compile``. ``kind``: how it combines samples, as found by ``probe``."""

    def __init__(self, loss: Any, reduction: Reduction) -> None:
        self.loss, self.kind, self.probing = loss, "mean", False
        self.opaque = False  # whether the loss reduces by itself, so that ``kind`` matters
        self.reduces = False  # whether it gives other values than one for each sample, as found by ``probe``
        self._reduction, self._warned, self._told = reduction, False, False

    def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        values, value = self._observed(y_true, y_pred, sample_weight)
        if self.probing:
            self.reduces = not of_samples(values, y_true)
        # A number, values of no samples, or values that we cannot observe: the loss has reduced them itself.
        self.opaque = opaque = values is None or tuple(values.shape) == () or self.reduces
        if opaque and self._reduction.unprobed and not self._told and world().rank == 0:
            self._told = True
            what = f"the loss {self.loss.name} gives one number for a batch: it is taken as the mean over its samples"
            warnings.warn(f"{what}, so a sum would come out wrong (return one value per sample)", stacklevel=2)
        masked = not opaque and (_mask(y_pred) is not None or _mask(values) is not None)
        by_weight = self.loss.reduction == "mean_with_sample_weight"
        if self.probing:
            self.kind = self._kind(masked, y_true, y_pred, None if by_weight else sample_weight)
        summed = self.kind == "sum" if opaque else self.loss.reduction == "sum"
        weights = sample_weight if by_weight else None
        if not summed and (opaque or weights is None and not masked):
            return value
        weight = None if summed else _Ones(values)(y_true, y_pred, _copied(weights))
        if self._reduction.count is not None:
            return self._reduction.whole(value, weight)
        if self._reduction.window.samples is None:  # outside of a step
            return value
        if not summed:
            self._warn()
        return self._reduction.window.loss(value, weight)

    def _kind(self, masked: bool, *batch: Any) -> str:
        def loss(*part: Any) -> Any:
            with _states_kept([self.loss]):  # one that counts its calls must not change from part to part
                return self.loss(*part)

        if not masked:
            return kind_over_samples(loss, *batch)
        # A mean over unmasked positions. Their number differs, so check that the sum adds up over samples.
        reduction, self.loss.reduction = self.loss.reduction, "sum"
        try:
            kind = kind_over_samples(loss, *batch)
        finally:
            self.loss.reduction = reduction
        return {"sum": "mean", "unknown": "unknown"}.get(kind, "neither")

    def _warn(self) -> None:
        """Warn if ranks score batches that are not parts of global ones."""
        if not self._reduction.window.whole and not self._warned and world().rank == 0:
            what = "is a mean over unmasked or weighted positions of each rank's batches"
            warnings.warn(f"evaluation: the loss {self.loss.name} {what}: one process has other batches", stacklevel=2)
        self._warned = True

    def _observed(self, *given: Any) -> tuple[Any, Any]:
        """Return (the loss' unreduced values, None if it reduces by itself; its result)."""
        *batch, weights = given
        unreduced: list[Any] = []
        call = self.loss.call

        def observed(*args: Any) -> Any:
            unreduced.append(call(*args))
            return unreduced[-1]

        # Set on the instance, so that deleting it restores the class' ``call``.
        self.loss.call = observed
        try:
            value = self.loss(*batch, _copied(weights))
        finally:
            del self.loss.call
        return (unreduced[0] if len(unreduced) == 1 else None), value


def _copied(weights: Any) -> Any:
    """Return a copy of sample weights: on PyTorch a masked loss of Keras 3.15 scales them in place, before metrics."""
    return weights if weights is None or keras.backend.backend() != "torch" else keras.ops.copy(weights)


def share_losses(model: Any, reduction: Reduction, patches: Patches) -> None:
    """Replace the model's losses by ``DistributedLoss``."""
    owner = model._compile_loss
    if owner is None:
        return

    def put() -> None:
        owner._flat_losses = [
            entry._replace(loss=DistributedLoss(entry.loss, reduction)) for entry in owner._flat_losses
        ]

    def take_back() -> None:
        if owner.built:
            owner._flat_losses = [entry._replace(loss=entry.loss.loss) for entry in owner._flat_losses]

    build = owner.build

    def built(*args: Any) -> None:
        build(*args)
        put()

    patches.put(owner, "build", built)  # Keras calls it with the first batch
    patches.on_undo(take_back)
    if owner.built:
        put()


def check(model: Any) -> None:
    """Raise ConfigError for a loss that cannot be computed rank by rank."""
    for loss in keras.tree.flatten(getattr(model._compile_loss, "_user_loss", None)):
        if isinstance(loss, keras.losses.Loss) and loss.reduction in (None, "none") and not _has_user_step(model):
            what = f"the loss {loss.name} has reduction=None, so that it is a vector"
            raise ConfigError(what, where="hk.distribute", fix='give it reduction="sum_over_batch_size" or "sum"')


def uncut(model: Any) -> bool:
    """Return whether an evaluation's loss depends on batch boundaries: a sum, a weighted or a masked mean."""
    owner = model._compile_loss
    built = owner is not None and owner.built
    losses = [entry.loss for entry in owner._flat_losses] if built else []
    # Keras builds them in the first batch; before, use the arguments of ``compile``.
    all_losses = [x.loss for x in losses] or keras.tree.flatten(getattr(owner, "_user_loss", None))
    reductions = {getattr(x, "reduction", None) for x in all_losses}
    return (
        bool(reductions & {"sum", "mean_with_sample_weight"})
        or any(x.kind == "sum" for x in losses)
        or any(getattr(x, "ignore_class", None) is not None for x in all_losses)
        or any(map(_masks, model._flatten_layers()))
    )


def _masks(layer: Any) -> bool:
    """Return whether the layer may make a mask: all but the layers of Keras that only pass one on."""
    user_mask = not type(layer).compute_mask.__module__.startswith("keras.")
    return user_mask or getattr(layer, "mask_zero", False) or isinstance(layer, keras.layers.Masking)


def needs_probe(model: Any) -> bool:
    """Return whether some losses may not be means over samples: the user's, and some of Keras."""
    user_losses = keras.tree.flatten(getattr(model._compile_loss, "_user_loss", None))
    user_losses = [keras.losses.get(x) if isinstance(x, str) else x for x in user_losses]
    kinds = [
        getattr(x, "fn", type(x) if isinstance(x, keras.losses.Loss) or not callable(x) else x) for x in user_losses
    ]
    strange = [k for k in kinds if not str(getattr(k, "__module__", "")).startswith(("keras.", "builtins"))]
    together = any(
        kind in TOGETHER or getattr(x, "_fn_kwargs", {}).get("axis") == 0
        for kind, x in zip(kinds, user_losses, strict=True)
    )
    return bool(strange) or together


def of_samples(values: Any, labels: Any) -> bool:
    """Return whether a loss or a metric has returned a value for each sample, rather than a few for the whole batch."""
    first = next((x for x in keras.tree.flatten(labels) if hasattr(x, "shape")), None)
    if values is None or first is None or not len(values.shape) or not len(first.shape):
        return True
    return None in (values.shape[0], first.shape[0]) or values.shape[0] == first.shape[0]


def probe(model: Any, batch: Any, communicator: Communicator, unprobed: Callable[[], None]) -> Any:
    """Find out on samples of ``batch`` whether losses are means or sums over samples; on all ranks together.

    Rank 0 warns of a loss that is neither. Returns these samples' labels, predictions and weights; None if it was not
    possible, as a ``train_step`` of the user's gives the loss something else. ``unprobed`` is called in this case.
    """
    x, y, weight = keras.utils.unpack_x_y_sample_weight(
        keras.tree.map_structure(lambda a: None if a is None else keras.ops.convert_to_tensor(a[:SAMPLES]), batch)
    )
    owner, losses, found = model._compile_loss, [], None
    given = keras.tree.flatten(getattr(owner, "_user_loss", None))
    if not (y is None and _has_user_step(model)):
        # What is wrong with the user's model or loss, the first step tells.
        with suppress(Exception), _states_kept(given):
            # Layers may count their calls, or keep a state: this call must not change them.
            with keras.StatelessScope():
                predicted = model(x, training=False) if model._call_has_training_arg else model(x)
            losses = [] if owner is None else _classified(owner, y, predicted, weight)
            found = y, predicted, weight
    kinds = None if found is None else [loss.kind for loss in losses]
    everyone = [json.loads(part) for part in communicator.allgather_bytes(json.dumps(kinds).encode())]
    if None in everyone:
        unprobed()
        return None
    for loss, of_ranks in zip(losses, zip(*everyone, strict=True), strict=True):
        loss.kind = agreed(of_ranks)
        if loss.kind == "neither" and communicator.rank == 0:
            what = f"the loss {loss.loss.name} is neither a mean nor a sum over samples: ranks compute it for their own"
            fix = "return one value per sample to get their mean"
            warnings.warn(f"{what}, so it is not the loss of the global batch ({fix})", stacklevel=2)
        if loss.opaque and loss.kind == "unknown" and communicator.rank == 0:
            what = f"the loss {loss.loss.name} is 0 or not a number for the first samples: it is taken as their mean"
            fix = "return one value per sample to get their mean"
            warnings.warn(f"{what}, and would be wrong if it is a sum ({fix})", stacklevel=2)
    return found


def _classified(owner: Any, y: Any, predicted: Any, weight: Any) -> list[DistributedLoss]:
    """Return the model's losses after each has found its kind."""
    owner(y, predicted, weight)  # builds it, if it was not built before
    losses = [entry.loss for entry in owner._flat_losses]
    for loss in losses:
        loss.probing = True
    try:
        owner(y, predicted, weight)
    finally:
        for loss in losses:
            loss.probing = False
        # Means of the outputs' losses: these samples are trained on later.
        for tracker in owner.metrics:
            tracker.reset_state()
    return losses


@contextmanager
def _states_kept(losses: Sequence[Any]) -> Iterator[None]:
    """Keep what the user's losses count or remember: variables, and attributes that are numbers."""
    functions = [*losses, *(getattr(x, "fn", None) for x in losses)]
    cells = [c.cell_contents for x in functions for c in getattr(x, "__closure__", None) or () if not _empty(c)]
    attributes = [(x, dict(vars(x))) for x in losses if isinstance(x, keras.losses.Loss)]
    held = keras.tree.flatten([cells, [[*own.values()] for _, own in attributes]])
    variables = [x for x in held if isinstance(x, keras.Variable)]
    variables += [v for x in held if isinstance(x, keras.Layer | keras.metrics.Metric) for v in x.variables]
    values = [keras.ops.convert_to_numpy(v) for v in variables]
    try:
        yield
    finally:
        for v, value in zip(variables, values, strict=True):
            v.assign(value)
        for x, own in attributes:
            numbers = {name: value for name, value in own.items() if isinstance(value, int | float)}
            vars(x).update(numbers)


def _empty(cell: Any) -> bool:
    try:
        return cell.cell_contents is None
    except ValueError:
        return True


def opaque_kinds(model: Any) -> list[str]:
    """Return the kinds of the losses that reduce by themselves, as far as ``probe`` has found them."""
    owner = model._compile_loss
    entries = owner._flat_losses if owner is not None and owner.built else []
    return [entry.loss.kind for entry in entries if entry.loss.opaque]


def kind_over_samples(loss: Any, *batch: Any) -> str:
    """Classify ``loss``, a function of a batch, by its values on a whole batch and on two parts of it."""
    try:
        (whole, first, last), share = whole_and_parts(loss, *batch)
        first, last, both = (float(keras.ops.stop_gradient(keras.ops.sum(x))) for x in (first, last, whole))
    except Exception:  # it may need pairs of samples or a fixed batch size
        return "neither"
    # On PyTorch Keras 3.15 computes some losses in 32 bits, whatever dtype they return.
    return kind_of_parts(
        both, first, last, share, 1e-2 if "16" in keras.backend.standardize_dtype(whole.dtype) else 1e-5
    )


def kind_of_parts(whole: Any, first: Any, last: Any, share: float, bound: float) -> str:
    """Classify numbers, or arrays, of a batch and of its parts; ``share``: of the samples in the first part."""
    if not np.all(np.isfinite(whole)) or not (np.any(whole) or np.any(first) or np.any(last)):
        return "unknown"  # if only a part is NaN, such as a mean over no samples, it is neither
    bound *= np.max(np.abs(first) + np.abs(last))  # small entries of an array may be rounding errors
    if np.all(np.abs(whole - (share * first + (1 - share) * last)) <= bound):
        return "mean"
    return "sum" if np.all(np.abs(whole - first - last) <= bound) else "neither"


def agreed(kinds: Sequence[str]) -> str:
    """Return the most certain of the ranks' answers, which saw different samples; mean and sum make neither."""
    return "neither" if {"mean", "sum"} <= set(kinds) else max(kinds, key=KINDS.index)


def whole_and_parts(function: Any, *batch: Any) -> tuple[tuple[Any, Any, Any], float]:
    """Return what ``function`` gives for a batch and for two parts of it, and the first part's share of samples.

    ``batch``: labels, predictions, and perhaps weights.
    """
    if _samples(batch) == 1:
        batch = _two_of(*batch)
    count = _samples(batch)
    at = count // 2 + (count > 2)  # parts of unequal lengths

    def part(rows: slice) -> Any:
        return function(*keras.tree.map_structure(lambda a: _rows(a, rows), batch))

    return (function(*batch), part(slice(0, at)), part(slice(at, None))), at / max(count, 1)


def _samples(batch: Any) -> int:
    return int(next(leaf for leaf in keras.tree.flatten(batch) if leaf is not None).shape[0])


def _rows(a: Any, rows: slice) -> Any:
    if a is None:
        return None
    part = a[rows]
    if _mask(a) is not None:
        part._keras_mask = _mask(a)[rows]
    return part


def _two_of(y_true: Any, y_pred: Any, *weights: Any) -> tuple[Any, ...]:
    """Return a batch of two samples: the only one of this batch, and the same with half the predictions.

    Two equal samples would not do: the root of their mean is that of one, as if it were a mean over samples.
    """

    def half(a: Any) -> Any:
        return a / 2 if "float" in keras.backend.standardize_dtype(a.dtype) else a

    def joined(a: Any, b: Any) -> Any:
        if a is None:
            return None
        both = keras.ops.concatenate([a, b])
        if _mask(a) is not None:
            both._keras_mask = keras.ops.concatenate([_mask(a), _mask(a)])
        return both

    first = (y_true, y_pred, *weights)
    return keras.tree.map_structure(joined, first, (y_true, keras.tree.map_structure(half, y_pred), *weights))


def _mask(x: Any) -> Any:
    return getattr(x, "_keras_mask", None)


def _has_user_step(model: Any) -> bool:
    return not str(getattr(type(model).train_step, "__module__", "")).startswith("keras.")

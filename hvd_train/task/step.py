"""The user's own training step (``task.step``), which calls the model itself and returns the losses of each sample."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from hvd_train.config.user_code import user_function
from hvd_train.errors import ConfigError, whole_reason
from hvd_train.protocol import Ops, Tensor
from hvd_train.task.user_functions import for_each

LOSS, OUTPUTS, PENALTY = "loss", "outputs", "penalty"
SEVERAL = "return {'loss': ..., 'outputs': ..., 'penalty': ...}; several losses have their names in task.loss_weights"
EACH = "return a value for each sample or position, or (values, weights) of one shape"


class StepResult(NamedTuple):
    """What a step returned. ``losses``: {name, "" if it is the only one: (values (n, ...), weights or None)}.

    ``penalty``: a number, which is added to the mean; ``outputs``: (n, ...) or a dict of these, for metrics.
    """

    losses: dict[str, tuple[Tensor, Tensor | None]]
    penalty: Tensor | None
    outputs: Any

    @property
    def numbers(self) -> list[Tensor]:
        """Return the values of all losses, and the penalty if there is one."""
        return [values for values, _ in self.losses.values()] + ([] if self.penalty is None else [self.penalty])

    @property
    def weights(self) -> list[Tensor]:
        """Return the weights of all losses that have some."""
        return [weights for _, weights in self.losses.values() if weights is not None]


def converted(result: StepResult, cast: Callable[[Any], Any]) -> StepResult:
    """Apply ``cast`` to all tensors of a result."""
    losses = {name: (cast(x), None if w is None else cast(w)) for name, (x, w) in result.losses.items()}
    penalty = None if result.penalty is None else cast(result.penalty)
    return StepResult(losses, penalty, None if result.outputs is None else for_each(cast, result.outputs))


class UserStep:
    """A user's function ``package.module:function``, called as step(model, inputs, labels).

    ``losses``: the names of its losses, [""] for one. ``training``: it also gets ``training``, as Keras' models do.
    """

    def __init__(self, name: str, losses: Sequence[str], training: bool) -> None:
        self.where, self._losses, self._training = f"task.step: {name}", losses, training
        self.function = user_function(name, self.where)
        if isinstance(self.function, type):
            raise ConfigError("it is a class, not a function", where=self.where, fix="name a function of its own")
        try:
            parameters = inspect.signature(self.function).parameters
        except (TypeError, ValueError):
            return
        if batch := [name for name in parameters if name in ("batch", "batch_idx")]:
            what = f"the function has a parameter {batch[0]}, as a training_step of Lightning"
            fix = "write step(model, inputs, labels): they are the two parts of the batch ('hvd-train guide own-loss')"
            raise ConfigError(what, where=self.where, fix=fix)
        open_ended = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values())
        if training and not open_ended and "training" not in parameters:
            what = "the function has no parameter training, without which dropout would be off while training"
            fix = "write step(model, inputs, labels, training), and call model(inputs, training=training)"
            raise ConfigError(what, where=self.where, fix=fix)

    def __call__(self, model: Any, inputs: Any, labels: Any, training: bool) -> StepResult:
        """Call the function. Raises ConfigError if it fails, or returns something else than losses."""
        try:
            answer = self.function(model, inputs, labels, **({"training": training} if self._training else {}))
        except ConfigError:
            raise
        except Exception as error:
            fix = f"it is called with inputs {_shapes(inputs)} and labels {_shapes(labels)}"
            if "require grad" in str(error):
                fix = "validation runs without gradients: take them within 'with torch.enable_grad():'"
            raise ConfigError(f"the step failed: {whole_reason(error)}", where=self.where, fix=fix) from error
        return self._read(answer if isinstance(answer, Mapping) else {LOSS: answer})

    def _read(self, answer: Mapping[str, Any]) -> StepResult:
        names = {name or LOSS: name for name in self._losses}
        allowed = (*names, OUTPUTS, PENALTY)
        if not names.keys() <= answer.keys() or not answer.keys() <= {*allowed}:
            what = f"the step gives {', '.join(map(str, answer))}, and not {', '.join(allowed)}"
            raise ConfigError(what, where=self.where, fix=SEVERAL)
        losses = {}
        for key, name in names.items():
            given = answer[key]
            pair = given if isinstance(given, tuple | list) and len(given) == 2 else (given, None)
            for x in pair if pair[1] is not None else pair[:1]:
                if not hasattr(x, "shape"):
                    raise ConfigError(f"'{key}' is a {type(x).__name__}, not a tensor", where=self.where, fix=EACH)
            losses[name] = pair[0], pair[1]
        penalty = answer.get(PENALTY)
        if isinstance(penalty, int | float):  # such as a sum over no weights; it has no gradient
            penalty = None
        if penalty is not None and tuple(getattr(penalty, "shape", (0,))):
            what = f"'{PENALTY}' is no single number"
            raise ConfigError(what, where=self.where, fix="give the sum, or a value for each sample as a loss")
        return StepResult(losses, penalty, answer.get(OUTPUTS))

    def varying_weights(self) -> ConfigError:
        """Make the error for weights with a gradient: ranks add them up before the step, and take them as numbers."""
        what = "the weights of a loss depend on the model"
        fix = "compute them from the inputs and the labels; what depends on the model belongs in the values"
        return ConfigError(what, where=self.where, fix=fix)

    def check_alone(self, results: Callable[[np.ndarray], StepResult], rows: int, ops: Ops) -> str:
        """Compare the step on made-up samples together and one by one; return a remark, "" if they agree.

        ``results``: runs the step on these of ``rows`` samples. Raises ConfigError for a penalty that depends on them.
        """
        try:
            each = [results(np.arange(rows)), *(results(np.array([k])) for k in range(rows))]
            again = results(np.arange(rows))
        except ConfigError:  # it refuses such labels
            return ""
        pairs = zip(each[0].numbers, again.numbers, strict=True)
        if not all(np.array_equal(ops.to_numpy(one), ops.to_numpy(other)) for one, other in pairs):
            return ""  # it draws random numbers
        penalties = [float(ops.to_numpy(one.penalty)) for one in each if one.penalty is not None]
        if not np.allclose(penalties, penalties[:1], rtol=1e-3, equal_nan=True):
            what = "the penalty depends on the samples, and a mean over a part of them says not of how many"
            raise ConfigError(what, where=self.where, fix="add it to the values of each sample")
        for name in self._losses:
            together, *alone = (np.asarray(ops.to_numpy(one.losses[name][0]), np.float64) for one in each)
            if not together.ndim:  # told where the losses are used
                return ""
            if {one.shape for one in alone} != {(1, *together.shape[1:])}:
                what = f"'{name or LOSS}' has shape {together.shape} for {rows} samples and {alone[0].shape} for one"
                fix = "compare outputs and labels of one shape: outputs[:, 0] turns (n, 1) into (n,)"
                raise ConfigError(what, where=self.where, fix=fix)
            if not np.allclose(together, np.concatenate(alone), rtol=1e-2, atol=1e-5, equal_nan=True):
                return "the value of a sample depends on the others of its batch: each rank compares its own part"
        return ""


def _shapes(x: Any) -> str:
    shapes = for_each(lambda one: tuple(getattr(one, "shape", ())), x)
    return ", ".join(f"{name} {one}" for name, one in shapes.items()) if isinstance(shapes, dict) else str(shapes)

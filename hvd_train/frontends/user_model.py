"""Find and build the model that the configuration names, and check that it fits the data."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Collection, Mapping, Sequence
from types import ModuleType
from typing import Any

from hvd_train.config import FrontEndConfig, TaskConfig
from hvd_train.config.names import nearest
from hvd_train.config.user_code import PASSED_FUNCTIONS, no_function, user_module
from hvd_train.errors import ConfigError, reason, whole_reason
from hvd_train.protocol import Build, Field, Sample, one_or_all


def find_model(zoo: str, name: str, options: Mapping[str, Any]) -> tuple[Build, ModuleType]:
    """Return the build function for ``model.name``, a zoo file or ``package.module:function``, and its module."""
    module_name, _, function = name.partition(":")
    where = f"model.name: {name}"
    if name in PASSED_FUNCTIONS:
        module = importlib.import_module(PASSED_FUNCTIONS[name].__module__)
    elif function:
        module = user_module(name, where)
    else:
        try:
            module = importlib.import_module(f"{zoo}.{name}")
        except ModuleNotFoundError as error:
            if error.name is None or not f"{zoo}.{name}.".startswith(f"{error.name}."):
                raise  # a package that the zoo's model imports
            fix = "'hvd-train models' lists the zoo; your own is 'package.module:function'"
            names = [module.name for module in pkgutil.iter_modules(importlib.import_module(zoo).__path__)]
            if near := nearest(name, names):
                fix = f"did you mean '{near}'? {fix}"
            raise ConfigError(f"there is no model '{name}'", where=where, fix=fix) from None
    build = PASSED_FUNCTIONS.get(name) or getattr(module, function or "build", None)
    if not callable(build):
        raise no_function(module, name, function or "build", where)
    parameters = inspect.signature(build).parameters
    known = [p for p in parameters if p not in ("input_shape", "num_classes", "image", "max_length", "vocabulary_size")]
    unknown = [o for o in options if o not in parameters]
    if unknown and not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        raise ConfigError(f"model '{name}' has no option {', '.join(unknown)}", where=where, fix=f"it takes {known}")
    return build, module


PRETRAINED = (
    "the checkpoint has all weights: give the function a parameter pretrained=True and load the file only where it is "
    "true; eval, predict and export call it with False"
)


def build_model(
    zoo: str,
    config: FrontEndConfig,
    sample: Sample,
    shape_of: Callable[[Field], tuple[int | None, ...]] = lambda field: field.model_shape,
) -> tuple[Any, ModuleType, dict[str, Any]]:
    """Return (model, its module, the arguments of its build function).

    The function gets the options, and ``input_shape``, ``num_classes``, ... if it has these parameters. ``shape_of``:
    the shape in which the framework gets a field. If a checkpoint has all weights, a parameter ``pretrained`` gets
    False. Raises ConfigError if the function rejects its arguments.
    """
    name, options, restores = config.model.name, config.model.options, config.restores
    build, module = find_model(zoo, name, options)
    parameters = inspect.signature(build).parameters
    anything = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    shapes = one_or_all({name: shape_of(field) for name, field in sample.inputs.items()})
    facts = {"input_shape": shapes, "num_classes": sample.num_classes}
    if ":" not in name and _are_numbers(sample, config.task):
        facts["num_classes"] = 1
    if limits := {field.shape[0] for field in sample.inputs.values() if field.ragged}:
        facts["max_length"] = max(limits)
    if sizes := {field.classes for field in sample.inputs.values() if field.classes}:
        facts["vocabulary_size"] = max(sizes)
    # Options override what follows from the data.
    arguments = {key: value for key, value in facts.items() if anything or key in parameters} | dict(options)
    if restores and "pretrained" in parameters:
        arguments["pretrained"] = False
    if ":" not in name:
        arguments |= _order(module, parameters, name, sample)
    try:
        return build(**arguments), module, arguments
    except (ValueError, TypeError, OSError) as error:
        fix = PRETRAINED if restores and isinstance(error, OSError) and "pretrained" not in parameters else ""
        fix = fix or VARIES * any(field.ragged for field in sample.inputs.values())
        fix = fix or NO_CLASSES * _wants_classes(sample, error) or IF_IMAGES * may_be_images(sample)
        what = f"the model cannot be built: {whole_reason(error)}"
        raise ConfigError(what, where=f"model.name: {name}", fix=fix) from error


def _are_numbers(sample: Sample, task: TaskConfig) -> bool:
    """Return whether the loss reads class labels as numbers, so that a built-in model needs a single output."""
    labels = [(field, task.term(name)[0]) for name, field in sample.labels.items()]
    # Not for labels per token or pixel: there ``num_classes`` is also the size of a vocabulary.
    return len(labels) == 1 and all(
        field.classes and not field.shape and loss != "cross_entropy" and ":" not in loss for field, loss in labels
    )


def _order(module: ModuleType, parameters: Collection[str], name: str, sample: Sample) -> dict[str, bool]:
    """Return the option ``image: False`` where the inputs are no images. Raises ConfigError for models of images only.

    Without the option, PyTorch would read (height, width, 4) as channels first.
    """
    field = next((field for field in sample.inputs.values() if not field.image), None)
    if field is None or len(sample.inputs) > 1:
        return {}
    if getattr(module, "IMAGES", False):
        fix = "take mlp, which takes any shape, or a model of your own"
        if len(field.shape) in (2, 3):
            axes = ("height", "width", "channels")[: len(field.shape)]
            fix = f"set data.images: true if they are ({', '.join(axes)}); else {fix}"
        what = f"the model takes images, and the data give samples of shape {field}"
        raise ConfigError(what, where=f"model.name: {name}", fix=fix)
    return {"image": False} if "image" in parameters and len(field.shape) == 3 else {}


def canonical_table(module: ModuleType, model: Any) -> dict[str, tuple]:
    """Return {native name: (canonical name, view, axes, shape)} of a zoo model, else {}."""
    return module.neutral(model) if hasattr(module, "neutral") else {}


def checked(outputs: Any, name: str) -> Any:
    """Return the outputs, or raise ConfigError if they are neither a tensor nor a dict of tensors.

    Of an object with ``logits``, as models of transformers return, these are taken.
    """
    if hasattr(logits := getattr(outputs, "logits", None), "shape"):
        return logits
    for x in outputs.values() if isinstance(outputs, Mapping) else [outputs]:
        if not hasattr(x, "shape"):
            what = (
                f"the model gives a {type(x).__name__} {'by a name' if isinstance(outputs, Mapping) else ''}".rstrip()
            )
            fix = "return a tensor, or a dict of them with a name for each loss"
            raise ConfigError(what, where=f"model.name: {name}", fix=fix)
    return outputs


def own_method(model: Any, names: Sequence[str]) -> str:
    """Return the first of the methods that a class of the user's defines, or ""."""
    for name in names:
        definer = next((kind for kind in type(model).__mro__ if name in vars(kind)), object)
        if definer.__module__.split(".")[0] not in LIBRARIES:
            return name
    return ""


def untaken(name: str, sample: Sample, error: Exception) -> ConfigError:
    """Make the error for a model that cannot process the data's samples."""
    listed = ", ".join(f"{key} {field}" for key, field in sample.inputs.items())
    what = f"the model does not take its inputs ({listed}): {reason(error)}"
    fixes = ["several inputs are given by name"] * (len(sample.inputs) > 1)
    if len(sample.inputs) > 1 or any(field.whole for field in sample.inputs.values()):
        fixes.append("whole numbers stay whole: store quantities as float32")
    fixes += [IF_IMAGES] * may_be_images(sample)
    fix = NO_CLASSES if _wants_classes(sample, error) else "; ".join(fixes)
    return ConfigError(what, where=f"model.name: {name}", fix=fix)


LIBRARIES = ("builtins", "keras", "torch", "lightning", "pytorch_lightning")
IF_IMAGES = "if they are images, set data.images: true"
VARIES = "input_shape has None where lengths vary (data.lengths): take a model that sums or attends over places"
NO_CLASSES = "num_classes is None, as task.loss is not cross_entropy: set data.num_classes"


def _wants_classes(sample: Sample, error: Exception) -> bool:
    """Return whether a layer was built with ``num_classes=None``: with a user's loss, labels are not classes."""
    return sample.num_classes is None and "None" in str(error)


def may_be_images(sample: Sample) -> bool:
    """Return whether an input that is not declared an image has the axes of one."""
    return any(len(field.shape) in (2, 3) and not field.image for field in sample.inputs.values())


def finalizes(layer: Any) -> bool:
    """Return whether a Keras layer computes constants from its variables (``finalize_state``), as in Normalization."""
    kinds = {kind.__name__ for kind in type(layer).__mro__ if kind.__module__.startswith("keras.")}
    own = not type(layer).__module__.startswith("keras.")
    return "Normalization" in kinds or (own and hasattr(layer, "finalize_state"))

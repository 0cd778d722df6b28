"""Transforms of samples. Random ones depend on (seed, epoch, index) alone, so they are the same for every world size,
in both frameworks and after a resume."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from hvd_train.config import TaskConfig, TransformConfig
from hvd_train.config.user_code import user_errors
from hvd_train.data.augment import BUILT_IN, MOVING, RandomNumbers, no_window_fits
from hvd_train.data.mixing import MIXING, Mixed
from hvd_train.data.order import mix
from hvd_train.data.wrapper import Wrapper, drawn
from hvd_train.errors import DataError
from hvd_train.protocol import Field, Fields, Sample, Source

SAME = "return the names, shapes and types that the function gets"


NORMALIZE = "normalize"
TRIED = 8  # samples on which transforms are tried twice


def catalog() -> dict[str, str]:
    """Return {name: one line of help}."""
    listed = {name: (one.__doc__ or "").strip() for name, one in (BUILT_IN | MIXING).items()}
    return listed | {
        NORMALIZE: "(values - mean) / std, on the device, in validation too; bytes are divided by 255 first"
    }


class Transformed(Wrapper):
    """A source that wraps another one and applies random transforms in training (``drawn``), not in ``fetch``."""

    def __init__(self, source: Source, sample: Sample, steps: Sequence[_Step] = ()) -> None:
        super().__init__(source, sample)
        self._steps = steps

    def drawn(self, indices: np.ndarray, seed: int, epoch: int) -> tuple[Fields, Fields]:
        fetched, labels = drawn(self._source, indices, seed, epoch)
        inputs = {name: np.array(x) for name, x in fetched.items()}  # copies: transforms may write in place
        for number, step in enumerate(self._steps):
            # Each transform has its own key, so adding one does not change the random numbers of those before it.
            inputs = step(inputs, RandomNumbers(mix(mix(seed, epoch), number), np.asarray(indices)))
        return inputs, labels


_Step = Callable[[dict[str, np.ndarray], RandomNumbers], dict[str, np.ndarray]]


def transformed(
    parts: Mapping[str, Source],
    configs: Sequence[TransformConfig],
    imported: Callable[[str, str], Callable[..., Any]],
    task: TaskConfig | None = None,
) -> dict[str, Source]:
    """Apply ``normalize`` to all parts, and the other transforms to the training part.

    ``task``: for the labels; None if the labels are the inputs. Raises DataError if a transform fails on sample 0.
    """
    steps: list[_Step] = []
    mixing: list[tuple[TransformConfig, str]] = []
    samples = {name: part.sample for name, part in parts.items()}
    first = next(iter(samples.values()))
    for number, config in enumerate(configs):
        where = f"data.transforms.{number}: {config.name}"
        if config.name == NORMALIZE:
            samples = {name: _normalized(sample, config, where) for name, sample in samples.items()}
        elif config.name in MIXING:
            mixing.append((config, where))
        elif config.name in BUILT_IN:
            steps.append(_built_in(config, first, where))
        else:
            steps.append(_user_step(imported(config.name, where), config, where))
    by_name: dict[str, Source] = {
        name: Transformed(part, samples[name], steps * (name == "train")) for name, part in parts.items()
    }
    if "train" in by_name:
        by_name["train"].remarks += _coordinate_remarks(first, configs, task)  # type: ignore[attr-defined]
        if mixing:
            by_name["train"] = Mixed(by_name["train"], mixing, len(steps))
        tried = [drawn(by_name["train"], np.arange(min(TRIED, len(by_name["train"]))), 0, 0)[0] for _ in range(2)]
        own = [f"data.transforms.{k}: {config.name}" for k, config in enumerate(configs) if ":" in config.name]
        if own and not all(np.array_equal(x, tried[1][name], equal_nan=True) for name, x in tried[0].items()):
            what = "it makes other values of the same sample and rng, so ranks and resumed runs would differ"
            raise DataError(what, where=", ".join(own), fix="draw from rng alone")
    return by_name


def _one_input(sample: Sample, config: TransformConfig, where: str) -> tuple[str, Field]:
    name = config.input or next(iter(sample.inputs))
    if name not in sample.inputs or (len(sample.inputs) > 1 and not config.input):
        what = f"it changes one input, and there are {', '.join(sample.inputs)}"
        raise DataError(what, where=where, fix=f"say which with {{name: {config.name}, input: ...}}")
    return name, sample.inputs[name]


def _normalized(sample: Sample, config: TransformConfig, where: str) -> Sample:
    name, field = _one_input(sample, config, where)
    mean, std = config.listed("mean"), config.listed("std")
    if field.whole:
        fix = "it is for numbers with a fraction and for bytes of images"
        raise DataError(f"{name} of {field} holds whole numbers", where=where, fix=fix)
    for key, numbers in (("mean", mean), ("std", std)):
        if len(numbers) not in (1, *field.shape[-1:]):
            what = f"{len(numbers)} numbers for {name} of shape {field.shape}"
            raise DataError(what, where=f"{where}, {key}", fix="give one, or one for each channel (the last axis)")
    return replace(sample, inputs={**sample.inputs, name: replace(field, mean=mean, std=std)})


def _built_in(config: TransformConfig, sample: Sample, where: str) -> _Step:
    name, field = _one_input(sample, config, where)
    if not field.image:
        what = f"{name} of shape {field.shape} is not an image (height, width, channels)"
        declare = "if it is one, set data.images: true; else " * (len(field.shape) in (2, 3))
        fix = f"{declare}write your own: 'package.module:function' of (sample, rng)"
        raise DataError(what, where=where, fix=fix)
    placed = [
        label for label, field in sample.labels.items() if len(field.shape) > 1 or (field.shape and field.classes)
    ]
    if placed and config.name in MOVING:
        raise DataError(f"labels per pixel ({', '.join(placed)}) would not move along", where=where)
    if config.name == "random_crop" and config.size and (config.size, config.size) != field.shape[:2]:
        what = f"size {config.size} of images of {field.shape[0]} x {field.shape[1]}"
        fix = "leave size out: samples keep their shape, which validation has too"
        raise DataError(what, where=where, fix=fix)
    if no_window_fits(config, *field.shape[:2]):
        what = f"no window of these areas and aspect ratios fits into images of {field.shape[0]} x {field.shape[1]}"
        raise DataError(what, where=where, fix="change ratio (bounds on width / height) or scale (bounds on the area)")
    if np.array(config.fill).astype(field.dtype) != config.fill:
        what = f"fill: {config.fill:g} does not fit into {field.dtype}"
        raise DataError(what, where=where, fix="give the value of a pixel as it is stored: bytes are 0 to 255")
    if config.saturation and field.shape[-1] != 3:
        what = f"{name} of shape {field.shape} has no colors"
        raise DataError(what, where=f"{where}, saturation", fix="leave it out: it is for three channels")
    work = BUILT_IN[config.name]
    return lambda inputs, draws: {**inputs, name: work(inputs[name], draws, config)}


def _coordinate_remarks(sample: Sample, configs: Sequence[TransformConfig], task: TaskConfig | None) -> tuple[str, ...]:
    """Return a remark on labels that may be coordinates in an image, if transforms move its pixels."""
    moving = [config.name for config in configs if config.name in MOVING]
    if not moving or task is None:
        return ()
    losses = {name: task.term(name)[0] for name in sample.labels}
    return tuple(
        f"labels '{name}' are {field.shape[0]} numbers, which {', '.join(moving)} does not change (coordinates in the "
        "image, such as boxes and points, would be wrong)"
        for name, field in sample.labels.items()
        if len(field.shape) == 1 and field.shape[0] > 1 and not field.classes and losses[name] != "bce"
    )


def _user_step(function: Callable[..., Any], config: TransformConfig, where: str) -> _Step:
    """Make a step that applies a user's function(sample, rng, **options) to each sample.

    ``sample``: an array, or {name: array} if there are several inputs.
    """

    def step(inputs: dict[str, np.ndarray], draws: RandomNumbers) -> dict[str, np.ndarray]:
        out = {name: np.empty_like(x) for name, x in inputs.items()}
        for k, (index, rng) in enumerate(zip(draws.indices, draws.generators(), strict=True)):
            sample = {name: x[k] for name, x in inputs.items()}
            value: Any = next(iter(sample.values())) if len(sample) == 1 else dict(sample)
            with user_errors(f"the function failed on sample {index}", where, kind=DataError):
                made = function(value, rng, **config.options)
                if len(sample) == 1:
                    made = {next(iter(sample)): made}
                arrays = {name: np.asarray(x) for name, x in dict(made).items()}
            described = {name: f"{x.shape} {x.dtype}" for name, x in arrays.items()}
            wanted = {name: f"{x.shape} {x.dtype}" for name, x in sample.items()}
            if described != wanted:
                what, other = (
                    ", ".join(f"{name} {kind}" for name, kind in each.items()) for each in (described, wanted)
                )
                raise DataError(f"it made {what or 'nothing'} of sample {index}, not {other}", where=where, fix=SAME)
            for name, x in arrays.items():
                if x.dtype.kind == "f" and not np.isfinite(x).all():
                    raise DataError(f"it gave NaN or infinity for sample {index}", where=where)
                out[name][k] = x
        return out

    return step

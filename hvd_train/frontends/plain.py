"""The parts that exporters share: what a plain model is made of, and the file that comes out."""

from __future__ import annotations

import importlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import numpy as np

from hvd_train.checkpoint.compatibility import check_tree
from hvd_train.config import Config
from hvd_train.errors import ConfigError
from hvd_train.frontends.named_arrays import layouts_of
from hvd_train.protocol import Sample, Tree


@dataclass(frozen=True)
class Trained:
    """A checkpoint. ``arrays``: canonical name -> weight or running statistic; ``sample``: as the data give it;
    ``about``: what a file that can hold notes says of itself; ``scale``: what the inputs' numbers are."""

    config: Config
    arrays: Tree
    sample: Sample
    about: dict[str, str]
    scale: str = ""

    @property
    def dtype(self) -> str:
        """The type of the weights; mixed precision keeps them in 32 bits."""
        return "float64" if self.config.precision == "64" else "float32"

    def native_arrays(self, shapes: Mapping[str, Sequence[int]], table: Mapping[str, tuple]) -> dict[str, np.ndarray]:
        """The arrays under a model's names and in its axis order; they must be its tensors, all of them."""
        layouts = layouts_of(shapes, table)
        check_tree({x.name: np.broadcast_to(0.0, x.shape) for x in layouts.values()}, self.arrays)
        return {name: x.from_canonical(self.arrays[x.name]) for name, x in layouts.items()}

    def inputs(self, dtype: str) -> dict[str, str]:
        """{name: type} of what the model itself takes, computing in ``dtype``."""
        return {
            name: dtype if not field.whole else "bool" if field.dtype == "bool" else "int64"
            for name, field in self.sample.inputs.items()
        }

    def build_call(self, module: ModuleType, arguments: Mapping[str, Any]) -> str:
        """The line that builds the untrained model: ``pt_models.mlp.build(input_shape=(64,), num_classes=10)``."""
        function = self.config.model.name.partition(":")[2] or "build"
        return f"{module.__name__}.{function}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"


@dataclass(frozen=True)
class Exported:
    """A file's content and how to use it. Shapes are without the samples' axis; ``load`` is one line of Python that
    opens the file ``{path}``; ``inputs``: {name: (shape, type)};
    ``outputs``: {name: shape}."""

    content: bytes
    load: str
    inputs: Mapping[str, tuple[tuple[int, ...], str]]
    outputs: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


def shapes(outputs: Any) -> dict[str, tuple[int, ...]]:
    """{name: shape of a sample} of what a model gives: "logits", or its several outputs."""
    named = outputs if isinstance(outputs, Mapping) else {"logits": outputs}
    return {name: tuple(x.shape[1:]) for name, x in named.items()}


def onnx_load(names: Collection[str], outputs: Collection[str]) -> str:
    arguments = "'input': x" if len(names) == 1 else ", ".join(f"'{name}': {name}" for name in names)
    open_it = "import onnxruntime; model = onnxruntime.InferenceSession({path}); "
    alone = "[0]" if len(outputs) == 1 else ""
    return open_it + f"{', '.join(outputs)} = model.run({list(outputs)}, {{{arguments}}}){alone}"


def onnx_packages(*names: str) -> list[Any]:
    """The modules of these names, as setup.cfg's extra ``export`` installs them."""
    try:
        return [importlib.import_module(name) for name in names]
    except ImportError as error:
        if (error.name or "").split(".")[0] not in names:
            raise
        what = f"ONNX files need the package {error.name}, which is not installed"
        raise ConfigError(what, where="--to onnx", fix=f"run scripts/setup, or pip install {' '.join(names)}") from None


def unfit_for(kind: str, name: str, error: BaseException) -> ConfigError:
    """The framework's own exporter refuses the model; its first line tells why."""
    reason = str(error).strip().splitlines()
    return ConfigError(
        f"the model cannot be written as {kind}: {reason[0] if reason else type(error).__name__}",
        where=f"model.name: {name}",
        fix="mend the model, or take --to safetensors",
    )

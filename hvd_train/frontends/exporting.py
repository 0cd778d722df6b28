"""What exporters share: the description of a trained model, and of the exported file."""

from __future__ import annotations

import importlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import numpy as np

from hvd_train.checkpoint.resume_rules import check_tree
from hvd_train.config import FrontEndConfig
from hvd_train.errors import ConfigError, reason
from hvd_train.frontends.named_arrays import layouts_of
from hvd_train.installation import install_fix
from hvd_train.protocol import Sample, Tree


@dataclass(frozen=True)
class Trained:
    """A checkpoint to export.

    ``arrays``: weights and running statistics by canonical name; ``sample``: as the data source yields it; ``about``:
    notes for formats that can hold some; ``scale``: how the numbers of the inputs are scaled.
    """

    config: FrontEndConfig
    arrays: Tree
    sample: Sample
    about: dict[str, str]
    scale: str = ""

    @property
    def dtype(self) -> str:
        """The dtype of the weights; with mixed precision, 32 bits."""
        return "float64" if self.config.precision == "64" else "float32"

    def native_arrays(self, shapes: Mapping[str, Sequence[int]], table: Mapping[str, tuple]) -> dict[str, np.ndarray]:
        """Return the arrays by a model's native names, in its axis order.

        Raises CheckpointError if they are not exactly the model's tensors.
        """
        layouts = layouts_of(shapes, table)
        check_tree({x.name: np.broadcast_to(0.0, x.shape) for x in layouts.values()}, self.arrays)
        return {name: x.from_canonical(self.arrays[x.name]) for name, x in layouts.items()}

    def inputs(self, dtype: str) -> dict[str, str]:
        """Return {name: type} of the inputs of a model that computes in ``dtype``."""
        return {
            name: dtype if not field.whole else "bool" if field.dtype == "bool" else "int64"
            for name, field in self.sample.inputs.items()
        }

    def build_call(self, module: ModuleType, arguments: Mapping[str, Any]) -> str:
        """Return the line that builds the untrained model: ``pt_models.mlp.build(input_shape=(64,))``."""
        function = self.config.model.name.partition(":")[2] or "build"
        return f"{module.__name__}.{function}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"


@dataclass(frozen=True)
class Exported:
    """The content of an exported file, and how to use it.

    ``load``: a line of Python that opens the file ``{path}``; ``inputs``: {name: (shape, type)}; ``outputs``: {name:
    shape}. Shapes are those of one sample.
    """

    content: bytes
    load: str
    inputs: Mapping[str, tuple[tuple[int, ...], str]]
    outputs: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


def shapes(outputs: Any) -> dict[str, tuple[int, ...]]:
    """Return {name: shape for one sample} of a model's outputs; a single output is called "logits"."""
    named = outputs if isinstance(outputs, Mapping) else {"logits": outputs}
    return {name: tuple(x.shape[1:]) for name, x in named.items()}


def onnx_load(names: Collection[str], outputs: Collection[str]) -> str:
    arguments = "'input': x" if len(names) == 1 else ", ".join(f"'{name}': {name}" for name in names)
    open_it = "import onnxruntime; model = onnxruntime.InferenceSession({path}); "
    alone = "[0]" if len(outputs) == 1 else ""
    return open_it + f"{', '.join(outputs)} = model.run({list(outputs)}, {{{arguments}}}){alone}"


def onnx_packages(*names: str) -> list[Any]:
    """Import these modules, which setup.cfg's extra ``export`` installs."""
    try:
        return [importlib.import_module(name) for name in names]
    except ImportError as error:
        if (error.name or "").split(".")[0] not in names:
            raise
        what = f"ONNX files need the package {error.name}, which is not installed"
        raise ConfigError(what, where="--to onnx", fix=install_fix(pip=f"pip install {' '.join(names)}")) from None


def unfit_for(kind: str, name: str, error: BaseException) -> ConfigError:
    """Make the error for a model that the framework's exporter rejects, with the first line of its reason."""
    return ConfigError(
        f"the model cannot be written as {kind}: {reason(error)}",
        where=f"model.name: {name}",
        fix="mend the model, or take --to safetensors",
    )

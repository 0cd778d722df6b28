"""Export to plain PyTorch and, through it, to ONNX."""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from types import ModuleType
from typing import Any

import torch

from hvd_train.frameworks import PYTORCH
from hvd_train.frontends.exporting import Exported, Trained, onnx_load, onnx_packages, shapes, unfit_for
from hvd_train.frontends.pytorch.blocks import joined
from hvd_train.frontends.pytorch.shapes import as_real, lazy, moved, native_shape
from hvd_train.frontends.user_model import build_model, canonical_table


def _model(trained: Trained, dtype: str) -> tuple[torch.nn.Module, ModuleType, dict[str, Any], dict[str, torch.Tensor]]:
    """Return (trained model in evaluation mode, its module, build arguments, two samples of zeros), all on the CPU."""
    fields = trained.sample.inputs
    # An exported model takes samples padded to the maximum length.
    sizes = {k: field.shape if field.ragged else native_shape(field) for k, field in fields.items()}
    model, module, arguments = build_model(PYTORCH.zoo, trained.config, trained.sample, native_shape)
    model = moved(joined(model), "cpu", getattr(torch, dtype))
    kinds = trained.inputs(dtype)
    example = {k: torch.zeros(2, *shape, dtype=getattr(torch, kinds[k])) for k, shape in sizes.items()}
    if lazy(model):
        with torch.no_grad():
            _output(model.eval(), example)
        model.train()
    table = canonical_table(module, model)
    # Checkpoints omit batch normalization's counter if no computation uses it.
    tensors = {
        path: as_real(x)
        for path, x in {**dict(model.named_parameters()), **dict(model.named_buffers())}.items()
        if path in trained.arrays or not path.endswith("num_batches_tracked")
    }
    with torch.no_grad():
        for path, array in trained.native_arrays({path: x.shape for path, x in tensors.items()}, table).items():
            tensors[path].copy_(torch.from_numpy(array))
    model.eval()  # not before: layers such as LoRA's merge their weights then
    return model, module, arguments, example


def _output(model: torch.nn.Module, example: dict[str, torch.Tensor]) -> Any:
    return model(*example.values()) if len(example) == 1 else model(**example)


def _input_types(example: dict[str, torch.Tensor]) -> dict[str, tuple[tuple[int, ...], str]]:
    return {k: (tuple(x.shape[1:]), str(x.dtype).removeprefix("torch.")) for k, x in example.items()}


@torch.no_grad()
def to_pytorch(trained: Trained) -> Exported:
    """Export a state dictionary, which ``torch.load`` opens with ``weights_only=True``."""
    model, module, arguments, example = _model(trained, trained.dtype)
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    build = trained.build_call(module, arguments) + (".double()" if trained.dtype == "float64" else "")
    load = (
        f"import torch, {module.__name__}; model = {build}.eval(); "
        "model.load_state_dict(torch.load({path}, weights_only=True))"
    )
    return Exported(buffer.getvalue(), load, _input_types(example), shapes(_output(model, example)))


def _arguments(example: dict[str, torch.Tensor]) -> tuple[tuple, dict[str, torch.Tensor] | None, Any]:
    """Return (args, kwargs, dynamic shapes) with which an exporter calls the model, for any batch size."""
    batch = {0: torch.export.Dim("batch")}
    if len(example) == 1:
        return tuple(example.values()), None, (batch,)
    return (), example, dict.fromkeys(example, batch)


@contextmanager
def _exporter(kind: str, trained: Trained, errors: type[Exception] | tuple[type[Exception], ...]) -> Iterator[None]:
    """Hide an exporter's progress and its warnings about missing packages. Its errors name the model."""
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    except errors as error:
        raise unfit_for(kind, trained.config.model.name, error.__cause__ or error) from error
    finally:
        logging.disable(logging.NOTSET)


@torch.no_grad()
def to_torch_export(trained: Trained) -> Exported:
    """Export the model and its weights for any batch size; ``torch.export.load`` works without the model's code."""
    model, _, _, example = _model(trained, trained.dtype)
    outputs, buffer = shapes(_output(model, example)), io.BytesIO()
    args, kwargs, dynamic = _arguments(example)
    # It raises many kinds of errors, and passes on those of the model's code.
    with _exporter("a torch.export program", trained, Exception):
        torch.export.save(torch.export.export(model, args, kwargs, dynamic_shapes=dynamic), buffer)
    load = "import torch; model = torch.export.load({path}).module()"
    return Exported(buffer.getvalue(), load, _input_types(example), outputs)


@torch.no_grad()
def to_onnx(trained: Trained) -> Exported:
    """Export a 32-bit ONNX model with input ``input`` and output ``logits``, for any batch size."""
    package, _ = onnx_packages("onnx", "onnxscript")
    model, _, _, example = _model(trained, "float32")
    outputs = shapes(_output(model, example))
    args, kwargs, dynamic = _arguments(example)
    with _exporter("ONNX", trained, (torch.onnx.OnnxExporterError, ValueError)):
        program = torch.onnx.export(
            model,
            args,
            kwargs=kwargs,
            dynamo=True,
            verbose=False,
            input_names=list(example) if kwargs else ["input"],
            output_names=list(outputs),
            dynamic_shapes=dynamic,
        )
        proto = program.model_proto
        package.helper.set_model_props(proto, trained.about)
        content = proto.SerializeToString()
    return Exported(content, onnx_load(example, outputs), _input_types(example), outputs)

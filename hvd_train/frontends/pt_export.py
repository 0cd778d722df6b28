"""Files for plain PyTorch and, through it, for ONNX runtimes."""

from __future__ import annotations

import io
import logging
import warnings
from contextlib import redirect_stderr
from types import ModuleType

import torch

from hvd_train.frameworks import PYTORCH
from hvd_train.frontends.base import build_model
from hvd_train.frontends.plain import ONNX_LOAD, Exported, Trained, onnx_packages, unfit_for


def _model(trained: Trained, dtype: str) -> tuple[torch.nn.Module, ModuleType, torch.Tensor]:
    """(the trained model for evaluation, the module that builds it, two samples of zeros), all on the CPU."""
    given, name = trained.input_shape, trained.config.model.name
    shape = (given[2], *given[:2]) if len(given) == 3 else given
    model, module = build_model(PYTORCH.zoo, name, trained.config.model.options, shape, trained.num_classes)
    model = model.to("cpu", getattr(torch, dtype)).eval()
    table = module.neutral(model) if hasattr(module, "neutral") else {}
    # Batch normalization's counter is in no checkpoint where no arithmetic uses it.
    tensors = {
        path: x
        for path, x in {**dict(model.named_parameters()), **dict(model.named_buffers())}.items()
        if path in trained.arrays or not path.endswith("num_batches_tracked")
    }
    with torch.no_grad():
        for path, array in trained.own({path: x.shape for path, x in tensors.items()}, table).items():
            tensors[path].copy_(torch.from_numpy(array))
    return model, module, torch.zeros(2, *shape, dtype=getattr(torch, dtype))


@torch.no_grad()
def to_pytorch(trained: Trained) -> Exported:
    """A state dictionary, which ``torch.load`` opens with ``weights_only=True``."""
    model, module, example = _model(trained, trained.dtype)
    buffer, shape = io.BytesIO(), tuple(example.shape[1:])
    torch.save(model.state_dict(), buffer)
    build = trained.build_call(module, shape) + (".double()" if trained.dtype == "float64" else "")
    load = (
        f"import torch, {module.__name__}; model = {build}.eval(); "
        "model.load_state_dict(torch.load({path}, weights_only=True))"
    )
    return Exported(buffer.getvalue(), load, shape, trained.dtype, tuple(model(example).shape[1:]))


@torch.no_grad()
def to_onnx(trained: Trained) -> Exported:
    """An ONNX model of 32 bits, input ``input`` and output ``logits``, for any number of samples."""
    package, _ = onnx_packages("onnx", "onnxscript")
    model, _, example = _model(trained, "float32")
    output_shape = tuple(model(example).shape[1:])
    logging.disable(logging.CRITICAL)  # the exporter misses torchvision, and thinks aloud
    try:
        with warnings.catch_warnings(), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            program = torch.onnx.export(
                model,
                (example,),
                dynamo=True,
                verbose=False,
                input_names=["input"],
                output_names=["logits"],
                dynamic_shapes=({0: torch.export.Dim("batch")},),
            )
        proto = program.model_proto
        package.helper.set_model_props(proto, trained.about)
        content = proto.SerializeToString()
    except (torch.onnx.OnnxExporterError, ValueError) as error:
        raise unfit_for("ONNX", trained.config.model.name, error.__cause__ or error) from error
    finally:
        logging.disable(logging.NOTSET)
    return Exported(content, ONNX_LOAD, tuple(example.shape[1:]), "float32", output_shape)

"""PyTorch models. Each file: ``build(input_shape, num_classes, **options)`` and ``neutral(model)``.

``input_shape`` is one sample's shape in PyTorch's order, (channels, height, width) for images. ``neutral`` gives
{parameter name: (neutral name, view, axes, shape)}: neutral = own.reshape(view).transpose(axes).reshape(shape).
Neutral order is channels last: convolution kernels (height, width, in, out), dense kernels (in, out), and what a
Flatten joins counts as (height, width, channels). Names end in .kernel, .bias, .scale, .embedding, or, for running
statistics, in .mean and .variance. The files of the same names in ``tf_models`` hold the same networks.
"""

import torch.nn as nn

AXES = {2: (1, 0), 4: (2, 3, 1, 0)}  # dense (out, in), convolution (out, in, height, width)
STATISTICS = {"running_mean": "mean", "running_var": "variance"}


def entries(model: nn.Module) -> dict[str, tuple]:
    """``neutral`` of a model in which nothing is flattened: every layer has the name of its attribute."""
    table = {}
    for path, layer in model.named_modules():
        named = [*layer.named_parameters(recurse=False), *layer.named_buffers(recurse=False)]
        for own, x in named:
            name, axes = STATISTICS.get(own, own), None
            if own == "weight" and isinstance(layer, nn.Embedding):
                name = "embedding"
            elif own == "weight":  # of a normalization: one axis
                name, axes = ("kernel", AXES[x.ndim]) if x.ndim > 1 else ("scale", None)
            if x.ndim:  # batch norm's counter of batches has no use
                shape = tuple(x.shape[axis] for axis in axes or range(x.ndim))
                table[f"{path}.{own}"] = (f"{path}.{name}", None, axes, shape)
    return table

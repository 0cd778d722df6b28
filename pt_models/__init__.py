"""PyTorch models. Each file: ``build(input_shape, num_classes, **options)`` and ``neutral(model)``.

``input_shape`` is one sample's shape in PyTorch's order, (channels, height, width) for images. ``neutral`` gives
{parameter name: (canonical name, view, axes, shape)}: canonical = native.reshape(view).transpose(axes).reshape(shape).
Canonical order is channels last: convolution kernels (height, width, in, out), dense kernels (in, out), and what a
Flatten joins counts as (height, width, channels). Names end in .kernel, .bias, .scale, .embedding, or, for running
statistics, in .mean and .variance. The files of the same names in ``tf_models`` hold the same networks.

Some have ``blocks(model)``: the model as parts that run one after the other and use its weights. The first takes what
the model takes, the last gives what it gives; in between each takes one tensor and gives one.
"""

"""PyTorch models. Each file has ``build(input_shape, num_classes, **options)`` and ``neutral(model)``.

``input_shape`` is one sample's shape in PyTorch's order, (channels, height, width) for images. ``neutral`` returns
{parameter name: (canonical name, view, axes, shape)}: canonical = native.reshape(view).transpose(axes).reshape(shape).
Canonical order is channels last: convolution kernels (height, width, in, out), dense kernels (in, out), and flattened
images (height, width, channels). Names end in .kernel, .bias, .scale, .embedding, or, for running statistics, in .mean
and .variance. The files of the same names in ``tf_models`` hold the same networks.

Some have ``blocks(model)``: the model as a list of modules that run in order and use its weights. The first takes the
model's input, the last returns its output; the others take and return one tensor.
"""

"""Keras 3 models. Each file has ``build(input_shape, num_classes, **options)`` and ``neutral(model)``.

``input_shape`` is one sample's shape, (height, width, channels) for images. ``neutral`` returns {variable path:
(canonical name, view, axes, shape)}. Keras' order is the canonical one (see ``pt_models``), so view and axes are None.
The files of the same names in ``pt_models`` hold the same networks, and have the same ``blocks``.
"""

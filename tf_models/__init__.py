"""Keras 3 models. Each file: ``build(input_shape, num_classes, **options)`` and ``neutral(model)``.

``input_shape`` is one sample's shape, (height, width, channels) for images. ``neutral`` gives {variable path: (neutral
name, view, axes, shape)}; Keras' own order is the neutral one (see ``pt_models``), so view and axes change nothing.
The files of the same names in ``pt_models`` hold the same networks.
"""

import keras

NAMES = {
    "gamma": "scale", "beta": "bias", "moving_mean": "mean", "moving_variance": "variance", "embeddings": "embedding",
}  # fmt: skip


def entries(model: keras.Model) -> dict[str, tuple]:
    """``neutral`` of a model whose layers are called as the attributes in PyTorch."""
    table = {}
    for v in model.variables:
        layer, _, own = v.path.rpartition("/")
        if own != "seed_generator_state":
            table[v.path] = (f"{layer}.{NAMES.get(own, own)}".replace("/", "."), None, None, tuple(v.shape))
    return table

"""A multi-layer perceptron on the flattened input: dense layers with ReLU between them."""

import keras
from keras import layers


def build(input_shape, num_classes, hidden: list[int] = (128,)) -> keras.Model:
    """(n, *input_shape) -> logits (n, num_classes)."""
    inputs = keras.Input(input_shape)
    x = layers.Flatten(name="flatten")(inputs)
    for i, units in enumerate(hidden):
        x = layers.Dense(units, activation="relu", name=f"fc{i + 1}")(x)
    return keras.Model(inputs, layers.Dense(num_classes, name=f"fc{len(hidden) + 1}")(x), name="mlp")


def neutral(model: keras.Model) -> dict[str, tuple]:
    return {v.path: (v.path.replace("/", "."), None, None, tuple(v.shape)) for v in model.trainable_variables}

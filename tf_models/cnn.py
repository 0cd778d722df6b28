"""SINGA's CNN for 28 x 28 images: two convolutions with pooling, two dense layers (0.43 million weights)."""

import keras
from keras import layers

IMAGES = True  # takes only images


def build(input_shape, num_classes, hidden: int = 500) -> keras.Model:
    """(n, height, width, channels) -> logits (n, num_classes)."""
    height, width, _ = input_shape
    # Each 5 x 5 convolution takes 4 from a side, each pooling halves it.
    if min(((height - 4) // 2 - 4) // 2, ((width - 4) // 2 - 4) // 2) < 1:
        raise ValueError(
            f"the CNN needs images of at least 16 x 16, not {height} x {width}; set data.image_size or resize yours"
        )
    inputs = keras.Input(input_shape)
    x = layers.Conv2D(20, 5, activation="relu", name="conv1")(inputs)
    x = layers.MaxPooling2D(2, name="pool1")(x)
    x = layers.Conv2D(50, 5, activation="relu", name="conv2")(x)
    x = layers.MaxPooling2D(2, name="pool2")(x)
    x = layers.Flatten(name="flatten")(x)
    x = layers.Dense(hidden, activation="relu", name="fc1")(x)
    return keras.Model(inputs, layers.Dense(num_classes, name="fc2")(x), name="cnn")


def neutral(model: keras.Model) -> dict[str, tuple]:
    return {v.path: (v.path.replace("/", "."), None, None, tuple(v.shape)) for v in model.trainable_variables}

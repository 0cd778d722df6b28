"""SINGA's CNN for 28 x 28 images: two convolutions with pooling, two dense layers (0.43 million weights)."""

import jax
from jax import lax

from hvd_train.frontends.jax.models.mlp import Forward, Shapes, Weights, dense, of_dense

IMAGES = True  # takes only images


def build(input_shape, num_classes, hidden: int = 500) -> tuple[Shapes, Forward]:
    """(n, height, width, channels) -> logits (n, num_classes)."""
    height, width, channels = input_shape
    # Each 5 x 5 convolution takes 4 from a side, each pooling halves it.
    sides = ((height - 4) // 2 - 4) // 2, ((width - 4) // 2 - 4) // 2
    if min(sides) < 1:
        raise ValueError(
            f"the CNN needs images of at least 16 x 16, not {height} x {width}; set data.image_size or resize yours"
        )
    shapes: Shapes = {"conv1.kernel": (5, 5, channels, 20), "conv1.bias": (20,)}
    shapes |= {"conv2.kernel": (5, 5, 20, 50), "conv2.bias": (50,)}
    shapes |= of_dense("fc1", sides[0] * sides[1] * 50, hidden) | of_dense("fc2", hidden, num_classes)

    def forward(w: Weights, x: jax.Array, dropout) -> jax.Array:
        for name in ("conv1", "conv2"):
            kernel = w[f"{name}.kernel"]
            x = lax.conv_general_dilated(x, kernel, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"))
            x = jax.nn.relu(x + w[f"{name}.bias"])
            x = lax.reduce_window(x, -float("inf"), lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
        return dense(w, "fc2", jax.nn.relu(dense(w, "fc1", x.reshape(len(x), -1))))

    return shapes, forward

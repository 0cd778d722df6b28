"""Models and data as a user brings them: ``tests.own_models:NAME``. Frameworks are loaded when a model is built."""

from __future__ import annotations

import itertools

import numpy as np


def pytorch_dropout(input_shape, num_classes, rate: float = 0.5, norm: bool = True):
    import torch.nn as nn

    size = int(np.prod(input_shape))
    layers = [nn.Flatten(), nn.Linear(size, 16), nn.Dropout(rate), nn.Linear(16, num_classes)]
    return nn.Sequential(*layers[:2], *([nn.BatchNorm1d(16)] if norm else []), *layers[2:])


def pytorch_lazy(num_classes, unused: bool = False):
    import torch.nn as nn

    model = nn.Sequential(nn.LazyConv2d(4, 2), nn.LazyBatchNorm2d(), nn.Flatten(), nn.LazyLinear(num_classes))
    model.register_module("spare", nn.LazyLinear(2))
    forward = nn.Sequential(*list(model.children())[:4]).forward
    model.forward = forward
    if not unused:
        del model.spare
    return model


def keras_dropout(input_shape, num_classes, rate: float = 0.5, norm: bool = True):
    import keras
    from keras import layers

    middle = [layers.BatchNormalization()] if norm else []
    own = [layers.Flatten(), layers.Dense(16), *middle, layers.Dropout(rate), layers.Dense(num_classes)]
    return keras.Sequential([keras.Input(input_shape), *own])


def keras_linear(input_shape, num_classes, **given):
    import keras

    last = keras.layers.Dense(num_classes, name="last", **given)
    return keras.Sequential([keras.Input(input_shape), keras.layers.Flatten(), last])


def keras_regular(input_shape, num_classes, activity: bool = False):
    import keras

    l2 = keras.regularizers.L2(0.25)
    return keras_linear(input_shape, num_classes, **{"activity_regularizer" if activity else "kernel_regularizer": l2})


def frozen(input_shape, num_classes):
    import torch.nn as nn

    model = nn.Sequential(nn.Flatten(), nn.Linear(int(np.prod(input_shape)), num_classes))
    return model.requires_grad_(False)


def changing(input_shape, num_classes):
    """Which branch is used depends on the samples; one layer is used twice, one is frozen, one never used."""
    import torch
    import torch.nn as nn

    class Changing(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(int(np.prod(input_shape)), 16)
            self.left, self.right, self.never = (nn.Linear(16, 16) for _ in range(3))
            self.words = nn.Embedding(5, 16, sparse=True)
            self.cold = nn.Linear(16, 16).requires_grad_(False)
            self.last = nn.Linear(16, num_classes)

        def forward(self, x):
            x = x.flatten(1)
            branch = self.left if int(x.sum() * 16) % 2 else self.right
            words = self.words((x[:, 20] * 4).long().clamp(0, 4))
            x = torch.tanh(self.cold(torch.tanh(branch(torch.tanh(self.first(x)))))) + words
            return self.last(torch.tanh(branch(x)))

    return Changing()


def aliased(input_shape, num_classes):
    """Gradients that autograd hands out as views of one memory."""
    import torch
    import torch.nn as nn

    class Aliased(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second, self.third = (
                nn.Parameter(torch.randn(num_classes, int(np.prod(input_shape))) / 8) for _ in range(3)
            )

        def forward(self, x):
            weight = self.first.flatten().tanh() + self.second.flatten() + self.third.flatten()
            return x.flatten(1) @ weight.view_as(self.first).T

    return Aliased()


def checkpointed(input_shape, num_classes):
    """One layer runs twice, each time in a backward pass of its own."""
    import torch.nn as nn
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(int(np.prod(input_shape)), 16), nn.Linear(16, num_classes)
            self.block = nn.Linear(16, 16)

        def forward(self, x):
            x = self.first(x.flatten(1))
            for _ in range(2):
                x = checkpoint(lambda x: self.block(x).tanh(), x, use_reentrant=True)
            return self.last(x)

    return Checkpointed()


def keeping(input_shape, num_classes):
    """Keeps a tensor from its first forward pass, as positions and masks often are."""
    import torch
    import torch.nn as nn

    class Keeping(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.kept = nn.Conv2d(input_shape[0], 4, 3, padding=1), None
            self.last = nn.Linear(4 * input_shape[1] * input_shape[2], num_classes)

        def forward(self, x):
            if self.kept is None:
                self.kept = torch.ones(input_shape[1:], dtype=x.dtype)
            return self.last((self.conv(x) * self.kept).flatten(1))

    return Keeping()


def pytorch_unused(input_shape, num_classes):
    import torch.nn as nn

    class Unused(nn.Module):
        def __init__(self):
            super().__init__()
            self.last, self.never = nn.Linear(int(np.prod(input_shape)), num_classes), nn.Linear(3, 3, bias=False)

        def forward(self, x):
            return self.last(x.flatten(1))

    return Unused()


def keras_unused(input_shape, num_classes):
    import keras

    class Unused(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.never = self.add_weight(shape=(3, 3), initializer="glorot_uniform", name="never")

        def call(self, x):
            return x

    own = [keras.layers.Flatten(), Unused(), keras.layers.Dense(num_classes)]
    return keras.Sequential([keras.Input(input_shape), *own])


def broken(input_shape, num_classes):
    raise ValueError("hidden must be even")


def bad_labels():
    inputs = np.zeros((8, 2), np.float32)
    return (inputs, np.arange(8)), (inputs, np.arange(8) + 5)


def two_samples():
    inputs = np.zeros((2, 3), np.float32)
    return (inputs, np.arange(2)), (inputs, np.arange(2))


# ---- convolution, batch normalization, pooling, dense layer: the same numbers in both frameworks


def pytorch_norm(input_shape, num_classes):
    import torch.nn as nn

    channels, height, width = input_shape
    model = nn.Sequential()
    model.add_module("conv", nn.Conv2d(channels, 6, 3, bias=False))  # the mean takes it away, only rounding is left
    model.add_module("norm", nn.BatchNorm2d(6, eps=1e-3, momentum=0.1))
    model.add_module("relu", nn.ReLU())
    model.add_module("pool", nn.MaxPool2d(2))
    model.add_module("flat", nn.Flatten())
    model.add_module("fc", nn.Linear(6 * ((height - 2) // 2) * ((width - 2) // 2), num_classes))
    model.grid = (6, (height - 2) // 2, (width - 2) // 2)
    return model


def keras_norm(input_shape, num_classes):
    import keras
    from keras import layers

    inputs = keras.Input(input_shape)
    x = layers.Conv2D(6, 3, use_bias=False, name="conv")(inputs)
    x = layers.BatchNormalization(momentum=0.9, name="norm")(x)
    x = layers.Flatten()(layers.MaxPooling2D(2)(layers.ReLU()(x)))
    return keras.Model(inputs, layers.Dense(num_classes, name="fc")(x), name="norm")


def _plain(path, x) -> tuple:
    """Of embeddings and dense layers in PyTorch."""
    layer, _, own = path.rpartition(".")
    if own == "bias":
        return f"{layer}.bias", None, None, tuple(x.shape)
    if layer in ("words", "kinds"):
        return f"{layer}.embedding", None, None, tuple(x.shape)
    return f"{layer}.kernel", None, (1, 0), tuple(x.shape)[::-1]


def neutral(model) -> dict[str, tuple]:
    if getattr(model, "name", "") == "units":
        return {v.path: (v.path.removeprefix("head/"), None, None, tuple(v.shape)) for v in model.variables}
    if hasattr(model, "units"):
        out, into = model[1].weight.shape
        return {"1.weight": ("kernel", None, (1, 0), (into, out)), "1.bias": ("bias", None, None, (out,))}
    if hasattr(model, "words"):
        return {path: _plain(path, x) for path, x in model.named_parameters()}
    if any(v.path.endswith("/embeddings") for v in getattr(model, "variables", ())):
        paths = {v.path: v.path.replace("/embeddings", "/embedding").replace("/", ".") for v in model.variables}
        return {v.path: (paths[v.path], None, None, tuple(v.shape)) for v in model.variables}
    if getattr(model, "name", "") == "norm":
        new = {"gamma": "scale", "beta": "bias", "moving_mean": "mean", "moving_variance": "variance"}
        found = {}
        for v in model.variables:
            layer, own = v.path.split("/")
            found[v.path] = (f"{layer}.{new.get(own, own)}", None, None, tuple(v.shape))
        return found
    if not hasattr(model, "grid"):
        return {}
    out, into, height, width = model.conv.weight.shape
    classes, size = model.fc.weight.shape
    found = {
        "conv.weight": ("conv.kernel", None, (2, 3, 1, 0), (height, width, into, out)),
        "fc.weight": ("fc.kernel", (classes, *model.grid), (2, 3, 1, 0), (size, classes)),
        "fc.bias": ("fc.bias", None, None, (classes,)),
    }
    new = {"weight": "scale", "bias": "bias", "running_mean": "mean", "running_var": "variance"}
    return found | {f"norm.{own}": (f"norm.{name}", None, None, (out,)) for own, name in new.items()}


def wrong_shape(input_shape, num_classes):
    """Its first step fails."""
    import torch.nn as nn

    return nn.Sequential(nn.Flatten(), nn.Linear(int(np.prod(input_shape)), 2 * num_classes), nn.Unflatten(1, (2, -1)))


def pytorch_softmax(input_shape, num_classes):
    import torch.nn as nn

    return nn.Sequential(nn.Flatten(), nn.Linear(int(np.prod(input_shape)), num_classes), nn.Softmax(-1))


def keras_softmax(input_shape, num_classes):
    import keras

    layers = [keras.Input(input_shape), keras.layers.Flatten(), keras.layers.Dense(num_classes, activation="softmax")]
    return keras.Sequential(layers)


def pytorch_sigmoid(input_shape, last=True):
    import torch.nn as nn

    layers = [nn.Flatten(), nn.Linear(int(np.prod(input_shape)), 1)]
    return nn.Sequential(*layers, *[nn.Sigmoid()] * last)


def keras_sigmoid(input_shape, last=True):
    import keras

    layers = [keras.Input(input_shape), keras.layers.Flatten()]
    return keras.Sequential([*layers, keras.layers.Dense(1, activation="sigmoid" if last else None)])


def odd_digits():
    """Photos of digits; whether they are odd."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    x, y = (digits.images / 16).astype(np.float32)[..., None], (digits.target % 2).astype(np.float32)
    return (x[:200], y[:200]), (x[200:300], y[200:300])


def pytorch_one_output(input_shape, num_classes):
    import torch.nn as nn

    return nn.Sequential(nn.Flatten(), nn.Linear(int(np.prod(input_shape)), 1))


def keras_one_output(input_shape, num_classes):
    import keras

    return keras.Sequential([keras.Input(input_shape), keras.layers.Flatten(), keras.layers.Dense(1)])


def pytorch_pair(input_shape, num_classes):
    import torch.nn as nn

    class Pair(nn.Linear):
        def forward(self, x):
            return super().forward(x.flatten(1)), x

    return Pair(int(np.prod(input_shape)), num_classes)


def pytorch_logits(input_shape, num_classes, named: bool = True):
    import torch.nn as nn

    class Output(dict):
        """A dict whose items are attributes, too, as of transformers."""

        __getattr__ = dict.__getitem__

    class Model(nn.Linear):
        def forward(self, x):
            logits = super().forward(x.flatten(1))
            return Output(logits=logits, hidden=(x,)) if named else logits

    return Model(int(np.prod(input_shape)), num_classes)


def keras_pair(input_shape, num_classes):
    import keras

    inputs = keras.Input(input_shape)
    return keras.Model(inputs, [keras.layers.Dense(num_classes)(keras.layers.Flatten()(inputs)), inputs])


# ---- two inputs by name


def pytorch_two_inputs(num_classes, words=7):
    import torch.nn as nn

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.head = nn.Embedding(words, 4), nn.Linear(16, num_classes)

        def forward(self, tokens, image):
            return self.head(image.flatten(1)) + self.words(tokens).sum((1, 2))[:, None]

    return Two()


def keras_two_inputs(input_shape, num_classes, words=7):
    import keras
    from keras import layers, ops

    class Sum(layers.Layer):
        def call(self, x):
            return ops.sum(x, axis=(1, 2))[:, None]

    tokens = keras.Input((5,), dtype="int64", name="tokens")
    image = keras.Input((4, 4, 1), name="image")
    summed = Sum()(layers.Embedding(words, 4, name="words")(tokens))
    logits = layers.Dense(num_classes, name="head")(layers.Flatten()(image))
    return keras.Model({"tokens": tokens, "image": image}, layers.Add()([logits, summed]))


# ---- tasks of one's own: the same functions for NumPy, PyTorch and TensorFlow


def weighted(outputs, labels):
    """A larger label counts more, a negative one not at all."""
    return (outputs - labels) ** 2, labels * (labels + 0.0 > 0.0) if hasattr(labels, "astype") else _positive(labels)


def cross_entropy(outputs, labels):
    """PyTorch's, of whole numbers."""
    import torch

    return torch.nn.functional.cross_entropy(outputs, labels.long(), reduction="none")


def _positive(labels):
    if type(labels).__module__.startswith("torch"):
        return labels.clamp(min=0)
    import tensorflow as tf

    return tf.maximum(labels, 0)


def weighted_by_outputs(outputs, labels):
    return (outputs - labels) ** 2, abs(outputs)


def mean_loss(outputs, labels):
    return ((outputs - labels) ** 2)[0, 0]


def pytorch_units(input_shape, num_classes=None, units=None):
    import torch.nn as nn

    model = nn.Sequential(nn.Flatten(), nn.Linear(int(np.prod(input_shape)), units or num_classes))
    model.units = True
    return model


def keras_units(input_shape, num_classes=None, units=None):
    import keras

    inputs = keras.Input(input_shape)
    x = keras.layers.Flatten()(inputs)
    return keras.Model(inputs, keras.layers.Dense(units or num_classes, name="head")(x), name="units")


# ---- two inputs, two outputs: masked words and what comes next

LENGTH, WORDS = 8, 11


def masked_words(count: int = 103):
    """Half of the samples have few words to guess, some none."""
    rng = np.random.default_rng(5)

    def part(n):
        tokens = rng.integers(0, WORDS, (n, LENGTH), np.int32)
        words = np.where(
            rng.random((n, LENGTH)) < np.where(np.arange(n) % 2, 0.1, 0.8)[:, None], 3 * tokens % WORDS, -100
        )
        inputs = {"tokens": tokens, "segments": (np.arange(LENGTH) > 3) + np.zeros((n, 1), np.uint8)}
        return inputs, {"words": words, "next": tokens[:, 0] % 2}

    return part(count), part(29)


def masked_only():
    """The words alone, of one input."""
    return tuple((inputs["tokens"], labels["words"]) for inputs, labels in masked_words())


def pytorch_words(input_shape, num_classes, width: int = 6):
    import torch.nn as nn

    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.kinds = nn.Embedding(num_classes["words"], width), nn.Embedding(2, width)
            self.guess, self.next = nn.Linear(width, num_classes["words"]), nn.Linear(width, num_classes["next"])

        def forward(self, tokens, segments):
            x = (self.words(tokens) + self.kinds(segments)).tanh()
            return {"words": self.guess(x), "next": self.next(x.mean(1))}

    return Words()


def keras_words(input_shape, num_classes, width: int = 6):
    import keras
    from keras import layers

    inputs = {name: keras.Input(shape, dtype="int64", name=name) for name, shape in input_shape.items()}
    words = layers.Embedding(num_classes["words"], width, name="words")(inputs["tokens"])
    x = layers.Activation("tanh")(layers.Add()([words, layers.Embedding(2, width, name="kinds")(inputs["segments"])]))
    following = layers.Dense(num_classes["next"], name="next")(layers.GlobalAveragePooling1D()(x))
    return keras.Model(inputs, {"words": layers.Dense(num_classes["words"], name="guess")(x), "next": following})


def curves(count: int = 97):
    """A regression of three numbers, some of which do not count."""
    rng = np.random.default_rng(6)
    parts = [rng.normal(size=(n, 5)).astype(np.float32) for n in (count, 31)]
    return tuple((x, np.sin(x[:, :3]) + x[:, 2:]) for x in parts)


def bytes_of_digits():
    """700 real images (8, 8, 1) as bytes, 100 of them for validation."""
    from sklearn.datasets import load_digits

    found = load_digits()
    images, labels = (found.images[:700, ..., None] * 15.9375).astype(np.uint8), found.target[:700]
    return (images[:600], labels[:600]), (images[600:], labels[600:])


def uneven_digits():
    """The same, of which the training part has 3 to 60 samples of a class."""
    (images, labels), val = bytes_of_digits()
    kept = np.concatenate([np.flatnonzero(labels == digit)[: 3 + 7 * digit] for digit in range(10)])
    return (images[kept], labels[kept]), val


def strokes(count: int = 400, at_places: bool = False):
    """Real digits as the numbers of their darkest pixels, 4 to 18 of 64: samples of different lengths."""
    from sklearn.datasets import load_digits

    found = load_digits()
    images, labels = found.images.reshape(-1, 64)[:count], found.target[:count]
    samples = [np.flatnonzero(image > 13) + 1 for image in images]
    # At places: whether the next pixel to the right is dark, too.
    kept = [np.isin(one + 1, one).astype(np.int64) for one in samples] if at_places else labels
    cut = count * 4 // 5
    return (samples[:cut], kept[:cut]), (samples[cut:], kept[cut:])


def strokes_at_places():
    return strokes(at_places=True)


class Strokes:
    """The same as an object that gives samples by their numbers."""

    num_classes, fingerprint = 10, "strokes"

    def __init__(self, samples, labels):
        self.samples, self.labels, self.lengths = samples, labels, np.array([len(one) for one in samples])

    def __len__(self):
        return len(self.samples)

    def fetch(self, indices):
        return [self.samples[k] for k in indices], np.array([self.labels[k] for k in indices])


def fetched_strokes():
    return tuple(Strokes(*part) for part in strokes())


def pytorch_strokes(input_shape, num_classes, max_length, width: int = 8):
    import torch.nn as nn

    assert input_shape == {"input": (None,), "mask": (None,)} and max_length >= 18

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.head = nn.Embedding(66, width), nn.Linear(width, num_classes)

        def forward(self, input, mask):
            x = self.words(input).tanh()
            if num_classes > 2:
                x = (x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
            return self.head(x)

    return Model()


def keras_strokes(input_shape, num_classes, width: int = 8):
    import keras
    from keras import layers

    inputs = {
        name: keras.Input(shape, dtype="int64" if name == "input" else "bool", name=name)
        for name, shape in input_shape.items()
    }
    x = layers.Activation("tanh")(layers.Embedding(66, width, name="words")(inputs["input"]))
    if num_classes > 2:
        x = layers.GlobalAveragePooling1D()(x, mask=inputs["mask"])
    return keras.Model(inputs, layers.Dense(num_classes, name="head")(x))


class Shorter:
    """A stream that ends sooner on rank 1 than it says."""

    fingerprint = "digits"
    num_classes = 10

    def __init__(self, images, labels):
        self.images, self.labels = images, labels

    def __len__(self):
        return len(self.labels)

    def __iter__(self):
        import hvd_train

        samples = zip(self.images, self.labels, strict=True)
        return itertools.islice(samples, 300 if hvd_train.world().rank == 1 else None)


def streams():
    (images, labels), val = bytes_of_digits()
    return Shorter(images, labels), val


def noisy(image, rng, most):
    """A transform: up to ``most`` is added to each pixel."""
    return np.minimum(image.astype(np.int64) + rng.integers(0, most, image.shape), 255).astype(image.dtype)


def failing(image, rng):
    """A transform that fails on a few samples, which one rank or the other meets after some steps."""
    if rng.random() < 0.005:
        raise ValueError("an image of 0 bytes")
    return image


def pytorch_of_images(num_classes):
    import torch

    return torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3), torch.nn.Flatten(), torch.nn.Linear(2 * 4 * 4, num_classes))


def keras_of_images(num_classes):
    import keras

    return keras.Sequential([keras.layers.Conv2D(2, 3), keras.layers.Flatten(), keras.layers.Dense(num_classes)])


def keras_subclass(num_classes, early: bool = False, aux: bool = False):
    """A subclass of Model, whose layers get their weights in the first call.

    ``early``: it has a weight of its own before. ``aux``: a layer that is called in training alone.
    """
    import keras

    class Subclass(keras.Model):
        def __init__(self):
            super().__init__()
            self.flatten, self.hidden = keras.layers.Flatten(), keras.layers.Dense(5, "tanh")
            self.head, self.aux = keras.layers.Dense(num_classes), keras.layers.Dense(num_classes) if aux else None
            if early:
                self.scale = self.add_weight(shape=(), name="scale", initializer="ones")

        def call(self, x, training=False):
            y = self.hidden(self.flatten(x))
            z = self.head(y * self.scale) if early else self.head(y)
            return z + self.aux(y) if aux and training else z

    return Subclass()


def keras_own_loss(num_classes):
    """A model with a loss of its own, as Keras' guide writes it."""
    import keras

    class Penalized(keras.Sequential):
        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            return keras.ops.mean(y_pred)

    return Penalized([keras.layers.Flatten(), keras.layers.Dense(num_classes)])


def keras_masking(num_classes, sequences=True):
    """A recurrent network over the rows of an image, which masks those of zeros."""
    import keras

    layers = keras.layers
    rows = [layers.Reshape((4, -1)), layers.Masking(0.0), layers.GRU(4, return_sequences=sequences)]
    pool = layers.Lambda(lambda x: x[:, 0], mask=lambda x, mask: mask[:, 0]) if sequences else layers.Identity()
    return keras.Sequential([*rows, pool, layers.Dense(num_classes)])


def with_training_step(num_classes):
    """A module as Lightning's are."""
    import torch

    class Module(torch.nn.Sequential):
        def training_step(self, batch, index):
            return 0.0

    return Module(torch.nn.Flatten(), torch.nn.Linear(64, num_classes))


def keras_towers(input_shape, num_classes):
    """Two models with layers of one name, and so variables of one path."""
    import keras

    def tower(x):
        inputs = keras.Input(input_shape)
        return keras.Model(inputs, keras.layers.Dense(num_classes, name="head")(keras.layers.Flatten()(inputs)))(x)

    x = keras.Input(input_shape)
    return keras.Model(x, keras.layers.Add()([tower(x), tower(x)]))


def of_first_class(outputs, labels):
    """A loss of probabilities."""
    return (outputs[:, 0] - 1) ** 2

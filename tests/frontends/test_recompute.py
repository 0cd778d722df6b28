"""``model.recompute``: the bits of the same training with kept activations, in less memory."""

from __future__ import annotations

import importlib.util

import pytest
from safetensors.numpy import load_file

import hvd_train
from hvd_train.errors import ConfigError

FRAMEWORKS = [
    name for name, module in (("pytorch", "torch"), ("tensorflow", "keras")) if importlib.util.find_spec(module)
]
SHORT = {"precision": 64, "global_batch_size": 50, "max_steps": 6, "tensorboard": False, "optim": {"lr": 0.02}}
TEXT = {"name": "text", "path": "LICENSE", "sequence_length": 16}
GPT = {"name": "gpt", "width": 16, "depth": 3, "heads": 2, "dropout": 0.2}
# {name: (what is trained, recompute)}
JOBS = {
    "gpt": ({"model": GPT, "data": TEXT, "accumulate_grad_batches": 2}, True),
    "norm": ({"model": {"name": "resnet", "width": 4, "blocks": [2, 1]}, "data": {"name": "digits"}}, True),
    "norm-alone": (
        {"model": {"name": "resnet", "width": 4, "blocks": [2, 1]}, "data": {"name": "digits"}, "sync_batchnorm": True},
        True,
    ),
    "mixed": (
        {"model": GPT, "data": TEXT, "precision": "bf16-mixed", "optim": {"name": "adam", "lr": 0.01}, "max_steps": 12},
        True,
    ),
    "states": ({"model": {"name": f"{__name__}:{{framework}}_states"}, "data": {"name": "digits"}}, True),
    "nested": ({"model": {"name": f"{__name__}:{{framework}}_nested"}, "data": {"name": "digits"}}, ["*inner*"]),
    "later": (
        {
            "model": {"name": "resnet", "width": 4, "blocks": [2, 1]},
            "data": {"name": "digits"},
            "limit_train_batches": 3,
            "optim": {"lr": 0.02, "groups": [{"match": "stem*", "freeze": True, "until_epoch": 1}]},
        },
        True,
    ),
    "own": ({"model": {"name": f"{__name__}:{{framework}}_blocks"}, "data": {"name": "digits"}}, True),
    "patterns": ({"model": {"name": f"{__name__}:{{framework}}_blocks"}, "data": {"name": "digits"}}, ["*first*"]),
    "classifier": (
        {
            "model": {
                "name": "text_classifier",
                "width": 8,
                "heads": 2,
                "depth": 2,
                "dropout": 0.3,
                "vocabulary_size": 30,
            },
            "data": {"name": "tests.frontends.test_recompute:texts", "lengths": {"max_length": 24, "block": 64}},
        },
        True,
    ),
}


def texts():
    import numpy as np

    rng = np.random.default_rng(0)

    def part(count):
        tokens = [rng.integers(1, 30, rng.integers(3, 24)) for _ in range(count)]
        return {"tokens": tokens}, np.array([int(x.sum()) % 3 for x in tokens])

    return part(300), part(40)


def pytorch_states(num_classes):
    """Statistics of its own, of an instance normalization, and the vectors of a spectral norm."""
    import torch

    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.dense = torch.nn.utils.parametrizations.spectral_norm(torch.nn.Linear(64, 64))
            self.norm = torch.nn.InstanceNorm1d(8, track_running_stats=True)
            self.register_buffer("mean", torch.zeros(64))

        def forward(self, x):
            self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
            x = x + torch.tanh(self.dense(x - self.mean.clone()))
            return self.norm(x.reshape(-1, 8, 8)).flatten(1)

    layers = [torch.nn.Flatten(), Block(), Block(), torch.nn.Linear(64, num_classes)]
    return torch.nn.Sequential(*layers)


def tensorflow_states(input_shape, num_classes):
    import keras

    class Block(keras.layers.Layer):
        def __init__(self, **more):
            super().__init__(**more)
            self.dense = keras.layers.SpectralNormalization(keras.layers.Dense(64))

        def build(self, shape):
            self.dense.build(shape)
            self.mean = self.add_weight(shape=(64,), initializer="zeros", trainable=False, name="mean")

        def call(self, x, training=None):
            if training:
                self.mean.assign(0.9 * self.mean + 0.1 * keras.ops.mean(keras.ops.stop_gradient(x), 0))
            return x + keras.ops.tanh(self.dense(x - self.mean, training=training))

        def compute_output_shape(self, shape):
            return shape

    inputs = keras.Input(input_shape)
    x = keras.layers.Flatten()(inputs)
    for _ in range(2):
        x = Block()(x)
    return keras.Model(inputs, keras.layers.Dense(num_classes)(x))


def pytorch_nested(num_classes):
    return pytorch_states(num_classes).append(inner_of_pytorch())


def inner_of_pytorch():
    import torch

    class Outer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = torch.nn.Sequential(torch.nn.Linear(10, 10), torch.nn.Dropout(0.5))

        def forward(self, x):
            return self.inner(x)

    return Outer()


def tensorflow_nested(input_shape, num_classes):
    """A layer that is always called as in an evaluation, and one behind a mask that travels with the tensor."""
    import keras

    class Outer(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.still = keras.Sequential([keras.layers.Dense(64), keras.layers.Dropout(0.5)], name="inner_still")
            self.masking = keras.layers.Masking()
            self.hidden = Hidden(name="inner_hidden")

        def call(self, x):
            x = self.still(x, training=False)
            return self.hidden(self.masking(keras.ops.relu(keras.ops.reshape(x, (-1, 8, 8)) - 0.5)))

    class Hidden(keras.layers.Layer):
        def __init__(self, **more):
            super().__init__(**more)
            self.lstm = keras.layers.LSTM(8)

        def call(self, x):
            return self.lstm(x)

    inputs = keras.Input(input_shape)
    x = Outer()(keras.layers.Flatten()(inputs))
    return keras.Model(inputs, keras.layers.Dense(num_classes)(x))


def noisy(num_classes):
    import numpy as np
    import torch

    class Noise(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.dense, self.rng = torch.nn.Linear(64, 64), np.random.default_rng(0)

        def forward(self, x):
            return self.dense(x * torch.from_numpy(self.rng.normal(size=tuple(x.shape))))

    return torch.nn.Sequential(torch.nn.Flatten(), Noise(), Noise(), torch.nn.Linear(64, num_classes))


def noisy_keras(input_shape, num_classes):
    import keras
    import tensorflow as tf

    class Noise(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(64)

        def build(self, shape):
            self.dense.build(shape)

        def call(self, x):
            return self.dense(x * tf.random.normal(tf.shape(x), dtype=x.dtype))

        def compute_output_shape(self, shape):
            return shape

    inputs = keras.Input(input_shape)
    x = Noise()(Noise()(keras.layers.Flatten()(inputs)))
    return keras.Model(inputs, keras.layers.Dense(num_classes)(x))


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_layers_that_draw_numbers_by_themselves_are_refused(tmp_path, framework):
    """Their gradients were of other numbers than their outputs, without a word."""
    name = f"{__name__}:{'noisy' if framework == 'pytorch' else 'noisy_keras'}"
    config = SHORT | {"framework": framework, "run_dir": str(tmp_path), "data": {"name": "digits"}}
    with pytest.raises(ConfigError, match=r"layer \S+ gives other values when backward computes it again"):
        hvd_train.fit(config | {"model": {"name": name, "recompute": True}})


def pytorch_blocks(num_classes):
    import torch

    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.dense, self.norm = torch.nn.Linear(64, 64), torch.nn.BatchNorm1d(64)

        def forward(self, x, scale=1.0):
            return x + scale * torch.nn.functional.dropout(torch.relu(self.norm(self.dense(x))), 0.3, self.training)

    class Blocks(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.others = Block(), torch.nn.ModuleList([Block(), Block()])
            self.last = torch.nn.Linear(64, num_classes)

        def forward(self, x):
            x = self.first(x.flatten(1), scale=0.5)
            for one in self.others:
                x = one(x)
            return self.last(x)

    return Blocks()


def tensorflow_blocks(input_shape, num_classes):
    import keras

    class Block(keras.layers.Layer):
        def __init__(self, **more):
            super().__init__(**more)
            self.dense, self.norm = keras.layers.Dense(64), keras.layers.BatchNormalization()
            self.dropout = keras.layers.Dropout(0.3)

        def build(self, shape):
            self.dense.build(shape)
            self.norm.build(shape)

        def call(self, x):
            return x + self.dropout(keras.ops.relu(self.norm(self.dense(x))))

        def compute_output_shape(self, shape):
            return shape

    inputs = keras.Input(input_shape)
    x = Block(name="first")(keras.layers.Flatten()(inputs))
    for _ in range(2):
        x = Block()(x)
    return keras.Model(inputs, keras.layers.Dense(num_classes)(x))


def trained(framework, name, run_dir, recompute):
    config, _ = JOBS[name]
    if recompute is True and (framework, name) == ("tensorflow", "classifier"):
        recompute = ["blocks.*.attention"]  # Keras' layers are not in blocks there
    model = {key: x.format(framework=framework) if key == "name" else x for key, x in config["model"].items()}
    config = (
        SHORT | config | {"framework": framework, "run_dir": str(run_dir), "model": model | {"recompute": recompute}}
    )
    hvd_train.fit(config)
    (last,) = (run_dir / "checkpoints").glob(f"step-{config['max_steps']:08}")
    return load_file(last / "weights.safetensors")


@pytest.mark.parametrize("name", JOBS)
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_training_has_the_same_weights(tmp_path, framework, name):
    """With the same random numbers, and statistics that count each batch once. TensorFlow's graphs round elsewhere."""
    kept = trained(framework, name, tmp_path / "kept", False)
    again = trained(framework, name, tmp_path / "again", JOBS[name][1])
    assert kept.keys() == again.keys()
    tolerance = 0 if framework == "pytorch" else 5e-3 if name == "mixed" else 1e-12
    assert max(abs(kept[key] - x).max() for key, x in again.items()) <= tolerance


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_layers_run_again(tmp_path, framework, monkeypatch):
    calls = []
    if framework == "pytorch":
        recompute = pytest.importorskip("hvd_train.frontends.pytorch.recompute")
        given = recompute._with_buffers
        monkeypatch.setattr(recompute, "_with_buffers", lambda before: calls.append(before) or given(before))
    else:
        recompute = pytest.importorskip("hvd_train.frontends.tensorflow.recompute")
        given = recompute.again
        monkeypatch.setattr(recompute, "again", lambda *more: calls.append(more) or given(*more))
    trained(framework, "gpt", tmp_path, True)
    assert len(calls) >= 3


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_what_matches_nothing_is_refused(tmp_path, framework):
    config = SHORT | {"framework": framework, "run_dir": str(tmp_path)}
    mlp = {"name": f"tests.own_models:{'pytorch' if framework == 'pytorch' else 'keras'}_dropout"}
    with pytest.raises(ConfigError, match="'nothing' matches none of the layers") as error:
        hvd_train.fit(config | {"model": mlp | {"recompute": ["nothing"]}, "data": {"name": "digits"}})
    assert "model.recompute" in str(error.value)
    with pytest.raises(ConfigError, match="the model has no repeated blocks"):
        hvd_train.fit(config | {"model": mlp | {"recompute": True}, "data": {"name": "digits"}})


def test_a_layer_is_pickled_as_its_own_class():
    torch = pytest.importorskip("torch")
    import copy
    import pickle

    from hvd_train.frontends.pytorch import recompute

    model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(2, 2)) for _ in range(2)))
    assert recompute.take(model, True) == ["0", "1"]
    assert type(model[0]) is not torch.nn.Sequential
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(other[0]) is torch.nn.Sequential

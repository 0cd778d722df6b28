"""``model.compile``: compiled models train as they do uncompiled, and what cannot be compiled is said in a line."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import hvd_train
from hvd_train.errors import ConfigError

FRAMEWORKS = [
    name for name, module in (("pytorch", "torch"), ("tensorflow", "keras")) if importlib.util.find_spec(module)
]
# What PyTorch's compiler traces without generating code: seconds less, and the same as far as our side goes.
TRACED = {"pytorch": {"backend": "aot_eager"}, "tensorflow": True}
SHORT = {"precision": 64, "global_batch_size": 50, "max_steps": 31, "tensorboard": False, "optim": {"lr": 0.02}}
MLP = {"model": {"name": "mlp", "hidden": [16]}, "data": {"name": "digits"}}
KINDS = {"pytorch": "pytorch", "tensorflow": "keras"}
# {name: what is trained}; {kind} is the framework's name for models of tests/own_models.
JOBS = {
    "ends-of-epochs": MLP | {"global_batch_size": 479, "max_steps": 9},
    "dropout": {"model": {"name": "tests.own_models:{kind}_dropout", "norm": False}, "data": {"name": "digits"}},
    "norm": {"model": {"name": "tests.own_models:{kind}_norm"}, "data": {"name": "digits"}, "global_batch_size": 479},
    "gpt": {
        "model": {"name": "gpt", "width": 16, "depth": 1, "heads": 2},
        "data": {"name": "text", "path": "LICENSE", "sequence_length": 16},
    },
    "lengths": {
        "model": {"name": "tests.own_models:{kind}_strokes"},
        "data": {"name": "tests.own_models:fetched_strokes", "lengths": {"max_length": 24, "block": 64}},
        "accumulate_grad_batches": 2,
    },
    "later": MLP
    | {
        "limit_train_batches": 3,
        "max_steps": 9,
        "optim": {"lr": 0.1, "groups": [{"match": "fc2.*", "freeze": True, "until_epoch": 1}]},
    },
    "swa": {"model": {"name": "tests.own_models:{kind}_norm"}, "data": {"name": "digits"}}
    | {"max_steps": None, "max_epochs": 2, "swa": {"epochs": 2}, "limit_train_batches": 4},
    "skip": MLP | {"on_nonfinite": "skip"},
    "overflow": MLP | {"precision": "bf16-mixed"},
    "step": MLP | {"task": {"step": "tests.frontends.test_compiled:{kind}_step"}},
}


def pytorch_step(model, inputs, labels):
    import torch

    outputs = model(torch.cat([inputs, inputs.flip(-1)]))
    each = torch.nn.functional.cross_entropy(outputs, torch.cat([labels, labels]), reduction="none")
    return each.reshape(2, -1).mean(0)


def keras_step(model, inputs, labels, training):
    import keras

    outputs = model(keras.ops.concatenate([inputs, keras.ops.flip(inputs, 1)]), training=training)
    each = keras.losses.sparse_categorical_crossentropy(keras.ops.tile(labels, [2]), outputs, from_logits=True)
    return keras.ops.mean(keras.ops.reshape(each, (2, -1)), 0)


def job(framework: str, name: str, run_dir: Path, **model) -> dict:
    config = {"framework": framework, "run_dir": str(run_dir)} | SHORT | JOBS[name]
    named = {key: x.format(kind=KINDS[framework]) if isinstance(x, str) else x for key, x in config["model"].items()}
    if "task" in config:
        config["task"] = {key: x.format(kind=KINDS[framework]) for key, x in config["task"].items()}
    return config | {"model": named | model}


def weights(run_dir: Path) -> dict[str, np.ndarray]:
    return load_file(max((run_dir / "checkpoints").glob("step-*")) / "weights.safetensors")


def trained(config: dict, **more) -> dict[str, np.ndarray]:
    hvd_train.fit(config, **more)
    return weights(Path(config["run_dir"]))


@pytest.mark.parametrize("name", JOBS)
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_compiled_model_trains_as_it_does_uncompiled(tmp_path, framework, name):
    plain = trained(job(framework, name, tmp_path / "plain"))
    compiled = trained(job(framework, name, tmp_path / "compiled", compile=TRACED[framework]))
    assert plain.keys() == compiled.keys()
    if (framework, name) == ("tensorflow", "dropout"):  # XLA draws other random numbers
        assert any((plain[key] != x).any() for key, x in compiled.items())
        return
    tolerance = 2e-2 if name == "overflow" else 1e-11  # 16 bits round in other places
    for key, x in plain.items():
        np.testing.assert_allclose(compiled[key], x, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_it_is_compiled(tmp_path, framework, monkeypatch):
    seen = []
    if framework == "pytorch":
        import torch
        from torch._dynamo.backends.registry import register_backend

        def backend(graph, inputs):
            seen.append([tuple(x.shape) for x in inputs if isinstance(x, torch.Tensor)])
            return graph

        name = f"seen_{id(seen)}"
        register_backend(backend, name=name)
        config = job(framework, "ends-of-epochs", tmp_path, compile={"backend": name, "fullgraph": True})
        hvd_train.fit(config)
        # Once: not for the two samples that the model is tried with, the last batch of an epoch, or an evaluation.
        assert len(seen) == 1
        assert (479, 1, 8, 8) in seen[0]
        return
    from hvd_train.frontends.tensorflow import graphs

    given = graphs.graph
    monkeypatch.setattr(
        "hvd_train.frontends.tensorflow.model.graph", lambda f, **more: seen.append(more) or given(f, **more)
    )
    hvd_train.fit(job(framework, "ends-of-epochs", tmp_path, compile=True))
    assert seen.count({"jit_compile": True}) == 1


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_resumed_run_has_the_same_bits(tmp_path, framework):
    config = job(framework, "dropout", tmp_path / "whole", compile=TRACED[framework])
    whole = trained(config)
    cut = config | {"run_dir": str(tmp_path / "cut")}
    hvd_train.fit(cut | {"max_steps": 5})
    resumed = trained(cut, resume="last")
    assert all((whole[key] == x).all() for key, x in resumed.items())


def breaking(num_classes):
    import torch

    class Breaking(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.dense = torch.nn.Linear(64, num_classes)

        def forward(self, x):
            torch._dynamo.graph_break()
            return self.dense(x.flatten(1))

    return Breaking()


def in_python(input_shape, num_classes):
    import keras
    import tensorflow as tf

    class InPython(keras.layers.Layer):
        def call(self, x):
            return tf.ensure_shape(tf.numpy_function(lambda array: array, [x], x.dtype), x.shape)

        def compute_output_shape(self, shape):
            return shape

    return keras.Sequential(
        [keras.Input(input_shape), keras.layers.Flatten(), InPython(), keras.layers.Dense(num_classes)]
    )


def test_a_model_that_cannot_be_compiled_is_refused(tmp_path):
    if "pytorch" in FRAMEWORKS:
        config = job("pytorch", "skip", tmp_path) | {
            "model": {"name": f"{__name__}:breaking", "compile": {"fullgraph": True}}
        }
        with pytest.raises(ConfigError, match=r"cannot compile the model: .*\(line \d+ of .*test_compiled.py\)"):
            hvd_train.fit(config)
        config["model"]["compile"] = {"backend": "aot_eager"}
        hvd_train.fit(config, overwrite=True)  # in two parts
        for key in ("backend", "mode"):
            with pytest.raises(ConfigError, match="'nothing' is none of") as error:
                hvd_train.fit(config | {"model": MLP["model"] | {"compile": {key: "nothing"}}}, overwrite=True)
            assert f"model.compile.{key}" in str(error.value)
    if "tensorflow" in FRAMEWORKS:
        config = job("tensorflow", "skip", tmp_path) | {"model": {"name": f"{__name__}:in_python", "compile": True}}
        with pytest.raises(ConfigError, match="XLA cannot compile PyFunc"):
            hvd_train.fit(config, overwrite=True)


def test_what_does_not_go_together_is_refused(tmp_path):
    config = {"framework": "tensorflow", "model": {"name": "mlp", "compile": {"mode": "max-autotune"}}}
    with pytest.raises(ConfigError, match="belongs to framework: pytorch"):
        hvd_train.fit(config)
    for more in ({"pipeline": 2}, {"devices_per_rank": 2}):
        with pytest.raises(ConfigError, match="a whole model is compiled, for one device"):
            hvd_train.fit({"model": {"name": "mlp", "compile": True}, "parallel": more})

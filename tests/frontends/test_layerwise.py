"""Which tensors are vectors for LARS, LAMB, Muon and PowerSGD in both frameworks: those of two axes, too."""

from __future__ import annotations

import pytest

from hvd_train.compression.lowrank import PowerSGD
from tests.frontends.test_contract import FRAMEWORKS, batch, close, everything, opened, stepped

OPTIMIZERS = {
    "lars": {"name": "lars", "momentum": 0.9, "weight_decay": 0.01, "trust_coefficient": 0.02},
    "lamb": {"name": "lamb", "weight_decay": 0.01},
}


def keras_biases(num_classes):
    import keras

    inputs = keras.Input((5, 4))
    x = keras.layers.LayerNormalization(axis=[1, 2], name="norm")(inputs)
    x = keras.layers.MultiHeadAttention(2, 3, name="attention")(x, x)
    return keras.Model(inputs, keras.layers.Dense(num_classes)(keras.layers.GRU(6, name="gru")(x)))


def torch_biases(num_classes):
    import torch

    class Recurrent(torch.nn.GRU):
        def forward(self, x):
            return super().forward(x)[0][:, -1]

    return torch.nn.Sequential(
        torch.nn.LayerNorm((5, 4)), Recurrent(4, 6, batch_first=True), torch.nn.Linear(6, num_classes)
    )


BIASES = {
    "tensorflow": (keras_biases, {"gru.gru_cell.bias": (2, 18), "attention.query.bias": (2, 3), "norm.gamma": (5, 4)}),
    "pytorch": (torch_biases, {"0.weight": (5, 4), "0.bias": (5, 4), "1.bias_ih_l0": (18,)}),
}
# The optimizer that moves vectors alike.
PLAIN = {
    "lars": {"name": "sgd", "momentum": 0.9},
    "lamb": {"name": "adam"},
    "muon": {"name": "adamw", "weight_decay": 0.01},
}


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_biases_and_scales_of_two_axes_are_vectors(framework, name):
    """The bias of Keras' GRU is (2, 3 h), those of attention are (heads, size): they had a ratio and a decay."""
    function, shapes = BIASES[framework]
    optim = OPTIMIZERS.get(name, {"name": "muon", "momentum": 0.9, "weight_decay": 0.01})
    trees = []
    for o in (optim, PLAIN[name]):
        frontend = opened(framework, {"name": f"{__name__}:{function.__name__}"}, o, shape=(5, 4))
        first = everything(frontend)
        trees.append(everything(stepped(frontend, [batch(0, shape=(5, 4))], rate=0.1)))
    for key, shape in shapes.items():
        assert first[f"weights/{key}"].shape == shape and (trees[0][f"weights/{key}"] != first[f"weights/{key}"]).any()
    close(*({key: tree[f"weights/{key}"] for key in shapes} for tree in trees), rtol=1e-9)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_powersgd_sends_a_bias_of_two_axes_whole(framework):
    function, shapes = BIASES[framework]
    frontend = opened(framework, {"name": f"{__name__}:{function.__name__}"}, compressor=PowerSGD(1), shape=(5, 4))
    exchange = frontend.update.exchange
    states = {
        frontend.specs()[i].name: state for (i,), state in zip(exchange.buckets, exchange.init_state(), strict=True)
    }
    assert all(not states[key] for key in shapes if key != "0.weight") and any(states.values())

"""States of models that are no fixed set of real weights: merged and complex ones, first values taken from data."""

from __future__ import annotations

import importlib
import json

import numpy as np
import pytest
from safetensors.numpy import load_file

import hvd_train
from hvd_train.errors import ConfigError
from tests.cli.running import run

torch = pytest.importorskip("torch")
RNG = np.random.default_rng(5)
X = RNG.normal(size=(60, 16)).astype(np.float32)
Y = np.roll(X, 1, axis=1)[:, :4].copy()
SHORT = {"global_batch_size": 12, "max_epochs": 2, "tensorboard": False, "optim": {"lr": 0.1}}


def data():
    return (X[:48], Y[:48]), (X[48:], Y[48:])


class Lora(torch.nn.Linear):
    """Adds A and B to its weight in evaluations, as loralib does."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.A, self.B = torch.nn.Parameter(torch.randn(2, inputs) * 0.3), torch.nn.Parameter(torch.zeros(outputs, 2))
        self.weight.requires_grad, self.merged = False, False

    def train(self, mode: bool = True):
        super().train(mode)
        if mode is self.merged:
            self.weight.data += (self.B @ self.A) * (-1 if mode else 1)
            self.merged = not mode
        return self

    def forward(self, x):
        y = torch.nn.functional.linear(x, self.weight, self.bias)
        return y if self.merged else y + x @ self.A.t() @ self.B.t()


class Rotated(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.last = torch.nn.Linear(16, 4)
        self.register_buffer("turns", torch.polar(torch.ones(8), torch.arange(8) / 3.0), persistent=False)

    def forward(self, x):
        turned = torch.view_as_complex(x.view(-1, 8, 2)) * self.turns
        return self.last(torch.view_as_real(turned).flatten(1))


class ActNorm(torch.nn.Module):
    """Shifts and scales by the first batch that it sees (Kingma and Dhariwal 2018, "Glow")."""

    def __init__(self, only_in_training: bool) -> None:
        super().__init__()
        self.only_in_training = only_in_training
        self.shift, self.scale = torch.nn.Parameter(torch.zeros(16)), torch.nn.Parameter(torch.ones(16))
        self.register_buffer("begun", torch.tensor(False))

    def forward(self, x):
        if not self.begun and (self.training or not self.only_in_training):
            with torch.no_grad():
                self.shift.copy_(-x.mean(0))
                self.scale.copy_(1 / (x.std(0) + 1e-6))
            self.begun.fill_(True)
        return self.scale * (x + self.shift)


class Late(torch.nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.last, self.how = torch.nn.Linear(16, 4), how
        self.register_buffer("centre", None)

    def forward(self, x):
        if self.training and self.how == "buffer":
            self.centre = x.detach().mean(0)
        elif self.training:
            self.last.weight = torch.nn.Parameter(self.last.weight.detach() * 0.9)
        return self.last(x)


class Spectral(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.randn(9, dtype=torch.cfloat))

    def forward(self, x):
        return torch.fft.irfft(torch.fft.rfft(x) * self.w)[:, :4]


def net(kind):
    torch.manual_seed(1)
    nn = torch.nn
    made = {
        "lora": lambda: nn.Sequential(Lora(16, 8), nn.Tanh(), nn.Linear(8, 4)),
        "rotated": Rotated,
        "first": lambda: nn.Sequential(ActNorm(False), nn.Linear(16, 4)),
        "first in training": lambda: nn.Sequential(ActNorm(True), nn.Linear(16, 4)),
        "buffer": lambda: Late("buffer"),
        "weight": lambda: Late("weight"),
        "spectral": Spectral,
    }
    return made[kind]()


def error(outputs, labels):
    return (outputs - labels).abs().mean(1)


def trained(folder, kind, **task):
    config = SHORT | {"run_dir": str(folder), "model": {"name": f"{__name__}:net", "kind": kind}}
    task = {"loss": "mse", "metrics": ["mae"]} | task
    return hvd_train.fit(config | {"data": {"name": f"{__name__}:data"}, "task": task})


@pytest.mark.parametrize("kind", ["lora", "rotated"])
def test_an_evaluation_of_the_checkpoint_has_the_value_of_the_training(tmp_path, kind):
    summary = trained(tmp_path / "run", kind)
    found = json.loads(run("eval", "--run-dir", str(tmp_path / "run")).stdout.splitlines()[-1])
    assert found["loss"] == pytest.approx(summary["val_loss"], rel=1e-6)


def test_complex_buffers_keep_their_imaginary_part(tmp_path):
    """A checkpoint of the turned model has the loss of its weights in a plain loop."""
    summary = trained(tmp_path / "run", "rotated")
    (last,) = (tmp_path / "run" / "checkpoints").glob("step-*8")
    weights = load_file(last / "weights.safetensors")
    model = Rotated()
    for name, p in model.named_parameters():
        p.data = torch.from_numpy(weights[f"weights/{name}"])
    x, y = map(torch.from_numpy, data()[1])
    assert summary["val_loss"] == pytest.approx(float((model(x) - y).detach().square().mean()), rel=1e-5)


@pytest.mark.parametrize("task", [{"metrics": [f"{__name__}:error"]}, {"loss": f"{__name__}:error"}])
def test_passes_that_try_a_model_leave_it_as_it_was(tmp_path, task):
    first, alone = (trained(tmp_path / kind, kind, **task) for kind in ("first", "first in training"))
    assert first["val_loss"] == alone["val_loss"]


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("buffer", "got 'centre' in its first step"),
        ("weight", "replaced its 'weight', a weight that is trained"),
        ("spectral", "the weight w has complex numbers"),
    ],
)
def test_what_no_checkpoint_would_have_is_refused(tmp_path, kind, says):
    with pytest.raises(ConfigError, match=says):
        trained(tmp_path / "run", kind)


KERAS = """
import keras
import numpy as np

RNG = np.random.default_rng(0)
X = (RNG.normal(size=(120, 3)) * [10, 2, 5] + [100, -5, 20]).astype(np.float32)
Y = ((X - X.mean(0)) / X.std(0) @ [1, 2, -1] + 3).astype(np.float32)

def data():
    return (X[:96], Y[:96]), (X[96:], Y[96:])

def normalized(pretrained=True):
    layer = keras.layers.Normalization()
    if pretrained:
        layer.adapt(X[:96])
    inputs = keras.Input((3,))
    return keras.Model(inputs, keras.layers.Dense(1)(layer(inputs)))

def binned(pretrained=True):
    layer = keras.layers.Discretization(num_bins=4, output_mode="one_hot")
    if pretrained:
        layer.adapt(X[:96])
    inputs = keras.Input((3,))
    return keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Flatten()(layer(inputs))))
"""


@pytest.mark.skipif(importlib.util.find_spec("keras") is None, reason="needs Keras")
def test_a_normalization_layer_is_that_of_the_checkpoint_and_bins_are_asked_for(tmp_path):
    (tmp_path / "mine.py").write_text(KERAS)
    ended = {}
    for name in ("normalized", "binned"):
        keys = f"model={{name: 'mine:{name}'}}", "data={name: 'mine:data'}", "task={loss: mse}", "max_epochs=2"
        words = [word for one in (*keys, "framework=tensorflow", "tensorboard=false") for word in ("--set", one)]
        run("fit", "--run-dir", str(tmp_path / name), *words, cwd=tmp_path)
        ended[name] = run("eval", "--run-dir", str(tmp_path / name), cwd=tmp_path, code=None)
    found = json.loads(ended["normalized"].stdout.splitlines()[-1])
    summary = json.loads((tmp_path / "normalized" / "summary.json").read_bytes())
    assert found["loss"] == pytest.approx(summary["val_loss"], rel=1e-6)
    assert ended["binned"].returncode == 2
    assert "has no vocabulary or bins, which are no weights, and so in no checkpoint" in ended["binned"].stderr

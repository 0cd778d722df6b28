"""Models and optimizers of PyTorch that replace tensors (``p.data = x``, ``self.mean = x``) train as if they copied."""

from __future__ import annotations

import numpy as np
import pytest
from safetensors.numpy import load_file

import hvd_train
from hvd_train.errors import ConfigError

torch = pytest.importorskip("torch")
SHORT = {"precision": 64, "global_batch_size": 50, "max_steps": 9, "tensorboard": False, "data": {"name": "digits"}}


class Net(torch.nn.Module):
    """Two layers. ``limits``: the first one's weight is held within a norm; ``centres``: by a running mean."""

    def __init__(self, copies: bool, limits: bool, centres: bool) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(64, 32), torch.nn.Linear(32, 10)
        self.register_buffer("mean", torch.zeros(64))
        self.copies, self.limits, self.centres = copies, limits, centres

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, weight = x.flatten(1), self.first.weight
        if self.training and self.limits:
            limited = torch.renorm(weight.data, p=2, dim=0, maxnorm=0.3)
            if self.copies:
                weight.data.copy_(limited)
            else:
                weight.data = limited
        if self.training and self.centres:
            mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
            if self.copies:
                self.mean.copy_(mean)
            else:
                self.mean = mean
        return self.last(torch.relu(self.first(x - 3 * self.mean)))


def net(copies=True, limits=False, centres=False):
    return Net(copies, limits, centres)


class Assigning(torch.optim.Optimizer):
    """SGD that gives each parameter new memory."""

    def __init__(self, parameters, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    def step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.data = p.data - group["lr"] * p.grad


def assigning(parameters):
    return Assigning(parameters, lr=0.1)


def shrinking():
    class Shrinking(Net):
        def forward(self, x):
            self.mean = self.mean[:-1].clone()
            return self.last(torch.relu(self.first(x.flatten(1))))

    return Shrinking(False, False, False)


def trained(folder, model, **more):
    config = SHORT | {"run_dir": str(folder), "optim": {"lr": 0.1, "momentum": 0.0}} | more
    summary = hvd_train.fit(config | {"model": {"name": f"{__name__}:net"} | model})
    (last,) = (folder / "checkpoints").glob("step-*9")
    return summary, load_file(last / "weights.safetensors")


@pytest.mark.parametrize("kind", ["limits", "centres"])
def test_a_forward_that_replaces_a_tensor_trains_as_one_that_copies(tmp_path, kind):
    (one, copied), (other, replaced) = (
        trained(tmp_path / str(copies), {"copies": copies, kind: True}) for copies in (True, False)
    )
    assert copied.keys() == replaced.keys() and one["val_loss"] == other["val_loss"]
    for key, x in copied.items():
        np.testing.assert_array_equal(x, replaced[key], err_msg=key)
    if kind == "centres":
        assert abs(replaced["statistics/mean"]).max() > 0.1
    else:
        assert np.linalg.norm(replaced["weights/first.weight"], axis=1).max() < 0.5


@pytest.mark.parametrize("ema", [{}, {"ema": {"decay": 0.5}}])
def test_an_optimizer_that_replaces_weights_trains_as_sgd(tmp_path, ema):
    sgd, plain = trained(tmp_path / "sgd", {}, **ema)
    own, assigned = trained(tmp_path / "own", {}, optim={"name": f"{__name__}:assigning", "lr": 0.1}, **ema)
    assert own["val_loss"] == pytest.approx(sgd["val_loss"], rel=1e-12)
    for key, x in plain.items():
        np.testing.assert_allclose(assigned[key], x, rtol=1e-12, atol=1e-15, err_msg=key)


def test_a_buffer_of_another_shape_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"mean had the shape \(64,\) and now has"):
        hvd_train.fit(SHORT | {"run_dir": str(tmp_path / "run"), "model": {"name": f"{__name__}:shrinking"}})

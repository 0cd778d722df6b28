"""Products of oneDNN in large linear layers: the numbers of PyTorch's own, up to rounding, in all that may be asked."""

from __future__ import annotations

import copy
import io

import numpy as np
import pytest

from hvd_train.config import FrontEndConfig, load_config
from hvd_train.data.catalog import open_data
from hvd_train.frontends.serial import Serial
from hvd_train.protocol import Groups

torch = pytest.importorskip("torch")
linear = pytest.importorskip("hvd_train.frontends.pytorch.linear")
if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
    pytest.skip("PyTorch has no oneDNN", allow_module_level=True)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Small layers count as large, on any processor."""
    monkeypatch.setattr(linear, "SMALLEST", 100)
    monkeypatch.setattr(linear, "WEIGHTS", 100)
    monkeypatch.setattr(linear, "helps", lambda: True)
    monkeypatch.setattr(torch.nn.Linear, "forward", torch.nn.Linear.forward)  # given back after the test
    linear.take()


class Plain(torch.nn.Linear):
    def forward(self, x):
        return torch.nn.functional.linear(x, self.weight, self.bias)


def pair(*sizes, bias=True):
    """A network with PyTorch's own products, and the same one with oneDNN's."""
    torch.manual_seed(0)
    plain = torch.nn.Sequential(*(Plain(a, b, bias) for a, b in zip(sizes, sizes[1:], strict=False)))
    ours = torch.nn.Sequential(*(torch.nn.Linear(a, b, bias) for a, b in zip(sizes, sizes[1:], strict=False)))
    ours.load_state_dict(plain.state_dict())
    return plain, ours


def gradients(model, x, power=2):
    x = x.clone().requires_grad_()
    model(x).pow(power).sum().backward()
    return [x.grad, *(p.grad for p in model.parameters())]


@pytest.fixture
def calls(monkeypatch):
    made = []
    times = linear._times
    monkeypatch.setattr(linear, "_times", lambda *given: made.append(1) or times(*given))
    return made


@pytest.mark.parametrize("shape", [(7, 33), (2, 5, 33), (33,), (2, 3, 2, 33)])
@pytest.mark.parametrize("bias", [True, False])
def test_values_and_gradients(shape, bias, calls):
    plain, ours = pair(33, 65, 17, bias=bias)
    x = torch.randn(shape)
    torch.testing.assert_close(ours(x), plain(x), rtol=1e-5, atol=1e-5)
    for one, other in zip(gradients(ours, x), gradients(plain, x), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    assert len(calls) == 2 * 2 + 2 * 2  # two layers: a forward pass alone, one before a backward pass of two products


@pytest.mark.parametrize("shape", [(7, 33), (2, 5, 33), (1, 6, 33), (33,)])
@pytest.mark.parametrize("change", [torch.nn.ReLU(inplace=True), torch.nn.LeakyReLU(0.1, True), lambda y: y.mul_(2)])
def test_outputs_may_be_changed_in_place(shape, change, calls):
    found = []
    for model in pair(33, 65, 17):
        model.zero_grad()
        x = torch.ones(shape).requires_grad_()
        model[1](change(model[0](x))).sum().backward()
        found.append([x.grad, *(p.grad for p in model.parameters())])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    assert calls


def test_frozen_weights_and_inputs_without_gradient(calls):
    plain, ours = pair(33, 65, 17)
    for model in (plain, ours):
        model[0].requires_grad_(False)
        model[1].bias.requires_grad_(False)
        model(torch.ones(4, 33)).sum().backward()
    torch.testing.assert_close(ours[1].weight.grad, plain[1].weight.grad)
    assert ours[0].weight.grad is None and ours[1].bias.grad is None and len(calls) == 3


def test_gradients_of_gradients():
    """As gradient penalties take them."""
    penalties = []
    for model in pair(33, 65, 17):
        x = torch.randn(5, 33, generator=torch.Generator().manual_seed(1)).requires_grad_()
        (gradient,) = torch.autograd.grad(model(x).pow(3).sum(), x, create_graph=True)
        gradient.pow(2).sum().backward()
        penalties.append([gradient, x.grad, *(p.grad for p in model.parameters())])
    for one, other in zip(*penalties, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-3)
    assert penalties[0][3].abs().max() > 0  # of a weight


def test_what_else_may_be_asked_for_takes_its_own_products(calls):
    plain, ours = pair(33, 65, 17)
    x = torch.randn(5, 33)
    with torch.autocast("cpu", torch.bfloat16):
        assert ours(x).dtype == torch.bfloat16
    torch.testing.assert_close(torch.func.vmap(ours)(x), plain(x))
    weights = dict(ours.named_parameters())
    total = lambda weights: torch.func.functional_call(ours, weights, (x,)).sum()  # noqa: E731
    assert torch.func.grad(total)(weights)["0.weight"].shape == (65, 33)
    tangent = torch.func.jvp(ours, (x,), (torch.ones_like(x),))[1]
    torch.testing.assert_close(tangent, torch.func.jvp(plain, (x,), (torch.ones_like(x),))[1])
    torch.testing.assert_close(torch.compile(ours, backend="eager")(x), plain(x))
    torch.testing.assert_close(torch.export.export(ours, (x,)).module()(x), plain(x))
    torch.testing.assert_close(torch.jit.trace(ours, x, check_trace=False)(x), plain(x))
    torch.testing.assert_close(ours.double()(x.double()), plain.double()(x.double()))
    assert not calls


def test_what_others_do_with_layers(calls):
    """Layers, copies and files are PyTorch's own: whoever looks for ``torch.nn.Linear`` finds it."""
    plain, ours = pair(33, 65, 17)
    x = torch.randn(5, 33)
    file = io.BytesIO()
    torch.save(ours, file)
    file.seek(0)
    for other in (copy.deepcopy(ours), torch.load(file, weights_only=False)):
        assert {type(layer) for layer in other} == {torch.nn.Linear}
        torch.testing.assert_close(other(x), plain(x))
    assert len(calls) == 4
    torch.testing.assert_close(torch.jit.script(ours)(x), plain(x))
    torch.testing.assert_close(torch.fx.symbolic_trace(ours)(x), plain(x))
    ours[0].weight.data *= 2
    plain[0].weight.data *= 2
    torch.nn.utils.parametrizations.weight_norm(ours[0])
    torch.testing.assert_close(ours(x), plain(x))
    assert ours(x.to_sparse()).shape == (5, 17)
    assert torch.nn.Linear(33, 65, device="meta")(x.to("meta")).shape == (5, 65)


def test_small_layers_keep_their_bits(monkeypatch):
    plain, ours = pair(33, 65)
    x = torch.randn(8, 33)
    for name, above in (("SMALLEST", 33 * 65 * 9), ("WEIGHTS", 33 * 65 + 1)):
        with monkeypatch.context() as changed:
            changed.setattr(linear, name, above)
            assert torch.equal(ours(x), plain(x))


@pytest.mark.parametrize(("precision", "taken"), [("32", True), ("64", False)])
def test_the_front_end_takes_them_for_32_bits(precision, taken, monkeypatch):
    from hvd_train.frontends.pytorch.model import PyTorchFrontEnd

    monkeypatch.setattr(torch.nn.Linear, "forward", Plain.forward)
    config = load_config(base={"framework": "pytorch", "precision": precision, "model": {"name": "mlp"}})
    data = open_data(config.data, config.task)
    PyTorchFrontEnd(FrontEndConfig.of(config), Groups.of(Serial()), data.sample)
    assert (torch.nn.Linear.forward is not Plain.forward) == taken


def test_scripts_take_them(monkeypatch):
    import hvd_train.torch as ht

    monkeypatch.setattr(torch.nn.Linear, "forward", Plain.forward)
    ht.distribute(torch.nn.Linear(3, 1))
    assert torch.nn.Linear.forward is not Plain.forward


def test_where_it_helps(monkeypatch, tmp_path):
    helps = linear.__dict__["helps"]
    assert helps()  # the fixture's
    monkeypatch.undo()
    monkeypatch.setattr(linear, "CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    for vendor, wanted in (("AuthenticAMD", True), ("GenuineIntel", False)):
        linear.helps.cache_clear()
        linear.CPUINFO.write_text(f"processor\t: 0\nvendor_id\t: {vendor}\n")
        assert linear.helps() is wanted
    linear.CPUINFO.unlink()
    linear.helps.cache_clear()
    assert not linear.helps()
    linear.helps.cache_clear()
    assert np.isfinite(linear.SMALLEST)

"""``torch.compile`` beside scripts' own hooks."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
buffers = pytest.importorskip("hvd_train.script.pytorch.buffers")


class Sliced(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(*(torch.nn.Linear(3, 3) for _ in range(3)))

    def forward(self, x):
        return self.layers[1:](x)


def test_layers_that_a_forward_pass_makes_compile_once():
    """Each step was compiled anew, up to PyTorch's limit, because the hook that counts layers changed a number."""
    graphs = []
    model = torch.compile(Sliced(), backend=lambda graph, inputs: graphs.append(graph) or graph)
    before = buffers._registrations
    for _ in range(4):
        model(torch.ones(2, 3)).sum().backward()
    assert len(graphs) == 1
    model.extra = torch.nn.Linear(1, 1)
    assert buffers._registrations > before

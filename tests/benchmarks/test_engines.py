"""What the benchmark hands to its peers: the same batches and first weights, in each framework's own shape."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest

WORK = Path(__file__).parents[2] / "scripts" / "benchmarks" / "work.py"
LARGE = pytest.mark.long("a large model, handed over as the small ones are, but by names")


@pytest.fixture(scope="module")
def work():
    spec = importlib.util.spec_from_file_location("work", WORK)
    module = importlib.util.module_from_spec(spec)
    path = list(sys.path)
    spec.loader.exec_module(module)
    sys.path[:] = path
    return module


@pytest.mark.parametrize("model", ["cnn", "gpt", pytest.param("bert", marks=LARGE)])
def test_peers_of_both_frameworks_have_the_same_first_loss(work, model, monkeypatch):
    import keras
    import torch  # before TensorFlow, as elsewhere

    monkeypatch.setenv("OMP_NUM_THREADS", str(torch.get_num_threads()))
    net, ((inputs, labels),) = work.prepared("pytorch", model, 1, 2, 1)
    with torch.no_grad():
        first = float(work.torch_loss(work.called(net, inputs), labels))
    net, ((inputs, labels),) = work.prepared("tensorflow", model, 1, 2, 1)
    second = float(work.keras_value(work.keras_loss(keras, labels), labels, net(inputs)))
    assert np.isfinite(first) and first == pytest.approx(second, rel=2e-3)

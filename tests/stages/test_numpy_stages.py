"""A step through stages has the numbers of one process: schedules, replicas, tied weights, the norm of the gradient."""

from __future__ import annotations

import numpy as np
import pytest

from hvd_train.compression import make
from hvd_train.errors import ConfigError
from hvd_train.update.clip import Clip
from hvd_train.update.exchange import Exchange
from hvd_train.update.staged import StagedExchange
from tests.stages.numpy_stages import LR, Block, NumpyStages, Update, staged_ranks

WIDTHS = [5, 4, 6, 4, 5]  # so that the last kernel may be the first one, transposed
STEPS, ROWS = 3, 24


def model(tied: bool):
    rng = np.random.default_rng(0)
    weights, blocks = {}, []
    for k, (a, b) in enumerate(zip(WIDTHS, WIDTHS[1:], strict=False)):
        last = k == len(WIDTHS) - 2
        if not (last and tied):
            weights[f"w{k}"] = rng.normal(size=(a, b)) * 0.5
        weights[f"b{k}"] = rng.normal(size=b) * 0.1
        kernel = "w0" if last and tied else f"w{k}"
        blocks.append(Block(kernel, f"b{k}", end=last, transposed=last and tied))
    return weights, blocks


def batches():
    rng = np.random.default_rng(1)
    return [(rng.normal(size=(ROWS, WIDTHS[0])), rng.normal(size=(ROWS, WIDTHS[-1]))) for _ in range(STEPS)]


def alone(tied: bool, limit: float):
    """The weights after some steps of one process, by plain backpropagation."""
    weights, blocks = model(tied)
    for x, labels in batches():
        inputs, outputs = [], []
        for block in blocks:
            inputs.append(x)
            w = weights[block.kernel].T if block.transposed else weights[block.kernel]
            y = x @ w + weights[block.bias]
            x = y if block.end else np.tanh(y)
            outputs.append(x)
        gradients, g = {n: np.zeros_like(w) for n, w in weights.items()}, (x - labels) / ROWS
        for block, before, y in zip(blocks[::-1], inputs[::-1], outputs[::-1], strict=True):
            g = g if block.end else g * (1 - y**2)
            kernel = before.T @ g
            gradients[block.kernel] += kernel.T if block.transposed else kernel
            gradients[block.bias] += g.sum(0)
            w = weights[block.kernel].T if block.transposed else weights[block.kernel]
            g = g @ w.T
        norm = np.sqrt(sum((g**2).sum() for g in gradients.values()))
        factor = min(limit / (norm + 1e-6), 1) if limit else 1
        weights = {n: w - LR * factor * gradients[n] for n, w in weights.items()}
    return weights


def train(groups, split, micro, schedule, tied, limit):
    weights, blocks = model(tied)
    frontend = NumpyStages(groups, weights, blocks, schedule)
    frontend.take_split(split)
    exchange = Exchange(
        frontend.specs(), frontend.packing, make("none", groups.data.size), groups.data, frontend.ops, Clip(limit),
        world=groups.world,
    )  # fmt: skip
    frontend.update = Update(StagedExchange(exchange, frontend), frontend._trainable)
    for x, labels in batches():
        parts = [
            (
                np.array_split(a, groups.data.size)[groups.data.rank],
                np.array_split(b, groups.data.size)[groups.data.rank],
            )
            for a, b in zip(np.array_split(x, micro), np.array_split(labels, micro), strict=True)
        ]
        for part in parts[:-1]:
            frontend.add_gradients(part, 1 / ROWS, 0)
        frontend.train_step(parts[-1], 1 / ROWS, 0, LR)
    return frontend._trainable, frontend.most_live


@pytest.mark.parametrize("limit", [0.0, 0.05])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize(
    ("split", "replicas"), [([2, 2], 1), ([1, 3], 2), ([1, 2, 1], 1), ([1, 1, 1, 1], 2), ([2, 2], 3)]
)
def test_stages_train_as_one_process(split, replicas, schedule, tied, limit):
    expected, micro, stages = alone(tied, limit), 5, len(split)
    results = staged_ranks(stages * replicas, stages, lambda groups: train(groups, split, micro, schedule, tied, limit))
    seen: dict[str, np.ndarray] = {}
    for rank, (weights, most) in enumerate(results):
        for name, w in weights.items():
            np.testing.assert_allclose(w, expected[name], rtol=1e-12, atol=1e-14, err_msg=f"{name} on rank {rank}")
            np.testing.assert_array_equal(w, seen.setdefault(name, w), err_msg=f"{name} on rank {rank}")
        assert most == (min(stages - rank % stages, micro) if schedule == "1f1b" else micro)
    assert seen.keys() == expected.keys()


def test_what_cannot_be_cut_is_refused():
    weights, blocks = model(False)

    def cut(groups, split, blocks):
        with pytest.raises(ConfigError) as caught:
            NumpyStages(groups, weights, blocks, "1f1b").take_split(split)
        return str(caught.value)

    left = staged_ranks(2, 2, lambda groups: cut(groups, [1, 2], blocks[:3]))
    assert all(text.startswith("w3, b3 is in no block of the model") for text in left)
    empty = staged_ranks(2, 2, lambda groups: cut(groups, [4, 0], blocks))
    assert all(text.startswith("stage 1 has no trainable weight; parallel.split: [4, 0]") for text in empty)

"""A front-end in stages of a few lines of NumPy: blocks are y = tanh(x w + b), the last one without tanh."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

import numpy as np

from hvd_train.config import load_config
from hvd_train.frontends.named_arrays import TensorLayout
from hvd_train.frontends.stages.frontend import StagedFrontEnd
from hvd_train.frontends.stages.links import Links, Message
from hvd_train.protocol import Groups, Packing, TensorSpec
from tests.numpy_frontend import NumpyOps
from tests.rank_threads import Threads, World, run_ranks

LR = 0.1


@dataclass
class Update:
    """Moves weights by the reduced gradient."""

    exchange: object
    weights: dict

    def step(self, tensors):
        flats = self.exchange.to_buckets(tensors)
        reduced, _ = self.exchange.reduce(flats, [()] * len(flats))
        for (name, w), g in zip(self.weights.items(), self.exchange.from_buckets(reduced), strict=True):
            self.weights[name] = w - LR * g


@dataclass
class Block:
    """The names of its kernel and bias; ``transposed``: the kernel is that of another block."""

    kernel: str
    bias: str
    end: bool = False
    transposed: bool = False
    tensors: set = field(init=False)

    def __post_init__(self):
        self.tensors = {self.kernel, self.bias}


class NumpyStages(StagedFrontEnd):
    packing = Packing(1 << 20, 1 << 20)

    def __init__(self, groups, weights, blocks, schedule):
        self.groups, self.ops, self._trainable, self._fixed = groups, NumpyOps(), dict(weights), {}
        self.config = load_config(base={"parallel": {"pipeline": groups.links.size, "schedule": schedule}})
        self.layouts = {n: TensorLayout.of(x.shape, (n, None, None, x.shape)) for n, x in weights.items()}
        self._begin_stages(groups.links)
        self.blocks = blocks

    def specs(self):
        return [TensorSpec(n, x.shape, "float64") for n, x in self._trainable.items()]

    def check_blocks(self):
        pass

    def costs(self, batch):
        return []

    def _title(self, block):
        return block.kernel

    def _check_between(self, x, block, where):
        pass

    def _names_of_blocks(self):
        return [block.tensors for block in self.blocks]

    def _keep_blocks(self, first, last):
        self.blocks = self.blocks[first:last]
        self.gradients = {n: np.zeros_like(x) for n, x in self._trainable.items()}
        self.live = self.most_live = 0

    def _weight(self, block):
        w = self._trainable[block.kernel]
        return w.T if block.transposed else w

    def _forward_stage(self, micro, x):
        inputs, labels = micro.placed
        kept, x = [], inputs if x is None else x
        for block in self.blocks:
            y = x @ self._weight(block) + self._trainable[block.bias]
            y = y if block.end else np.tanh(y)
            kept.append((x, y))
            x = y
        self.live += 1
        self.most_live = max(self.most_live, self.live)
        if not self.last:
            return x, (kept, None)
        error = x - labels
        return np.array([0.5 * (error**2).sum()]), (kept, error * micro.scale)

    def _backward_stage(self, kept, gradient):
        self.live -= 1
        pairs, error = kept
        g = error if gradient is None else gradient
        for block, (x, y) in zip(self.blocks[::-1], pairs[::-1], strict=True):
            g = g if block.end else g * (1 - y**2)
            kernel = x.T @ g
            self.gradients[block.kernel] += kernel.T if block.transposed else kernel
            self.gradients[block.bias] += g.sum(0)
            g = g @ self._weight(block).T
        return g

    def _finish_step(self, learning_rate, unscale):
        self.update.step(list(self.gradients.values()))
        self.gradients = {n: np.zeros_like(x) for n, x in self._trainable.items()}

    def _evaluate_stage(self, placed, x):
        raise NotImplementedError

    def _pack(self, x):
        return Message(x.dtype.name, x.shape, np.ascontiguousarray(x).reshape(-1).view(np.uint8))

    def _unpack(self, message):
        return message.data.view(message.kind).reshape(message.shape)

    def _no_sums(self):
        return np.zeros(1)

    def _fill(self, sums, values):
        sums[:] = values

    def joined(self, x, stages, word):
        return self.links.sum(np.asarray(x), stages, word)

    # ---- of StateTree, which nothing here asks for

    def to_device(self, batch):
        return batch

    def _place_labels(self, batch):
        raise NotImplementedError

    def _eval_outputs(self, inputs):
        raise NotImplementedError

    def _weights(self):
        return self._trainable.items()

    def _readers(self):
        return {f"weights/{n}": partial(np.array, x) for n, x in self._trainable.items()}

    def _assign(self, arrays):
        raise NotImplementedError


def staged_ranks(ranks, stages, work):
    """[work(groups)] of ranks that are threads; the ranks of a stage are a world, too."""
    replicas = ranks // stages
    worlds = [World(replicas) for _ in range(stages)]

    def on_rank(world):
        links = Links.connect(world, stages)
        data = Threads(worlds[links.stage], world.rank // stages)
        try:
            return work(Groups(world, data, links))
        finally:
            links.close()

    return run_ranks(ranks, on_rank)

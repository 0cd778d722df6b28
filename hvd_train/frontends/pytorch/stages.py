"""A pipeline stage in PyTorch."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from hvd_train.config import Config
from hvd_train.frontends.pytorch.blocks import blocks_of
from hvd_train.frontends.pytorch.model import IN_TRAINING, UNTAKEN, PyTorchFrontEnd
from hvd_train.frontends.stages.frontend import TURNS, Micro, Staged, one_tensor
from hvd_train.frontends.stages.links import Message
from hvd_train.frontends.stages.split import Cost
from hvd_train.protocol import Batch, Groups, Sample, made_up


class Kept(NamedTuple):
    """The record of a forward pass for backward: the stage's input, and its output or, on the last stage, the loss."""

    x: torch.Tensor | None
    output: torch.Tensor


def block_seed(seed: int, number: int) -> int:
    """Return the seed of a block's forward pass: each block draws other masks, whichever stage it is in."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/block {number}".encode(), digest_size=8).digest(), "little") >> 1


class StagedPyTorch(Staged, PyTorchFrontEnd):
    UNTAKEN = UNTAKEN

    def __init__(self, config: Config, groups: Groups, sample: Sample) -> None:
        super().__init__(config, groups, sample)
        self._begin_stages(groups.links)
        self._blocks = blocks_of(self.model, self._module, config.model.name)
        native = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        self._name_of = {id(x): name for name, x in native.items()}

    def _overlap(self) -> bool:
        return False  # gradients of a bucket are final after the last micro-batch alone

    # ---- the blocks, once

    def _names_of_blocks(self) -> list[set[str]]:
        return [{self._name_of[id(x)] for x in (*block.parameters(), *block.buffers())} for block in self._blocks]

    def _title(self, block: torch.nn.Module) -> str:
        return type(block).__name__

    def _check_between(self, x: Any, block: str, where: str) -> None:
        one_tensor(x, block, where, torch.Tensor, torch.is_floating_point)

    @torch.no_grad()
    def check_blocks(self) -> None:
        self.model.eval()
        inputs = self.to_device(made_up(self._sample))[0]
        self._in_turn(inputs, lambda number, block, x: self._run_block(block, x, number == 0))

    def _run_block(self, block: torch.nn.Module, x: Any, first: bool) -> Any:
        with self._mixed:
            if not first:
                return block(x)
            return block(*x.values()) if len(x) == 1 else block(**x)

    def costs(self, batch: Batch) -> list[Cost]:
        inputs = self.to_device(batch)[0]
        self.model.eval()  # running statistics stay as they are
        best, activations = [np.inf] * len(self._blocks), [0] * len(self._blocks)

        def timed(number: int, block: torch.nn.Module, x: Any) -> Any:
            if number:
                x = x.detach().requires_grad_()
            began = time.perf_counter()
            output = self._run_block(block, x, number == 0)
            tensors = [output] if isinstance(output, torch.Tensor) else list(output.values())
            tensors = [one for one in tensors if one.requires_grad]
            torch.autograd.backward(tensors, [torch.ones_like(one) for one in tensors])
            self._wait()
            best[number] = min(best[number], time.perf_counter() - began)
            activations[number] = sum(one.nbytes for one in tensors)
            return output

        for _ in range(TURNS):
            self._in_turn(inputs, timed)
        self.model.zero_grad(set_to_none=True)
        weights = [sum(x.nbytes for x in block.parameters()) for block in self._blocks]
        return self._costs(best, weights, activations)

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def _cut(self, first: int, last: int) -> None:
        self.model = torch.nn.Sequential(*self._blocks[first:last])
        self._begin, self._blocks, self._name_of = first, [], {}

    # ---- within a step

    def _no_sums(self) -> torch.Tensor:
        return torch.zeros(self.task.length, dtype=torch.float64, device=self.device)

    def _fill(self, sums: torch.Tensor, values: torch.Tensor) -> None:
        sums.copy_(values.detach())

    def _run_stage(self, placed: Any, x: torch.Tensor | None, seed: int | None = None) -> Any:
        """Return the output of the stage's blocks; ``seed``: of training."""
        output: Any = placed[0] if x is None else x
        for number, block in enumerate(self.model, self._begin):
            if seed is not None:
                self._seed(block_seed(seed, number))
            output = self._run_block(block, output, number == 0)
        return output

    def _result(self, output: Any) -> Any:
        """Return the outputs of the model in the type of its weights."""
        if isinstance(output, Mapping):
            return {name: one.to(self.dtype) for name, one in output.items()}
        return output.to(self.dtype)

    def _forward_stage(self, micro: Micro, x: torch.Tensor | None) -> tuple[Any, Kept]:
        _, labels, weights = micro.placed
        if not all(map(IN_TRAINING, self._layers)):
            self.model.train()
        self._batchnorm.take(weights)
        if x is not None:
            x = x.requires_grad_()
        output = self._run_stage(micro.placed, x, micro.seed)
        if not self.last:
            return output, Kept(x, output)
        loss, sums = self.task(self._result(output), labels, weights, self._scales(micro.scale))
        return sums, Kept(x, loss)

    def _backward_stage(self, kept: Kept, gradient: torch.Tensor | None) -> torch.Tensor | None:
        torch.autograd.backward(kept.output, gradient)
        return None if kept.x is None else kept.x.grad

    def _finish_step(self, learning_rate: float, unscale: float) -> None:
        self._sent.begin()
        if self._unscale(unscale):
            self.update.step(self._sent.finish(), learning_rate)
        self._discard_gradients()

    @torch.no_grad()
    def _evaluate_stage(self, placed: Any, x: torch.Tensor | None) -> Any:
        self.model.eval()
        output = self._run_stage(placed, x)
        return self.task(self._result(output), *placed[1:])[1] if self.last else output

    def _pack(self, x: torch.Tensor) -> Message:
        flat = x.detach().cpu().contiguous()
        return Message(str(x.dtype).removeprefix("torch."), tuple(x.shape), flat.view(-1).view(torch.uint8).numpy())

    def _unpack(self, message: Message) -> torch.Tensor:
        flat = torch.from_numpy(message.data).view(getattr(torch, message.kind))
        x = flat.view(message.shape).to(self.device)
        images = self._channels_last and x.dim() == 4
        return x.contiguous(memory_format=torch.channels_last) if images else x

    def joined(self, x: torch.Tensor, stages: Sequence[int], word: str) -> torch.Tensor:
        return self.ops.from_numpy(self.links.sum(self.ops.to_numpy(x), stages, word))


def open_frontend(config: Config, groups: Groups, sample: Sample) -> StagedPyTorch:
    return StagedPyTorch(config, groups, sample)

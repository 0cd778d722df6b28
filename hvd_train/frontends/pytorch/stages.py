"""A pipeline stage in PyTorch."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from hvd_train.config import FrontEndConfig
from hvd_train.frontends.pytorch.blocks import blocks_of
from hvd_train.frontends.pytorch.in_blocks import PyTorchInBlocks
from hvd_train.frontends.pytorch.model import IN_TRAINING
from hvd_train.frontends.stages.frontend import Micro, StagedFrontEnd
from hvd_train.frontends.stages.links import Message
from hvd_train.protocol import Groups, Sample


class Kept(NamedTuple):
    """What backward needs from a forward pass: the stage's input, and its output or, on the last stage, the loss."""

    x: torch.Tensor | None
    output: torch.Tensor


def block_seed(seed: int, number: int) -> int:
    """Return the seed of a block's forward pass: each block draws different masks, on whatever stage it is."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/block {number}".encode(), digest_size=8).digest(), "little") >> 1


class StagedPyTorch(StagedFrontEnd, PyTorchInBlocks):
    def __init__(self, config: FrontEndConfig, groups: Groups, sample: Sample) -> None:
        super().__init__(config, groups, sample)
        self._begin_stages(groups.links)
        self._blocks = blocks_of(self.model, self._module, config.model.name)

    def _overlap(self) -> bool:
        return False  # a bucket's gradients are final only after the last micro-batch

    # ---- setting up the blocks

    def _keep_blocks(self, first: int, last: int) -> None:
        self.model = torch.nn.Sequential(*self._blocks[first:last])
        self._places = {n: place for n, place in self._places.items() if n in self._trainable or n in self._fixed}
        self._begin, self._blocks = first, []

    # ---- during a step

    def _no_sums(self) -> torch.Tensor:
        return torch.zeros(self.task.length, dtype=torch.float64, device=self.device)

    def _fill(self, sums: torch.Tensor, values: torch.Tensor) -> None:
        sums.copy_(values.detach())

    def _run_stage(self, placed: Any, x: torch.Tensor | None, seed: int | None = None) -> Any:
        """Return the output of the stage's blocks; ``seed``: given in training."""
        output: Any = placed[0] if x is None else x
        for number, block in enumerate(self.model, self._begin):
            if seed is not None:
                self._seed(block_seed(seed, number))
            output = self._run_block(block, output, number == 0)
        return output

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
            self._check_changes()
            self.update.step(self._sent.finish(), learning_rate)
        self._discard_gradients()

    @torch.no_grad()
    def _evaluate_stage(self, placed: Any, x: torch.Tensor | None) -> Any:
        self.model.eval()
        output = self._run_stage(placed, x)
        return self.task.scores(self._result(output), *placed[1:]) if self.last else output

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


open_frontend = StagedPyTorch

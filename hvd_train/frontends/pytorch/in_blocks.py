"""A PyTorch model in blocks: checks of their inputs and outputs, and their cost."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from hvd_train.frontends.pytorch.model import UNTAKEN, PyTorchFrontEnd
from hvd_train.frontends.stages.in_blocks import TURNS, InBlocks, one_tensor
from hvd_train.frontends.stages.split import Cost
from hvd_train.protocol import Batch, made_up


class PyTorchInBlocks(InBlocks, PyTorchFrontEnd):
    UNTAKEN = UNTAKEN
    _blocks: Sequence[torch.nn.Module]

    def _names_of_blocks(self) -> list[set[str]]:
        name_of = {id(x): name for name, x in (*self.model.named_parameters(), *self.model.named_buffers())}
        return [{name_of[id(x)] for x in (*block.parameters(), *block.buffers())} for block in self._blocks]

    def _title(self, block: torch.nn.Module) -> str:
        return type(block).__name__

    def _check_between(self, x: Any, block: str, where: str) -> None:
        one_tensor(x, block, where, torch.Tensor, torch.is_floating_point)

    @torch.no_grad()
    def check_blocks(self) -> None:
        self.model.eval()
        inputs = self.to_device(made_up(self._sample))[0]
        self._in_turn(inputs, lambda number, block, x: self._run_block(block, x, number == 0))

    def _run_block(self, block: Callable[..., Any], x: Any, first: bool) -> Any:
        with self._mixed:
            if not first:
                return block(x)
            return block(*x.values()) if len(x) == 1 else block(**x)

    def costs(self, batch: Batch) -> list[Cost]:
        inputs = self.to_device(batch)[0]
        self.model.eval()  # running statistics must not change
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

    def _result(self, output: Any) -> Any:
        """Return the model's outputs on the first device, in the dtype of its weights."""
        if isinstance(output, Mapping):
            return {name: one.to(self.device, self.dtype) for name, one in output.items()}
        return output.to(self.device, self.dtype)

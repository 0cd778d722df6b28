"""A PyTorch model over several devices of a rank."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch.func import functional_call

from hvd_train.config import FrontEndConfig
from hvd_train.errors import ConfigError
from hvd_train.frontends.pytorch.blocks import blocks_of
from hvd_train.frontends.pytorch.in_blocks import PyTorchInBlocks
from hvd_train.frontends.pytorch.shapes import lazy, moved
from hvd_train.frontends.pytorch.stages import block_seed
from hvd_train.frontends.stages.multi_device import MultiDevice
from hvd_train.frontends.user_model import checked
from hvd_train.protocol import Groups, Sample


class MultiDevicePyTorch(MultiDevice, PyTorchInBlocks):
    """A front-end with several devices. Autograd returns gradients to their devices; the first one exchanges them."""

    def __init__(self, config: FrontEndConfig, groups: Groups, sample: Sample) -> None:
        super().__init__(config, groups, sample)
        if len(set(self.devices)) > 1:
            self._seed = self._seed_devices

    def _on_devices(self, model: torch.nn.Module) -> torch.nn.Module:
        # Build the model on the CPU: it may not fit on one device.
        where = f"model.name: {self.config.model.name}"
        self.model = model = moved(model, "cpu", self.dtype)
        if lazy(model):
            what = f"{', '.join(lazy(model))} has no shape yet, and so no size by which blocks are placed"
            raise ConfigError(what, where=where, fix="give the layer its shape, or set parallel.devices_per_rank: 1")
        self._trainable = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self._fixed = {n: x for n, x in self._all_tensors().items() if n not in self._trainable}
        self._blocks = blocks_of(model, self._module, self.config.model.name)
        self._begin_devices()
        return model

    def _all_tensors(self) -> dict[str, torch.Tensor]:
        return {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}

    def _nbytes(self, name: str) -> int:
        return self._all_tensors()[name].nbytes

    def _put(self) -> None:
        tensors = self._all_tensors()
        for name, x in tensors.items():
            owner, _, leaf = name.rpartition(".")
            device = self.devices[self._device_of[name]]
            if isinstance(x, torch.nn.Parameter):
                x.data = x.data.to(device)
            else:
                self.model.get_submodule(owner)._buffers[leaf] = x.to(device)
        tensors = self._all_tensors()
        self._fixed = {name: tensors[name] for name in self._fixed}
        name_of = {id(x): name for name, x in tensors.items()}
        self._where: dict[int, tuple[torch.device, dict[str, torch.Tensor]]] = {}
        for block, place in zip(self._blocks, self.places, strict=True):
            tied = {n: p for n, p in block.named_parameters() if self._device_of[name_of[id(p)]] != place}
            self._where[id(block)] = self.devices[place], tied

    def _run_block(self, block: Any, x: Any, first: bool) -> Any:
        device, tied = self._where[id(block)]
        x = {name: one.to(device) for name, one in x.items()} if first else x.to(device)
        return super()._run_block(partial(_with_copies, block, tied, device) if tied else block, x, first)

    def _outputs(self, inputs: Mapping[str, torch.Tensor]) -> Any:
        x: Any = inputs
        for number, block in enumerate(self._blocks):
            if block.training != self.model.training:  # a zoo block is not a layer of the model
                block.train(self.model.training)
            x = self._run_block(block, x, number == 0)
        return self._result(checked(x, self.config.model.name))

    def _overlap(self) -> bool:
        return False  # autograd has a thread per device, but exchanges must start in one order

    def _wait(self) -> None:
        for device in self.devices:
            if device.type == "cuda":
                torch.cuda.synchronize(device)

    def _seed_devices(self, seed: int) -> None:
        # Each device has its own generator. With one seed, all would draw the same masks.
        torch.manual_seed(seed)
        for place, device in enumerate(self.devices[1:], 1):
            if device.type == "cuda":
                torch.cuda.default_generators[device.index].manual_seed(block_seed(seed, place))


def _with_copies(
    block: torch.nn.Module, tied: Mapping[str, torch.Tensor], device: torch.device, *x: Any, **named: Any
) -> Any:
    """Run a block with copies of tied weights from another device; their gradients go back there."""
    return functional_call(block, {name: one.to(device) for name, one in tied.items()}, x, named)


open_frontend = MultiDevicePyTorch

"""The device of a rank in PyTorch, and the precision of its forward passes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

from hvd_train.config import FrontEndConfig
from hvd_train.errors import ConfigError
from hvd_train.frontends.devices import gpus_of
from hvd_train.protocol import Communicator

MIXED = {"16-mixed": torch.float16, "bf16-mixed": torch.bfloat16}


def mixed_context(precision: str, device: torch.device) -> AbstractContextManager:
    """Return the context of forward passes: autocast to 16 bits, or none."""
    dtype = MIXED.get(precision)
    if dtype is torch.bfloat16 and device.type == "cuda" and not torch.cuda.is_bf16_supported(False):
        what = f"{torch.cuda.get_device_name(device)} has no bfloat16"
        raise ConfigError(what, where="precision: bf16-mixed", fix="set precision: 16-mixed or 32")
    return torch.autocast(device.type, dtype) if dtype else nullcontext()


def seeder(device: torch.device) -> Callable[[int], object]:
    """Return a function that seeds the generators of this rank's device, like ``torch.manual_seed``."""
    # torch.manual_seed also looks for absent devices, and on hosts with a GPU formats the stack for them. That takes
    # 0.08 ms a step on a CPU, and 0.3 ms on one H200 (torch 2.11), where a step of an MLP with 19 million weights takes
    # 1.9 ms.
    seed_cpu = torch.default_generator.manual_seed
    if device.type == "cpu":
        return seed_cpu
    torch.cuda.init()
    seed_gpu = torch.cuda.default_generators[device.index].manual_seed
    return lambda seed: (seed_cpu(seed), seed_gpu(seed))


def devices_of(config: FrontEndConfig, communicator: Communicator) -> list[torch.device]:
    """Return the ``parallel.devices_per_rank`` devices of this rank: GPUs, or the CPU so many times."""
    indices = gpus_of(config, communicator, torch.cuda.device_count() if torch.cuda.is_available() else 0, "PyTorch")
    if not indices:
        return [torch.device("cpu")] * config.parallel.devices_per_rank
    torch.cuda.set_device(indices[0])
    # By default, cuDNN's gradients of convolutions differ in their last bits between runs. Deterministic ones cost
    # nothing (one H200: CNN 1.13, ResNet-18 0.97, MLP and GPT 1.0 of the speed). Making all of PyTorch's kernels
    # deterministic cost the MLP and the GPT a third.
    torch.backends.cudnn.deterministic = True
    return [torch.device("cuda", index) for index in indices]

"""What front-ends with several devices per rank share: which device has which block and weight."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace

from hvd_train.frontends.stages.in_blocks import InBlocks, check_count
from hvd_train.frontends.stages.split import balanced, stage_of
from hvd_train.protocol import TensorSpec


class MultiDevice(InBlocks):
    """A front-end that places blocks on several devices of the rank; mixed in before the framework's class.

    Activations move between the devices. The first device gets the model's outputs and computes the loss. A weight that
    blocks of several devices use is stored on the first of them.
    """

    PART = "device"
    KEY = "parallel.devices_per_rank"
    places: Sequence[int] = ()  # the device number of each block
    _device_of: dict[str, int]  # {native name of a tensor: device number}

    @abstractmethod
    def _put(self) -> None:
        """Move the tensors to their devices."""

    @abstractmethod
    def _nbytes(self, name: str) -> int:
        """Return the bytes of the tensor with this native name."""

    def _begin_devices(self) -> None:
        """Place the blocks by weight bytes, before they are measured: one device may be too small for all."""
        parts = self.config.parallel.devices_per_rank
        names = self._names_of_blocks()
        split = self.config.parallel.split
        check_count(split, len(names), parts, self.PART, self.KEY)
        self.take_split(balanced([(self._sum(x),) for x in names], parts) if split == "auto" else split)

    def _sum(self, names: set[str]) -> float:
        return float(sum(map(self._nbytes, names)))

    def take_split(self, split: Sequence[int]) -> None:
        self._device_of = {name: min(places) for name, places in self._holders(split).items()}
        self.places = stage_of(split)
        self._put()

    def specs(self) -> list[TensorSpec]:
        # A bucket must not mix devices.
        names = list(self._unfrozen)
        specs: list[TensorSpec] = super().specs()  # type: ignore[misc]  # of the framework's front-end
        return [replace(spec, place=self._device_of[name]) for spec, name in zip(specs, names, strict=True)]

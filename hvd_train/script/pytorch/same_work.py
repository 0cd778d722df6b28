"""A warning if all ranks compute the same gradients, for example because a loader is not sharded."""

from __future__ import annotations

import warnings

from hvd_train.protocol import Communicator

PASSES = 2  # the first passes, in which gradients are compared


class SameWorkWarning:
    """The comparison of checksums of the ranks' gradients in the first passes of a model."""

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._bits = self._equal = 0  # sum over this pass' gradients; passes in which it was equal on all ranks
        self.left = PASSES

    def add(self, bits: int) -> None:
        """Add the checksum of a gradient, before it is averaged."""
        self._bits += bits

    def pass_ended(self) -> None:
        """Compare the checksums; all ranks call it, and rank 0 warns after the last compared pass."""
        bits, self._bits, self.left = self._bits % 2**64, 0, self.left - 1
        everyone = self._communicator.allgather_bytes(bits.to_bytes(8, "little"), "gradients")
        # A sum of 0 does not count, because all gradients may be zero.
        self._equal += bits > 0 and len(everyone) > 1 and len(set(everyone)) == 1
        if self._equal == PASSES and not self._communicator.rank:
            what = "all ranks computed the same gradients: do they go through the same samples?"
            warnings.warn(f"{what} Use the loader that ht.shard gives; draw other batches on each rank", stacklevel=2)

"""The division of global batches among ranks, also of a shorter last one."""

from __future__ import annotations

import numpy as np

from hvd_train.data.order import share
from hvd_train.errors import DataError


def places_of(count: int, whole: int, rank: int, size: int) -> np.ndarray:
    """Return a rank's positions among the ``count`` samples of a global batch of regular size ``whole``.

    The last batch may have fewer samples, or up to ``size`` - 1 more, which are the rest of the epoch.
    """
    places = np.arange(*share(min(count, whole), size, rank))
    return np.append(places, whole + rank) if rank < count - whole else places


def counts_of(count: int, whole: int, size: int) -> tuple[int, ...]:
    """Return each rank's number of samples, (size,); see ``places_of``."""
    return tuple(len(places_of(count, whole, rank, size)) for rank in range(size))


class EvenBatches:
    """The division of ``count`` samples into global batches of ``batch_size`` x ``size``.

    All ranks have the same number of batches. The last global batch is divided as evenly as possible, and a rest of
    fewer samples than ranks joins the batch before. So ranks' batches differ by at most one sample, at the end.
    ``where``: the call in the script.
    """

    def __init__(self, count: int, batch_size: int, drop_last: bool, rank: int, size: int, where: str) -> None:
        self.count, self.drop_last, self.rank, self.size = count, drop_last, rank, size
        self.whole = whole = batch_size * size
        if count < (whole if drop_last else size):
            what = f"{count} samples are too few for {size} ranks" + (f" of batches of {batch_size}" * drop_last)
            fix = "start fewer ranks" + ", or drop_last=False" * drop_last
            raise DataError(what, where=where, fix=fix, common=True)
        # A rest of fewer samples than ranks would leave a rank without any, so it joins the batch before.
        rest = 0 if drop_last else count % whole
        self._batches = count // whole + (rest >= size)

    def __len__(self) -> int:
        return self._batches

    def places(self, k: int) -> np.ndarray:
        """Return the positions of this rank's part of global batch ``k`` in the order of samples."""
        return places_of(self._samples(k), self.whole, self.rank, self.size) + k * self.whole

    def counts(self, k: int) -> tuple[int, ...]:
        """Return the number of samples of batch ``k`` on each rank, (size,)."""
        return counts_of(self._samples(k), self.whole, self.size)

    def _samples(self, k: int) -> int:
        return self.count - k * self.whole if k + 1 == len(self) and not self.drop_last else self.whole

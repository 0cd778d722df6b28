"""``python -m tests.ranks.flipped ARGUMENTS``: hvd-train, with one bit of one weight flipped on the last rank."""

import numpy as np

from hvd_train.cli.main import main
from hvd_train.core import loop

STEP, TENSOR = 7, "weights/fc2.kernel"
given = loop.Trainer._step


def flipped(self, step):
    rate = given(self, step)
    if self.progress.step == STEP and self.communicator.rank == self.communicator.size - 1:
        weight = np.ascontiguousarray(self.frontend.state()[TENSOR])
        weight.view(np.uint8).flat[0] ^= 1  # the last digit of the first number
        self.frontend.load({TENSOR: weight})
    return rate


if __name__ == "__main__":
    loop.Trainer._step = flipped
    main()

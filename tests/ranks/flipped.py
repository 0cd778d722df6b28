"""``python -m tests.ranks.flipped ARGUMENTS``: hvd-train, with one bit of one weight flipped on the last rank."""

import numpy as np

from hvd_train.cli.main import main
from hvd_train.core.step import StepRunner

STEP, TENSOR = 7, "weights/fc2.kernel"
run = StepRunner.run


def flipped(self, step):
    made, training = run(self, step), self.training
    if training.progress.step == STEP and training.communicator.rank == training.communicator.size - 1:
        weight = np.ascontiguousarray(training.frontend.state()[TENSOR])
        weight.view(np.uint8).flat[0] ^= 1  # the last digit of the first number
        training.frontend.load({TENSOR: weight})
    return made


if __name__ == "__main__":
    StepRunner.run = flipped
    main()

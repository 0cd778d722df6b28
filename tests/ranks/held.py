"""A hook that holds a run until a file is there."""

from __future__ import annotations

import os
import time
from pathlib import Path

import hvd_train

VARIABLE = "HVD_TRAIN_TEST_HELD"


class Held(hvd_train.Hook):
    """Rank 1 does not come out of step 40 of a start before there is the file that the variable names."""

    def on_step(self, trainer, info):
        if trainer.communicator.rank == 1 and trainer.progress.step == 40:
            while not Path(os.environ[VARIABLE]).exists():
                time.sleep(0.02)

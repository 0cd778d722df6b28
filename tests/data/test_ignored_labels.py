"""Labels that do not count are left out of the confusion matrix and of the mistakes, whatever their number is."""

from types import SimpleNamespace

import numpy as np
import pytest

from hvd_train.config import Config, TaskConfig
from hvd_train.data.arrays import Arrays
from hvd_train.data.loader import Loader
from hvd_train.frontends.serial import Serial
from hvd_train.jobs.confusion import confusion
from hvd_train.jobs.mistakes import mistakes

LABELS = np.array([0, 0, 1, 2, 2, 1, 0, 2])


def job(ignored):
    """A job whose model says class 1 of every sample."""
    task = TaskConfig(ignore_index=ignored)
    part = Arrays(np.zeros((len(LABELS), 2), np.float32), LABELS, "here", 3, task)
    serial = Serial()
    return SimpleNamespace(
        config=Config(task=task),
        data=SimpleNamespace(sample=part.sample),
        split="val",
        loader=lambda split: Loader(part, global_batch=3),
        frontend=SimpleNamespace(
            to_device=lambda batch: batch, predict=lambda batch: np.tile(np.eye(3)[1], (len(batch.weights), 1))
        ),
        session=SimpleNamespace(groups=SimpleNamespace(data=serial)),
        communicator=serial,
    )


@pytest.mark.parametrize(("ignored", "zeros"), [(-100, 3), (0, 0)])
def test_the_label_of_places_that_do_not_count_may_be_0(ignored, zeros):
    """The accuracy left them out, and the matrix beside it held them."""
    assert confusion(job(ignored)).tolist() == [[0, zeros, 0], [0, 2, 0], [0, 3, 0]]
    assert len(mistakes(job(ignored))) == 3 + zeros

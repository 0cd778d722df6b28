"""Files of predictions hold what the model gives for each sample, or are refused."""

import csv
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest

from hvd_train.config import Config, TaskConfig
from hvd_train.data.arrays import Arrays
from hvd_train.data.loader import Loader
from hvd_train.errors import ConfigError
from hvd_train.frontends.serial import Serial
from hvd_train.jobs import predict as module
from hvd_train.jobs.predict import predict

X = np.arange(14, dtype=np.float32).reshape(7, 2)


@pytest.fixture
def predicted(monkeypatch, tmp_path):
    """Predict by a function of the inputs, for a run with a loss of the user's and ``classes`` classes."""

    def run(model, classes=None, ending=".csv"):
        part = Arrays(X, np.arange(7) % 2, "here", classes, TaskConfig(loss="mine:loss"))
        job = SimpleNamespace(
            config=Config(),
            data=SimpleNamespace(sample=part.sample, parts={"all": part}),
            split="all",
            loader=lambda split: Loader(part, global_batch=3),
            frontend=SimpleNamespace(to_device=lambda batch: batch, predict=lambda batch: model(batch.inputs["input"])),
            communicator=Serial(),
        )
        monkeypatch.setattr(module, "trained_job", lambda *args, **keys: nullcontext(job))
        path = tmp_path / f"out{ending}"
        assert predict(job.config, "last", path, "all", False, True, names=ending == ".csv") == 0
        return list(csv.reader(path.read_text().splitlines()))[1:] if ending == ".csv" else np.load(path)

    yield run
    left = [path for path in tmp_path.iterdir() if path.suffix not in (".csv", ".npy")]
    assert left == [], "no half file is left"


def test_names_want_a_number_for_each_class(predicted):
    """A loss of yes and no, data.num_classes: 2 and one logit: all samples were of class 0 with probability 1."""
    rows = predicted(lambda x: x * [1, 0.9], 2)
    assert [row[:2] for row in rows] == [[str(k), "1" if k < 5 else "0"] for k in range(7)]
    for model in (lambda x: x[:, :1], lambda x: x[:, 0], lambda x: x[:, None]):
        with pytest.raises(ConfigError, match="not a number for each of 2 classes"):
            predicted(model, 2)
    with pytest.raises(ConfigError, match=r"gives \(2,\) for a sample, and not a number for each of 3 classes"):
        predicted(lambda x: x, 3)


def test_a_file_has_one_shape(predicted):
    """Outputs as long as the longest sample of their batch: the rows of a file lay over one another."""
    assert (predicted(lambda x: x, ending=".npy") == X).all()
    places = np.arange(7)[:, None] % 3  # of a sample in its batch, the last of which is filled up with copies
    assert (predicted(lambda x: x + np.arange(len(x))[:, None], ending=".npy") == X + places).all()
    with pytest.raises(ConfigError, match=r"gives \(2,\) for some samples and \(1,\) for others"):
        predicted(lambda x: x if x[0, 0] < 5 else x[:, :1], ending=".npy")

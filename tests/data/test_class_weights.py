"""Weights of classes: of names, in order, and of how often the training data hold them."""

from __future__ import annotations

import json

import numpy as np
import pytest

from hvd_train.config import Config, TaskConfig
from hvd_train.data.arrays import Arrays
from hvd_train.errors import ConfigError
from hvd_train.frontends.serial import Serial
from hvd_train.jobs.class_weights import class_counts, with_class_weights
from hvd_train.jobs.trained_run import _with_weights_of_run
from hvd_train.protocol import Field, Sample
from tests.cli.running import run

LABELS = np.repeat([0, 1, 2], [60, 30, 10])


def data(labels=LABELS, names=(), masked=False):
    part = Arrays(np.zeros((len(labels), 2), np.float32), labels, "here", 3)
    return DataSetOf(part, names, masked)


class DataSetOf:
    def __init__(self, part, names, masked):
        self.train = part
        label = Field((), "int64", classes=3, names=tuple(names), masked=masked)
        self.sample = Sample(part.sample.inputs, {"label": label})


def weights(given, ignore=-100, **more):
    config = Config(task=TaskConfig(class_weights=given, ignore_index=ignore))
    return with_class_weights(config, data(**more), Serial()).task.class_weights


def test_balanced_is_that_of_scikit_learn():
    compute = pytest.importorskip("sklearn.utils.class_weight").compute_class_weight
    assert weights("balanced") == pytest.approx(compute("balanced", classes=np.arange(3), y=LABELS))


def test_the_ignored_label_is_no_class_to_balance():
    two = pytest.approx([70 / (2 * 60), 0.0, 70 / (2 * 10)])
    assert weights("balanced", ignore=1, masked=True) == two
    assert weights("balanced", labels=LABELS[LABELS != 1], ignore=1, masked=True) == two


def test_names_and_numbers():
    assert weights({"bird": 3.0, "cat": 2.0}, names=("cat", "dog", "bird")) == [2.0, 1.0, 3.0]
    assert weights({"2": 3.0}) == [1.0, 1.0, 3.0]
    assert weights([1.0, 2.0, 3.0]) == [1.0, 2.0, 3.0] and weights(None) is None


def test_classes_without_a_name_have_their_number():
    """Two words and data.num_classes: 3. There were two weights, which eval and --resume refused as too few."""
    assert weights({"dog": 3.0}, names=("cat", "dog")) == [1.0, 3.0, 1.0]
    assert weights({"2": 3.0}, names=("cat", "dog")) == [1.0, 1.0, 3.0]
    with pytest.raises(ConfigError, match="no training sample is of class 2, so"):
        weights("balanced", labels=LABELS[:90], names=("cat", "dog"))


def test_balanced_in_a_file_stands_for_the_numbers_of_the_run():
    """``eval -c job.yaml`` on other data, or on all of them: the training samples are those that were counted."""
    run = {"config": {"task": {"class_weights": [1.0, 2.0, 3.0]}}}
    for given, saved, wanted in [("balanced", run, [1.0, 2.0, 3.0]), ([4.0], run, [4.0])]:
        config = Config(task=TaskConfig(class_weights=given))
        assert _with_weights_of_run(config, saved).task.class_weights == wanted


@pytest.mark.parametrize(
    ("given", "labels", "what"),
    [
        ({"bid": 1.0}, LABELS, "unknown 'bid'; did you mean 'bird'?"),
        ([1.0, 2.0], LABELS, "2 numbers for 3 classes"),
        ("balanced", LABELS[:90], "no training sample is of class bird, so nothing balances it"),
    ],
)
def test_mistakes(given, labels, what):
    with pytest.raises(ConfigError) as raised:
        weights(given, labels=labels, names=("cat", "dog", "bird"))
    assert raised.value.what.startswith(what) and raised.value.where == "task.class_weights" and raised.value.fix


def test_labels_are_counted_without_the_inputs_where_that_can_be():
    class Slow:
        def __len__(self):
            return len(LABELS)

        def fetch(self, places):
            return {"input": np.zeros((len(places), 2))}, {"label": LABELS[places]}

    part = data().train
    part._inputs = {}  # nothing of them is read
    part.rows = np.arange(70)
    assert class_counts(part, "label", 3).tolist() == [60, 10, 0]
    assert class_counts(Slow(), "label", 3).tolist() == [60, 30, 10]
    assert class_counts(Slow(), "label", 3, ignored=1).tolist() == [60, 0, 10]


def test_a_run_keeps_the_numbers_and_eval_gives_its_loss(tmp_path):
    words = ("--set", "data.name=digits", "--set", "model.name=mlp", "--set", "model.hidden=[8]")
    words += ("--set", "task.class_weights=balanced", "--run-dir", "run")
    run("fit", *words, cwd=tmp_path)
    again = json.loads(run("eval", "--run-dir", "run", cwd=tmp_path).stdout.splitlines()[-1])
    assert again["loss"] == pytest.approx(json.loads((tmp_path / "run/summary.json").read_text())["val_loss"], rel=1e-6)
    assert "class_weights: [" in (tmp_path / "run/config.yaml").read_text()
    run("fit", *words, "--set", "max_epochs=2", "--resume", "auto", cwd=tmp_path)  # the same words mean the same
    done = run("fit", *words, "--set", "task.class_weights={'3': 2.0}", "--resume", "auto", cwd=tmp_path, code=2)
    assert "the configuration changed since the checkpoint (task.class_weights: " in done.stderr

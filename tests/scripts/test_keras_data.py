"""How a user's data are divided among ranks: laws, without a launcher."""

from __future__ import annotations

from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf

from hvd_train.errors import ConfigError, DataError
from hvd_train.script import keras_data as data


def world(size: int) -> list[SimpleNamespace]:
    return [SimpleNamespace(rank=rank, size=size) for rank in range(size)]


class Batches(keras.utils.PyDataset):
    def __init__(self, n: int, batch: int) -> None:
        super().__init__()
        self.n, self.batch = n, batch

    def __len__(self) -> int:
        return -(-self.n // self.batch)

    def __getitem__(self, i: int) -> tuple:
        return (np.arange(i * self.batch, min(self.n, (i + 1) * self.batch)),)


def parts(kind: str, n: int, batch: int, size: int, epoch: int = 0, **options) -> list[list[list[int]]]:
    """[rank][step] -> the samples of an epoch, which are their own numbers."""
    found = []
    for rank in world(size):
        whole = {
            "arrays": lambda: np.arange(n),
            "sequence": lambda: Batches(n, batch),
            "dataset": lambda: tf.data.Dataset.range(n).batch(batch),
        }[kind]()
        options = {"batch": batch, "steps": None, "seed": None} | options
        mine = data.training(whole, None, None, world=rank, **options)[0]["x"]
        if kind != "dataset":
            mine.epoch = epoch
            mine = [mine[i] for i in range(len(mine))]
        found.append([np.ravel(b[0] if isinstance(b, tuple) else b).tolist() for b in mine])
    return found


@pytest.mark.parametrize("kind", ["arrays", "sequence", "dataset"])
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("n", [40, 41, 43, 47, 64, 65])
def test_every_sample_once_and_equal_steps(kind, size, n):
    ranks = parts(kind, n, 4, size)
    assert len({len(steps) for steps in ranks}) == 1 and all(len(step) for steps in ranks for step in steps)
    rest = n % (4 * size)
    used = n - rest if rest < size else n  # a rest of fewer samples than ranks is left out
    assert sorted(i for steps in ranks for step in steps for i in step) == list(range(used))
    for together in zip(*ranks, strict=True):  # a global batch is the same set of samples as one process' batch
        first = min(min(part) for part in together)
        assert sorted(i for part in together for i in part) == list(range(first, first + sum(map(len, together))))


@pytest.mark.parametrize("kind", ["arrays", "sequence"])
def test_epochs_have_orders_of_their_own(kind):
    first, again, other = (parts(kind, 60, 4, 2, seed=7, epoch=e) for e in (0, 0, 1))
    assert first == again != other
    for ranks in (first, other):
        assert sorted(i for steps in ranks for step in steps for i in step) == list(range(60))


def test_steps_per_epoch_go_on_where_the_last_epoch_ended():
    seen = [parts("arrays", 40, 4, 2, steps=3, epoch=e)[0] for e in (0, 1)]
    assert [step[0] for epoch in seen for step in epoch] == [0, 8, 16, 24, 32, 0]


@pytest.mark.parametrize("steps", [None, 3, 11])
@pytest.mark.parametrize("n", [40, 43])
@pytest.mark.parametrize("epoch", [0, 2])
def test_the_pipeline_gives_the_same_steps(steps, n, epoch):
    x, y = np.arange(2 * n).reshape(n, 2), {"a": np.arange(n)}
    for rank in world(3):
        parts = data.training(x, y, None, batch=4, steps=steps, seed=5, world=rank)[0]["x"]
        parts.epoch = epoch
        pipeline = parts.pipeline()
        for parts.epoch in range(epoch, epoch + 3):
            steps_of_epoch = list(pipeline.as_numpy_iterator())
            assert len(steps_of_epoch) == len(parts) == pipeline.cardinality()
            for k, (rows, labels) in enumerate(steps_of_epoch):
                own_rows, own_labels = parts[k]
                assert (rows == own_rows).all() and (labels["a"] == own_labels["a"]).all()


def test_what_tensorflow_cannot_hold_has_no_pipeline():
    for y in (None, np.array(["a"] * 8, object)):
        parts = data.training(np.arange(8), y, np.ones(8), batch=2, steps=None, seed=None, world=world(2)[0])[0]["x"]
        assert parts.pipeline() is None


@pytest.mark.parametrize("kind", ["arrays", "sequence", "dataset"])
@pytest.mark.parametrize("n", [12, 13, 50])
def test_what_is_scored_is_the_whole_in_order(kind, n):
    found = []
    for rank in world(3):
        whole = {"arrays": np.arange(n), "sequence": Batches(n, 4), "dataset": tf.data.Dataset.range(n).batch(4)}[kind]
        (mine, _, _), part, _ = data.scoring(whole, None, None, None, rank)
        assert part
        mine = [mine] if kind == "arrays" else [mine[i] for i in range(len(mine))] if kind == "sequence" else list(mine)
        found += [int(i) for batch in mine for i in np.ravel(batch)]
    assert found == list(range(n))


def test_too_few_batches_are_scored_whole():
    assert data.scoring(Batches(8, 4), None, None, None, world(3)[1])[1] is False


def test_ranks_with_other_arrays_are_told_apart():
    x = np.arange(4000.0).reshape(1000, 4)
    assert data.digest((x,)) == data.digest((x.copy(),)) != data.digest((x[::-1],))


@pytest.mark.parametrize(
    ("x", "kind"),
    [
        (np.arange(2), ConfigError),  # fewer samples than ranks
        (tf.data.Dataset.range(9).batch(2).filter(lambda x: True), ConfigError),  # nobody knows how many
        (iter([]), ConfigError),
        ((np.arange(9), np.arange(8)), DataError),
    ],
)
def test_refused(x, kind):
    with pytest.raises(kind):
        data.training(x, None, None, batch=2, steps=None, seed=None, world=world(3)[0])

"""How a user's data are divided among ranks: laws, without a launcher."""

from __future__ import annotations

from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.src.trainers.data_adapters import get_data_adapter

from hvd_train.attach import keras_data as data
from hvd_train.attach import keras_loop
from hvd_train.attach.draws import Draws
from hvd_train.errors import ConfigError, DataError
from hvd_train.frontends.serial import Serial


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
        mine = data.training(whole, None, None, draws=Draws(rank), **options)[0]["x"]
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
        parts = data.training(x, y, None, batch=4, steps=steps, seed=5, draws=Draws(rank))[0]["x"]
        parts.epoch = epoch
        pipeline = parts.pipeline()
        for parts.epoch in range(epoch, epoch + 3):
            steps_of_epoch = list(pipeline.as_numpy_iterator())
            assert len(steps_of_epoch) == len(parts) == pipeline.cardinality()
            for k, (rows, labels) in enumerate(steps_of_epoch):
                own_rows, own_labels = parts[k]
                assert (rows == own_rows).all() and (labels["a"] == own_labels["a"]).all()


def test_what_tensorflow_cannot_hold_has_no_pipeline():
    y, weight = np.arange(8), np.ones(8)
    for x, weights in ((y, (weight, None)), (np.array([1, None] * 4, object), weight)):
        parts = data.training(x, (y, y), weights, batch=2, steps=None, seed=None, draws=Draws(world(2)[0]))[0]["x"]
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
        data.training(x, None, None, batch=2, steps=None, seed=None, draws=Draws(world(3)[0]))


def test_a_pipeline_in_any_order_is_refused_or_put_in_order():
    plain = tf.data.Dataset.range(8)
    free: dict = {"num_parallel_calls": 2, "deterministic": False}
    for loose in (
        plain.map(lambda x: x, **free),
        plain.interleave(lambda x: tf.data.Dataset.from_tensors(x), **free),
        plain.batch(2, **free).unbatch(),
    ):
        with pytest.raises(ConfigError, match="deterministic=False"):
            data.training(loose.batch(2), None, None, batch=2, steps=None, seed=None, draws=Draws(world(2)[0]))
        with pytest.raises(ConfigError, match="deterministic=False"):
            data.scoring(loose.batch(2), None, None, None, world(2)[0])
    ordered = plain.interleave(tf.data.Dataset.from_tensors, num_parallel_calls=2).map(
        lambda x: x, num_parallel_calls=2
    )
    options = tf.data.Options()
    options.deterministic = False
    assert data.in_order(ordered) is ordered and data.in_order(ordered.with_options(options)).options().deterministic


def test_a_loop_that_is_left_goes_on_in_another_order_and_a_look_shifts_nothing():
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(gradient_accumulation_steps=2))
    keras_loop.follow([optimizer])
    batches = keras_loop.shard(np.arange(60), None, None, batch_size=4, shuffle=True, seed=0, world=Serial())

    def first() -> list:
        return np.asarray(next(iter(batches))).tolist()

    before, look = first(), first()
    optimizer.inner_optimizer._iterations.assign_add(1)
    after = first()
    list(batches)
    ended = first()
    batches.set_epoch(0)
    assert before == look == first() and after not in (before, ended) and ended != before


X, Y, W = np.ones((8, 3)), np.arange(8), np.linspace(0, 1, 8)
GIVEN = {
    "an array alone": (X,),
    "an array, its labels, a weight for one of two": (X, (Y, Y), (W, None)),
    "a list alone": ([X, Y],),
    "a tuple alone": ((X, Y),),
    "a dict alone": ({"a": X, "b": [X, Y]},),
    "lists and lists": ([X, Y], [Y, X]),
    "one weight for two targets": (X, [Y, Y], W),
    "weights without targets": (X, None, W),
    "strings alone": (np.array(["a", "b"] * 4, object),),
    "a dataset of arrays": (tf.data.Dataset.from_tensor_slices(X).batch(2),),
    "a dataset of tuples of one": (tf.data.Dataset.from_tensor_slices((X,)).batch(2),),
    "a dataset of dicts": (tf.data.Dataset.from_tensor_slices({"a": X}).batch(2),),
    "a dataset of pairs": (tf.data.Dataset.from_tensor_slices(((X, X), Y)).batch(2),),
}


def handed(framework: str, given: tuple) -> str:
    """The structure of a batch that Keras hands to ``train_step``: # is an array."""
    adapter = get_data_adapter(*given)
    batches = adapter.get_tf_dataset() if framework == "tensorflow" else adapter.get_torch_dataloader()
    batch = tf.nest.map_structure(str, batches.element_spec) if framework == "tensorflow" else next(iter(batches))
    return str(keras.tree.map_structure(lambda leaf: "#", batch))


@pytest.mark.parametrize("framework", ["tensorflow", "torch"])
@pytest.mark.parametrize("given", GIVEN)
def test_train_step_gets_what_keras_alone_would_hand_it(given, framework):
    if framework == "torch" and given.startswith("strings"):
        pytest.skip("PyTorch has none")
    x, y, weight = (*GIVEN[given], None, None)[:3]
    mine = data.training(x, y, weight, batch=2, steps=None, seed=None, draws=Draws(world(2)[1]))[0]["x"]
    if isinstance(mine, data.ArrayParts):
        mine = mine.as_keras(framework == "tensorflow")
    assert handed(framework, (mine,)) == handed(framework, GIVEN[given])

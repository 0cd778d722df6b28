"""How a user's data are divided among ranks: laws, without a launcher."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import scipy.sparse
import tensorflow as tf
from keras.src.trainers.data_adapters import get_data_adapter
from keras.src.trainers.epoch_iterator import EpochIterator

from hvd_train.errors import ConfigError, DataError
from hvd_train.script.keras import loop
from hvd_train.script.keras.data.arrays import ArrayParts
from hvd_train.script.keras.data.dataset import BatchOrderDigest, in_order
from hvd_train.script.keras.data.leaves import digest, is_ragged, kind_of
from hvd_train.script.keras.data.scoring import divide_scoring
from hvd_train.script.keras.data.training import divide_training
from hvd_train.script.keras.rng import Draws


def world(size: int) -> list[SimpleNamespace]:
    return [SimpleNamespace(rank=rank, size=size, allgather_bytes=lambda data: [data]) for rank in range(size)]


def training(here: SimpleNamespace, x, y=None, weight=None, **options):
    """A rank's part of what it trains with."""
    options = {"batch": None, "steps": None, "seed": None} | options
    return divide_training(x, y, weight, draws=Draws(here), **options)[0]["x"]


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
    samples = []
    for rank in world(size):
        whole = {
            "arrays": lambda: np.arange(n),
            "sequence": lambda: Batches(n, batch),
            "dataset": lambda: tf.data.Dataset.range(n).batch(batch),
        }[kind]()
        mine = training(rank, whole, **{"batch": batch} | options)
        if kind != "dataset":
            mine.epoch = epoch
            mine = [mine[i] for i in range(len(mine))]
        samples.append([np.ravel(b[0] if isinstance(b, tuple) else b).tolist() for b in mine])
    return samples


@pytest.mark.parametrize("kind", ["arrays", "sequence", "dataset"])
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("n", [47, 48, 49, 51])
def test_every_sample_once_and_equal_steps(kind, size, n):
    ranks = parts(kind, n, 4, size)
    assert len({len(steps) for steps in ranks}) == 1 and all(len(step) for steps in ranks for step in steps)
    rest = n % (4 * size)
    used = n - rest if rest < size else n  # a rest of fewer samples than ranks is left out
    assert sorted(i for steps in ranks for step in steps for i in step) == list(range(used))
    for together in zip(*ranks, strict=True):  # a global batch is the same set of samples as one process' batch
        first = min(min(part) for part in together)
        assert sorted(i for part in together for i in part) == list(range(first, first + sum(map(len, together))))


def test_a_cache_whose_first_pass_was_begun_only():
    """Keras builds a model with one batch: TensorFlow took some such caches for complete, with few batches."""
    counts = []
    for _ in range(80):
        data = tf.data.Dataset.range(96).batch(8).map(lambda x: x + 1, num_parallel_calls=2).prefetch(2).cache()
        mine = training(world(2)[0], data.prefetch(2), batch=8)
        next(iter(mine))
        counts += [sum(1 for _ in mine), sum(1 for _ in mine)]
    assert set(counts) == {6}


@pytest.mark.parametrize("kind", ["arrays", "sequence"])
def test_each_epoch_has_another_order(kind):
    first, again, other = (parts(kind, 60, 4, 2, seed=7, epoch=e) for e in (0, 0, 1))
    assert first == again != other
    for ranks in (first, other):
        assert sorted(i for steps in ranks for step in steps for i in step) == list(range(60))


def epochs(data, count: int, steps: int | None, execution: int = 1, first: int = 0, **options) -> list[list[list]]:
    """[epoch][step] -> the samples that Keras takes."""
    iterator = EpochIterator(data, steps_per_epoch=steps, steps_per_execution=execution, **options)
    iterator.reset()
    samples = []
    for epoch in range(first, first + count):
        begin = getattr(getattr(data, "py_dataset", data), "begin", lambda epoch: None)
        begin(epoch)
        batches = [batch for *_, buffer in iterator.enumerate_epoch() for batch in buffer]
        samples.append([np.ravel(b[0] if isinstance(b, tuple) else b).tolist() for b in batches])
    return samples


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
@pytest.mark.parametrize("kind", ["arrays", "pipeline", "sequence", "unknown"])
@pytest.mark.parametrize(("n", "steps", "execution"), [(40, 3, 1), (40, 5, 1), (43, 4, 1), (43, 9, 1), (90, 3, 2)])
def test_steps_per_epoch_take_what_keras_takes(kind, n, steps, execution):
    """Epochs end where the data do, and the next ones go on in the rest of them."""
    stream = tf.data.Dataset.range(n).filter(lambda x: True)
    one: tuple = (stream.batch(8), {}) if kind == "unknown" else (np.arange(n), {"batch_size": 8})
    alone = epochs(one[0], 5, steps, execution, 2, **one[1])
    ranks = []
    for rank in world(2):
        whole = {"sequence": Batches(n, 4), "unknown": stream.batch(4)}.get(kind, np.arange(n))
        mine = training(rank, whole, batch=4, steps=steps, execution=execution)
        if kind == "pipeline":
            pipeline = mine.pipeline()
            mine.begin(2)
            mine = pipeline
        ranks.append(epochs(mine, 5, steps, execution, 2))
    joined = [[sorted(a + b) for a, b in zip(*steps, strict=True)] for steps in zip(*ranks, strict=True)]
    assert joined == alone


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
def test_orders_of_passes_that_go_on_over_epochs():
    x, ranks = np.arange(40), []
    for rank in world(2):
        mine = training(rank, x, batch=4, steps=3, seed=5)
        pipeline, steps = mine.pipeline(), []
        iterator = EpochIterator(pipeline, steps_per_epoch=3)
        iterator.reset()
        for epoch in range(1, 5):
            mine.begin(epoch)
            steps.append([b.tolist() for *_, (b,) in iterator.enumerate_epoch()])
            assert steps[-1] == [mine[k].tolist() for k in range(len(mine))]
        ranks.append(steps)
    passes = [[b for rank in ranks for epoch in rank[k : k + 2] for step in epoch for b in step] for k in (0, 2)]
    assert passes[0] != passes[1] and sorted(passes[0]) == sorted(passes[1]) == list(range(40))


def test_without_batch_size_steps_per_epoch_cut_the_data():
    ranks = [training(rank, np.arange(500), steps=7) for rank in world(3)]
    assert [len(mine) for mine in ranks] == [7] * 3
    assert sum(len(mine[0]) for mine in ranks) == -(-500 // 7)
    with pytest.raises(ConfigError, match="start fewer ranks"):
        training(world(3)[0], np.arange(8), steps=8)


@pytest.mark.parametrize("n", [40, 43])
@pytest.mark.parametrize("first", [0, 2])
def test_the_pipeline_gives_the_same_steps(n, first):
    x, y = np.arange(2 * n).reshape(n, 2), {"a": np.arange(n)}
    for rank in world(3):
        parts = training(rank, x, y, batch=4, seed=5)
        pipeline = parts.pipeline()
        for epoch in range(first, first + 3):
            parts.begin(epoch)
            steps_of_epoch = list(pipeline.as_numpy_iterator())
            assert len(steps_of_epoch) == len(parts) == pipeline.cardinality()
            for k, (rows, labels) in enumerate(steps_of_epoch):
                own_rows, own_labels = parts[k]
                assert (rows == own_rows).all() and (labels["a"] == own_labels["a"]).all()


@pytest.mark.parametrize("repeated", [False, True])
def test_a_look_on_one_rank_at_a_shuffled_pipeline_is_refused(repeated):
    def orders(look: bool) -> list[bytes]:
        shuffled = tf.data.Dataset.range(64).shuffle(64, seed=3)
        shuffled = (shuffled.repeat() if repeated else shuffled).batch(4)
        digests = BatchOrderDigest()
        mine = training(world(2)[0], shuffled, steps=8, order_digest=digests)
        next(iter(mine))
        digests.begin()
        iterator, orders = EpochIterator(mine, steps_per_epoch=8), []
        iterator.reset()
        for epoch in range(3):
            assert len(list(iterator.enumerate_epoch())) == 8
            orders.append(digests.order(8 * epoch + 8))
            next(iter(shuffled)) if look and not epoch else None
        return orders

    plain, looked = orders(False), orders(True)
    assert plain == orders(False) and plain[0] == looked[0] and plain[2] != looked[2] and len(set(plain)) == 3


def test_what_tensorflow_cannot_hold_has_no_pipeline():
    y, weight = np.arange(8), np.ones(8)
    here = world(2)[0]
    assert training(here, np.array([1, None] * 4, object), (y, y), weight, batch=2).pipeline() is None
    parts = training(here, y, (y, y), (weight, None), batch=2).pipeline()
    assert [len(batch[0]) for batch in parts] == [2, 2] and next(iter(parts))[2][1] is None


def scored(whole, size: int, *, uncut: bool = False, steps: int | None = None, batch: int | None = 4) -> list:
    """[(samples of each batch of this rank's, their EvalShard)]"""
    shards = []
    for rank in world(size):
        mine = divide_scoring(whole, None, None, Draws(rank), batch=batch, steps=steps, uncut=uncut)
        x = mine.data[0]
        batches = [x[k : k + (batch or 99)] for k in range(0, len(x), batch or 99)] if kind_of(x) == "arrays" else x
        shards.append(([np.ravel(b[0] if isinstance(b, tuple) else b).tolist() for b in batches], mine))
    return shards


def whole_data(kind: str, n: int):
    return {"arrays": np.arange(n), "sequence": Batches(n, 4), "dataset": tf.data.Dataset.range(n).batch(4)}[kind]


@pytest.mark.parametrize("uncut", [False, True])
@pytest.mark.parametrize("kind", ["arrays", "sequence", "dataset"])
@pytest.mark.parametrize(("n", "steps"), [(12, None), (13, None), (50, None), (50, 3), (50, 9)])
def test_what_is_scored_is_the_whole_in_order(kind, n, steps, uncut):
    shards = scored(whole_data(kind, n), 3, uncut=uncut, steps=steps)
    assert all(mine.part and mine.limit is None for _, mine in shards)
    counting = [batch for batches, mine in shards if mine.counts for batch in batches]
    assert [i for batch in counting for i in batch] == list(range(min(n, 12 * (steps or n))))
    if uncut:  # windows of 3 batches of 4 begin with a global batch
        for batches, mine in shards:
            assert batches and mine.window == 3 and all(batch[0] % 12 == 0 for batch in batches[::3])


def test_too_few_batches_and_unknown_numbers_are_scored_whole():
    stream = tf.data.Dataset.range(40).filter(lambda x: True).batch(4)
    for whole, steps, limit in ((Batches(8, 4), None, None), (stream, None, None), (stream, 2, 6)):
        for _, mine in scored(whole, 3, steps=steps, uncut=True):
            assert not mine.part and mine.limit == limit and mine.window == 3
    assert [sum(map(len, b)) for b, _ in scored(np.arange(50), 1, steps=3, batch=None)] == [50]


@pytest.mark.parametrize("kind", ["arrays", "sequence", "dataset", "unknown"])
def test_steps_to_score_are_made_in_whole_executions(kind):
    stream = tf.data.Dataset.range(50).batch(12).filter(lambda x: True)
    one: tuple = (stream, {}) if kind == "unknown" else (np.arange(50), {"batch_size": 12})
    (alone,) = epochs(one[0], 1, 3, 2, **one[1])
    whole = stream.unbatch().batch(4) if kind == "unknown" else whole_data(kind, 50)
    ranks = [divide_scoring(whole, None, None, Draws(r), batch=4, steps=3, execution=2, uncut=False) for r in world(3)]
    options = {"batch_size": 4} if kind == "arrays" else {}
    shards = [epochs(mine.data[0], 1, mine.limit, 2, **options)[0] for mine in ranks]
    shards = shards[:1] if kind == "unknown" else shards  # whole on every rank
    assert [i for batches in shards for batch in batches for i in batch] == [i for batch in alone for i in batch]


SHORT = tf.data.Dataset.range(31).batch(6)  # 6, 6, 6, 6, 6, 1
SHORT_WITHIN = {
    "repeated": (SHORT.repeat(4), [12] * 10 + [4]),
    "repeated without remainder": (tf.data.Dataset.range(36).batch(6).repeat(4), [12] * 12),
    "joined": (SHORT.concatenate(tf.data.Dataset.range(13).batch(6)).map(lambda x: 2 * x).prefetch(1), [12, 12, 12, 8]),
    "a part repeated": (SHORT.skip(2).repeat(2), [12, 12, 12, 2]),
    "the short one first": (SHORT.skip(5).concatenate(SHORT), [12, 12, 8]),
    "zipped": (tf.data.Dataset.zip((SHORT, SHORT.repeat(4))), [12, 12, 7]),
    "zipped alike": (tf.data.Dataset.zip((SHORT.skip(0), SHORT)).map(lambda x, y: (x, y)), [12, 12, 7]),
    "one sample a batch": (tf.data.Dataset.range(9).batch(1), [2] * 4),
}


@pytest.mark.parametrize("name", SHORT_WITHIN)
def test_short_batches_within_a_pipeline_are_filled_up(name):
    """The number of steps is stated where it is sure; TensorFlow refuses one that is not right."""
    whole, expected = SHORT_WITHIN[name]
    ranks = [training(rank, whole) for rank in world(2)]
    taken = [[len(tf.nest.flatten(batch)[0]) for batch in mine] for mine in ranks]
    assert [sum(step) for step in zip(*taken, strict=True)] == expected
    known = int(ranks[0].cardinality())
    assert known == (-2 if name in ("a part repeated", "the short one first", "zipped") else len(expected))


def batches_of(sizes, shape=None):
    """A generator's batches of these sizes, of which the number is known."""
    ends = np.cumsum([0, *sizes])
    values = [np.arange(a, b) for a, b in itertools.pairwise(ends)]
    data = tf.data.Dataset.from_generator(lambda: iter(values), output_signature=tf.TensorSpec((shape,), tf.int64))
    return data.apply(tf.data.experimental.assert_cardinality(len(sizes)))


@pytest.mark.parametrize(
    "data",
    [
        batches_of([8] * 5, 8),  # the script tells the shapes of its generator
        tf.data.Dataset.range(40).batch(8).map(lambda x: tf.ensure_shape(x, (8,))),
    ],
    ids=["generator", "ensured"],
)
def test_a_known_shape_drops_nothing(data):
    """Without drop_remainder the last batches count, also where TensorFlow knows the size of each."""
    taken = [[batch.tolist() for batch in training(rank, data).as_numpy_iterator()] for rank in world(2)]
    assert [[len(batch) for batch in mine] for mine in taken] == [[8, 8, 4]] * 2
    assert sorted(i for mine in taken for batch in mine for i in batch) == [*range(40)]


@pytest.mark.parametrize(
    "data",
    [
        tf.data.Dataset.range(48).batch(6).map(lambda x: tf.boolean_mask(x, x % 7 > 0)),
        batches_of([2, 6] * 6),
        batches_of([6, 2] * 6),
    ],
    ids=["filtered within", "short first", "short later"],
)
def test_batches_of_other_lengths_are_told(data):
    """They would be left out, or make other global batches; the advised end of the pipeline is exact."""
    total = sum(len(batch) for batch in data)
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"by which they are divided; tf.data; end it with"):
        list(training(world(2)[0], data))
    ranks = [training(rank, data.rebatch(6)) for rank in world(2)]
    assert sum(len(batch) for mine in ranks for batch in mine) == total


@pytest.mark.parametrize("padded", [False, True])
def test_a_rest_that_the_pipeline_drops_is_dropped_of_global_batches(padded):
    """As one process with batches as large as these together drops it; each rank always gets whole batches."""
    lengths = tf.data.Dataset.range(1, 46).map(lambda n: tf.range(n % 5 + 1) + 1)
    batched = lengths.padded_batch(6, drop_remainder=True) if padded else tf.data.Dataset.range(45).batch(6, True)
    ranks = [training(rank, batched.map(lambda x: x).prefetch(2)) for rank in world(2)]
    taken = [[*mine.as_numpy_iterator()] for mine in ranks]
    assert [len(mine) for mine in taken] == [3, 3] == [int(mine.cardinality()) for mine in ranks]
    assert {len(batch) for mine in taken for batch in mine} == {6}
    if not padded:
        assert np.concatenate([np.append(*step) for step in zip(*taken, strict=True)]).tolist() == [*range(36)]
    else:  # padded to the longest of the global batch
        assert {batch.shape[1] for mine in taken for batch in mine} == {5}
    with pytest.raises(ConfigError, match="has 2 batches for 3 ranks, and drop_remainder drops what is less"):
        training(world(3)[0], tf.data.Dataset.range(15).batch(6, drop_remainder=True))
    data = tf.data.Dataset.range(45)
    for dropping in (
        data.batch(9).rebatch(6, drop_remainder=True),
        data.window(6).flat_map(lambda x: x.batch(6, True)),
    ):
        assert [len(batch) for batch in training(world(2)[0], dropping)] == [6] * 3
    for keeping in (
        data.batch(9, drop_remainder=True).rebatch(6),
        data.batch(6, True).map(lambda x: x).unbatch().batch(6),
    ):
        assert sum(len(batch) for batch in training(world(2)[0], keeping)) == -(-len([*keeping.unbatch()]) // 2)
    windows = data.window(3).flat_map(lambda x: x.batch(3))
    assert sum(len(batch) for batch in training(world(2)[0], windows)) in (22, 23)
    again = tf.data.Dataset.range(15).batch(6, drop_remainder=True).unbatch().batch(5)
    assert [len(batch) for batch in training(world(2)[0], again)] == [5, 1]


def test_ranks_with_other_arrays_are_told_apart():
    x = np.arange(4000.0).reshape(1000, 4)
    assert digest((x,)) == digest((x.copy(),)) != digest((x[::-1],))


@pytest.mark.parametrize(
    ("x", "kind", "told"),
    [
        (np.arange(2), ConfigError, None),  # fewer samples than ranks
        (tf.data.Dataset.range(9).batch(2).repeat(), ConfigError, None),  # without end
        (iter([]), ConfigError, None),
        ((np.arange(9), np.arange(8)), DataError, None),
        (scipy.sparse.csr_matrix(np.eye(8)), ConfigError, "cannot be divided among ranks"),
        (tf.sparse.from_dense(np.eye(8)), ConfigError, "cannot be divided among ranks"),
    ],
)
def test_refused(x, kind, told):
    with pytest.raises(kind, match=told):
        training(world(3)[0], x, batch=2)


def test_a_pipeline_in_any_order_is_refused_or_put_in_order():
    plain = tf.data.Dataset.range(8)
    free: dict = {"num_parallel_calls": 2, "deterministic": False}
    for loose in (
        plain.map(lambda x: x, **free),
        plain.interleave(lambda x: tf.data.Dataset.from_tensors(x), **free),
        plain.batch(2, **free).unbatch(),
    ):
        with pytest.raises(ConfigError, match="deterministic=False"):
            training(world(2)[0], loose.batch(2), batch=2)
        with pytest.raises(ConfigError, match="deterministic=False"):
            divide_scoring(loose.batch(2), None, None, Draws(world(2)[0]), batch=None, steps=None, uncut=False)
    ordered = plain.interleave(tf.data.Dataset.from_tensors, num_parallel_calls=2).map(
        lambda x: x, num_parallel_calls=2
    )
    options = tf.data.Options()
    options.deterministic = False
    assert in_order(ordered) is ordered and in_order(ordered.with_options(options)).options().deterministic


def test_a_loop_that_is_left_goes_on_in_another_order_and_a_look_shifts_nothing():
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(gradient_accumulation_steps=2))
    loop.follow([optimizer])
    batches = loop.shard(np.arange(60), batch_size=4)

    def first() -> list:
        return np.asarray(next(iter(batches))).tolist()

    before, look = first(), first()
    optimizer.inner_optimizer._iterations.assign_add(1)
    after = first()
    list(batches)
    ended = first()
    batches.set_epoch(0)
    assert before == look == first() and after not in (before, ended) and ended != before


def test_batches_made_anew_for_each_epoch_have_other_orders():
    """As in ``for epoch in range(9): for x in hk.shard(x, batch_size=4)``."""
    optimizer = keras.optimizers.SGD()
    loop.follow([optimizer])
    orders = []
    for _ in range(3):
        batches = loop.shard(np.arange(60), batch_size=4)
        for batch in batches:
            orders.append(np.asarray(batch).tolist())
            optimizer._iterations.assign_add(1)
    assert len({tuple(sum(orders[k : k + 15], [])) for k in (0, 15, 30)}) == 3


X, Y, W = np.ones((8, 3)), np.arange(8), np.linspace(0, 1, 8)
HANDED = {
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


def handed(framework: str, arguments: tuple) -> str:
    """The structure of a batch that Keras hands to ``train_step``: # is an array."""
    adapter = get_data_adapter(*arguments)
    batches = adapter.get_tf_dataset() if framework == "tensorflow" else adapter.get_torch_dataloader()
    batch = tf.nest.map_structure(str, batches.element_spec) if framework == "tensorflow" else next(iter(batches))
    return str(keras.tree.map_structure(lambda leaf: "#", batch))


@pytest.mark.parametrize("framework", ["tensorflow", "torch"])
@pytest.mark.parametrize("name", HANDED)
def test_train_step_gets_what_keras_alone_would_hand_it(name, framework):
    if framework == "torch" and name.startswith("strings"):
        pytest.skip("PyTorch has none")
    x, y, weight = (*HANDED[name], None, None)[:3]
    mine = training(world(2)[1], x, y, weight, batch=2)
    if isinstance(mine, ArrayParts):
        mine = mine.as_keras(framework == "tensorflow")
    assert handed(framework, (mine,)) == handed(framework, HANDED[name])


LENGTHS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6]  # of texts


def texts_of_lengths():
    """Text k has LENGTHS[k] times the number k + 1, and the target k."""
    rows = [np.full(n, k + 1) for k, n in enumerate(LENGTHS)]
    spec = tf.TensorSpec([None], tf.int64), tf.TensorSpec([], tf.int64)
    data = tf.data.Dataset.from_generator(lambda: zip(rows, range(len(rows)), strict=True), output_signature=spec)
    return data.apply(tf.data.experimental.assert_cardinality(len(rows)))


def steps_of_ranks(whole, size: int) -> list[list]:
    """[step][rank] -> what a rank's step gets."""
    return list(zip(*(list(training(rank, whole)) for rank in world(size)), strict=True))


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("padding", [0, 7])
def test_texts_are_padded_to_the_longest_of_a_global_batch(size, padding):
    """As one process pads batches that are ``size`` times as large; with what the pipeline pads with."""
    values = np.int64(padding), np.int64(0)
    whole = texts_of_lengths().padded_batch(4, padding_values=values)
    alone = list(texts_of_lengths().padded_batch(4 * size, padding_values=values).as_numpy_iterator())
    steps = steps_of_ranks(whole, size)
    used = [batch for batch in alone if len(batch[1]) >= size]
    for parts, batch in zip(steps, used, strict=True):
        assert max(len(part[1]) for part in parts) - min(len(part[1]) for part in parts) <= 1
        for k in range(2):
            np.testing.assert_array_equal(np.concatenate([part[k] for part in parts]), batch[k])


def test_buckets_and_ragged_batches_are_divided():
    buckets = texts_of_lengths().bucket_by_sequence_length(lambda x, y: tf.shape(x)[0], [4, 7], [4, 3, 2])
    assert buckets.cardinality() == tf.data.UNKNOWN_CARDINALITY
    for whole in (buckets, texts_of_lengths().ragged_batch(4)):
        places = [int(k) for parts in steps_of_ranks(whole, 2) for part in parts for k in part[1]]
        assert sorted(places) == list(range(len(LENGTHS)))
        for parts in steps_of_ranks(whole, 2):
            for x, y in parts:
                for row, k in zip(x, y, strict=True):
                    row = np.asarray(row)
                    assert row[row > 0].tolist() == [int(k) + 1] * LENGTHS[int(k)]
                    assert not is_ragged(x) or len(row) == LENGTHS[int(k)]


def test_shuffled_windows_of_a_series_are_divided():
    """A shuffle's seeds are constants of another kind, on which the look for padding ended."""
    series = np.arange(40.0)
    whole = keras.utils.timeseries_dataset_from_array(
        series[:-3], series[3:], sequence_length=3, batch_size=4, shuffle=True, seed=1
    )
    part = next(iter(world(2)))
    labels = [float(y) for batch in training(part, whole) for y in batch[1]]
    assert len({*labels}) == len(labels) in (17, 18)


def test_what_is_scored_of_texts_is_what_one_process_scores():
    whole, alone = (texts_of_lengths().padded_batch(n) for n in (4, 8))
    every = [divide_scoring(whole, None, None, Draws(r), batch=None, steps=None, uncut=True) for r in world(2)]
    steps = [list(each.data[0]) for each in every]
    batches = [batch for rank in steps for batch in rank]
    for (x, y), (own_x, own_y) in zip(alone, batches, strict=True):
        np.testing.assert_array_equal(x, own_x)
        np.testing.assert_array_equal(y, own_y)


def test_padding_that_cannot_be_known_is_refused():
    whole = texts_of_lengths().padded_batch(4, padding_values=(np.int64(7), np.int64(0)))
    for strange in (whole.map(lambda x, y: (tf.cast(x, tf.float32), y)), whole.unbatch().padded_batch(2)):
        with pytest.raises(ConfigError, match=r"pad with zeros, or to one length"):
            steps_of_ranks(strange, 2)
    lookup = keras.layers.IntegerLookup(vocabulary=np.arange(40))
    looked_up = texts_of_lengths().padded_batch(4).map(lambda x, y: (lookup(x), y))
    assert len(steps_of_ranks(looked_up, 2)) == 3


class Texts(keras.utils.PyDataset):
    """Each batch is as wide as its longest row."""

    def __len__(self) -> int:
        return 5

    def __getitem__(self, i: int) -> tuple:
        return np.full((4, i + 1), i + 1), np.full(4, i)


def test_batches_of_other_widths_are_joined_at_the_end_of_a_pass():
    mine = training(world(2)[0], Texts())
    assert [mine[k][0].shape for k in range(len(mine))] == [(4, 1), (4, 3), (2, 5)]
    parts = [training(rank, Texts())[1] for rank in world(3)]  # batches of 4 and 5 places: 8 rows
    assert np.concatenate([x for x, _ in parts]).tolist() == [[4] * 4 + [0]] * 4 + [[5] * 5] * 4
    assert np.concatenate([y for _, y in parts]).tolist() == [3] * 4 + [4] * 4


@pytest.mark.parametrize("kind", ["constant", "bytes", "columns", "ragged"])
def test_texts_of_tensorflow_are_divided(kind):
    words = [f"t{k}" for k in range(13)]
    x = {
        "constant": tf.constant(words),
        "bytes": np.array([w.encode() for w in words], object),
        "columns": np.array([[w, w] for w in words]),
        "ragged": tf.ragged.constant([[w] * (k % 3 + 1) for k, w in enumerate(words)]),
    }[kind]
    for weighted in (False, True):  # a pipeline, and batch by batch
        batches = []
        for rank in world(2):
            parts = training(rank, x, np.arange(13), batch=4, seed=5)
            batches += list(get_data_adapter(parts.as_keras(True, weighted)).get_tf_dataset())
        rows = [(row, k) for batch, y in batches for row, k in zip(batch.numpy(), y.numpy(), strict=True)]
        pairs = [(np.ravel(row)[0].decode(), int(k)) for row, k in rows]
        assert sorted(pairs) == sorted(zip(words, range(13), strict=True))
    scored_words = []
    for rank in world(2):
        mine = divide_scoring(x, np.arange(13), None, Draws(rank), batch=4, steps=None, uncut=False).data
        batches = get_data_adapter(*mine, batch_size=4).get_tf_dataset()
        scored_words += [np.ravel(row)[0].decode() for batch, _ in batches for row in batch.numpy()]
    assert scored_words == words

"""Batch normalization: padding counts for nothing, both frameworks agree, and ranks compute as one."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from hvd_train.compression import make
from hvd_train.errors import ConfigError
from hvd_train.frontends.serial import Serial
from hvd_train.protocol import Batch
from hvd_train.update.exchange import Exchange
from hvd_train.update.replicated import Replicated
from tests.frontends.test_contract import (
    CLASSES,
    FRAMEWORKS,
    OWN,
    batch,
    built,
    close,
    everything,
    module,
    opened,
    part,
    sample_of,
)
from tests.own_models import pytorch_norm
from tests.rank_threads import Threads, run_ranks

SHAPE = (6, 5, 2)
NORM = {"pytorch": "tests.own_models:pytorch_norm", "tensorflow": "tests.own_models:keras_norm"}
COUNTS = [6, 4, 1, 0, 6, 3]


def norm(framework, **keys):
    return opened(framework, {"name": NORM[framework]}, shape=SHAPE, **keys)


def trained(frontend, counts=COUNTS, rows=6, padding=0.0):
    for k, count in enumerate(counts):
        one = batch(k, rows, count, SHAPE)
        one.inputs["input"][count:] = padding
        frontend.train_step(frontend.to_device(one), 1 / max(count, 1), k, 0.1)
    return everything(frontend)


@pytest.mark.parametrize("sync", [False, True])
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_padding_does_not_enter_statistics(framework, sync):
    padded = trained(norm(framework, sync_batchnorm=sync), [4], padding=50.0)
    one = batch(0, 6, 4, SHAPE)
    alone = norm(framework, sync_batchnorm=sync)
    alone.train_step(alone.to_device(part(one, slice(4))), 1 / 4, 0, 0.1)
    close(padded, everything(alone), rtol=1e-12)
    conv = padded["statistics/norm.mean"]
    assert conv.any() and abs(conv).max() < 10


@pytest.mark.parametrize("sync", [False, True])
def test_both_frameworks_agree_with_short_and_empty_batches(sync):
    trees = [trained(norm(framework, sync_batchnorm=sync)) for framework in FRAMEWORKS]
    assert {"statistics/norm.mean", "statistics/norm.variance"} <= trees[0].keys()
    close(*trees)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_batch_of_padding_leaves_statistics_alone(framework):
    frontend = norm(framework, optim={"lr": 0.1})
    before = everything(frontend)
    close(trained(frontend, [0]), before)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_one_value_per_channel_trains(framework):
    """torch's own layer refuses it; its normalized value is the bias, and it has no variance to remember."""
    frontend = opened(framework, {"name": OWN[framework], "rate": 0.0})
    before = everything(frontend)
    one = batch(count=1)
    sums = frontend.ops.to_numpy(frontend.train_step(frontend.to_device(one), 1.0, 0, 0.1))
    assert np.isfinite(sums).all()
    after = everything(frontend)
    assert all(np.isfinite(x).all() for x in after.values())
    assert all((after[k] == before[k]).all() for k in before if k.startswith("statistics/"))


# ---- PyTorch on ranks that are threads


class TorchThreads(Threads):
    """Tensors of a world of threads."""

    def allreduce_async(self, x, name, op="sum"):
        import torch

        return torch.from_numpy(np.array(super().allreduce_async(x.numpy(), name, op)))

    def allgather_async(self, x, name):
        import torch

        return torch.from_numpy(super().allgather_async(x.numpy(), name))


def cumulative_norm(input_shape, num_classes):
    """Statistics are the mean over all batches, as torch has it with ``momentum=None``."""
    model = pytorch_norm(input_shape, num_classes)
    model.norm.momentum = None
    return model


def ranks_train(size, sync, counts, name=NORM["pytorch"], look=everything):
    """State of each rank after one step per entry of ``counts``: samples of all ranks, cut unevenly."""
    lock = threading.Lock()

    def work(communicator):
        communicator = TorchThreads(communicator.world, communicator.rank) if size > 1 else Serial()
        with lock:
            sample, keys = sample_of(SHAPE, CLASSES), {"model": {"name": name}, "sync_batchnorm": sync}
            frontend = built("pytorch", sample, communicator, **keys)
        for k, count in enumerate(counts):
            whole = batch(k, count, count, SHAPE)
            own = np.array_split(np.arange(count), [count // 2, *[count - 1] * (size - 2)] if size > 1 else 1)[
                communicator.rank
            ]
            rows = part(whole, own)
            if not len(own):  # a row of padding, as the loader gives
                empty = {"input": np.full((1, *SHAPE), 9, np.float32)}, {"label": np.zeros(1, np.int64)}
                rows = Batch(*empty, np.zeros(1, np.float32), own)
            frontend.train_step(frontend.to_device(rows), 1 / count, k, 0.1)
        return look(frontend)

    return run_ranks(size, work)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_threads_with_uneven_and_empty_shares_compute_as_one_rank(size):
    counts = [9, 7, 1, 2, 9]
    (one,) = ranks_train(1, True, counts)
    for state in ranks_train(size, True, counts):
        close(one, state)
    apart = ranks_train(size, False, counts)[0]
    assert max(np.abs(apart[k] - one[k]).max() for k in one) > 1e-3


def test_a_rank_whose_part_was_empty_counts_the_batch_where_statistics_are_averaged():
    """It had counted 4 batches and the others 5; its next one weighed 1/5, and 1/6 in a run that was resumed."""

    def look(frontend):
        (key,) = (key for key in frontend.state() if key.endswith("num_batches_tracked"))
        before = int(frontend.state()[key])
        frontend.average_statistics()
        return before, int(frontend.state()[key])

    name = "tests.frontends.test_batchnorm:cumulative_norm"
    assert ranks_train(2, False, [9, 7, 1, 2, 9], name, look) == [(4, 5), (5, 5)]


# ---- the layers


def pytorch_layer(kind="BatchNorm2d", sync=True, communicator=None, **options):
    import torch

    from hvd_train.frontends.pytorch import batchnorm as pt_batchnorm

    layer = getattr(torch.nn, kind)(3, dtype=torch.float64, **options)
    model = torch.nn.Sequential(layer)
    pt_batchnorm.prepare(model, communicator or Serial(), module("pytorch").cpu_ops(), sync)
    return model


class Two(Serial):
    """Claims two ranks of which the other has no sample: the joined path must give what torch's kernel gives."""

    size = 2


@pytest.mark.parametrize("options", [{}, {"affine": False}, {"bias": False}, {"momentum": None}, {"momentum": 0.3}])
@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        ("BatchNorm1d", (7, 3)),
        ("BatchNorm1d", (4, 3, 5)),
        ("BatchNorm2d", (4, 3, 5, 2)),
        ("SyncBatchNorm", (4, 3, 5, 2)),
    ],
)
def test_the_joined_layer_is_torchs_own(kind, shape, options):
    import torch

    rng, results = np.random.default_rng(0), []
    data = [[torch.from_numpy(rng.normal(3, 2, shape)) for _ in range(2)] for _ in range(3)]
    for communicator in (Serial(), Two()):
        model = pytorch_layer(kind, communicator=communicator, **options)
        for x, y in data:
            x = x.clone().requires_grad_()
            (model(x) * y).sum().backward()
        own = model[0]
        values = [x.grad, own.running_mean, own.running_var, *(p.grad for p in own.parameters())]
        results.append([*values, model.eval()(x.detach())])
        assert own.num_batches_tracked is None if own.momentum else own.num_batches_tracked == 3
    for a, b in zip(*results, strict=True):
        assert torch.allclose(a, b, rtol=1e-12, atol=1e-13)
    plain = getattr(torch.nn, kind)(3, **options)
    assert [n for n, _ in model[0].named_parameters()] == [n for n, _ in plain.named_parameters()]
    assert isinstance(model[0], type(plain))


def test_half_precision_inputs_keep_their_type_and_32_bit_statistics():
    import torch

    model = pytorch_layer(communicator=Two()).float()
    x = torch.randn(4, 3, 5, 2, dtype=torch.bfloat16, requires_grad=True)
    y = model(x)
    y.sum().backward()
    assert y.dtype == x.grad.dtype == torch.bfloat16
    assert model[0].running_var.dtype == model[0].weight.grad.dtype == torch.float32


@pytest.mark.parametrize("options", [{}, {"scale": False}, {"center": False}, {"axis": 1}])
def test_the_keras_layers_gradient_is_that_of_the_plain_formula(options):
    module("tensorflow")
    import keras
    import tensorflow as tf

    from hvd_train.frontends.tensorflow import batchnorm as tf_batchnorm

    rng = np.random.default_rng(0)
    x, y = (tf.constant(rng.normal(3, 2, (5, 4, 3))) for _ in range(2))
    weights = tf.constant([1.0, 1, 1, 0, 0], tf.float64)
    layer = keras.layers.BatchNormalization(dtype="float64", **options)
    axis = options.get("axis", 2)
    model = keras.Sequential([keras.Input((4, 3), dtype="float64"), layer])
    tf_batchnorm.prepare(model, Serial(), module("tensorflow").cpu_ops(), True).weights = weights
    along = [1, 4, 1] if axis == 1 else [1, 1, 3]
    kept = [tf.convert_to_tensor(v) for v in layer.trainable_variables]
    with tf.GradientTape() as tape:
        tape.watch(x)
        found = tf.reduce_sum(model(x, training=True) * y)
    gradients = tape.gradient(found, [x, *[v.value for v in layer.trainable_variables]])
    with tf.GradientTape() as tape:
        tape.watch([x, *kept])
        mean, variance = tf.nn.moments(x[:3], [0, 3 - axis], keepdims=True)
        z = (x - mean) / tf.sqrt(variance + 1e-3)
        scale = tf.reshape(kept[0], along) if layer.scale else 1.0
        bias = tf.reshape(kept[-1], along) if layer.center else 0.0
        expected = tf.reduce_sum((z * scale + bias) * y)
    for a, b in zip(gradients, tape.gradient(expected, [x, *kept]), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)
    n = 12 if axis == 2 else 9
    unbiased = np.var(x.numpy()[:3], axis=(0, 3 - axis)) * n / (n - 1)
    np.testing.assert_allclose(layer.moving_variance.numpy(), 0.99 + 0.01 * unbiased, rtol=1e-12)


def test_a_mask_and_merged_axes_count_what_they_hold():
    module("tensorflow")
    import keras
    import tensorflow as tf

    from hvd_train.frontends.tensorflow import batchnorm as tf_batchnorm

    rng = np.random.default_rng(0)
    x = rng.normal(3, 2, (3, 4, 2))
    mask = rng.integers(0, 2, (3, 4)).astype(bool)

    def moved(inputs, mask=None):
        layer = keras.layers.BatchNormalization(dtype="float64", momentum=0.0)
        model = keras.Sequential([keras.Input(inputs.shape[1:], dtype="float64"), layer])
        context = tf_batchnorm.prepare(model, Serial(), module("tensorflow").cpu_ops(), False)
        context.weights = tf.constant([1.0, 1, 0], tf.float64)
        layer(tf.constant(inputs), training=True, mask=mask)
        return layer.moving_mean.numpy()

    np.testing.assert_allclose(moved(x, mask), x[:2][mask[:2]].mean(axis=0))
    np.testing.assert_allclose(moved(x.reshape(12, 2)), x[:2].reshape(8, 2).mean(axis=0))
    with pytest.raises(ConfigError, match="first axis of 4 for 3 samples"):
        moved(x.transpose(1, 0, 2))


# ---- what cannot be right is refused


def test_refusals_in_pytorch():
    import torch

    class Own(torch.nn.BatchNorm2d):
        def forward(self, x):
            return x

    from hvd_train.frontends.pytorch import batchnorm as pt_batchnorm

    for layer, words in [(Own(3), "forward of its own"), (torch.nn.BatchNorm1d(3, track_running_stats=False), "track")]:
        model = torch.nn.Sequential(torch.nn.Identity(), layer)
        with pytest.raises(ConfigError, match=f"{words}.*model layer 1"):
            pt_batchnorm.prepare(model, Serial(), None, True)
        pt_batchnorm.prepare(model, Serial(), None, False)
    model = torch.nn.Sequential(torch.nn.Identity(), Own(3))
    with pytest.raises(ConfigError, match="forward of its own.*model layer 1.*leave swa out"):
        pt_batchnorm.prepare(model, Serial(), None, False, swa=True)


def test_refusals_in_keras():
    module("tensorflow")
    import keras

    from hvd_train.frontends.tensorflow import batchnorm as tf_batchnorm

    class Own(keras.layers.BatchNormalization):
        def call(self, inputs, training=None, mask=None):
            return inputs

    model = keras.Sequential([keras.Input((3,)), keras.Sequential([Own(name="mine")])])
    with pytest.raises(ConfigError, match="call of its own.*mine"):
        tf_batchnorm.prepare(model, Serial(), None, True)
    with pytest.raises(ConfigError, match="call of its own.*mine.*leave swa out"):
        tf_batchnorm.prepare(model, Serial(), None, False, swa=True)
    tf_batchnorm.prepare(model, Serial(), None, False)
    model = keras.Sequential([keras.Input((3,)), keras.layers.BatchNormalization(renorm=True)])
    with pytest.raises(ConfigError, match="renorm=False"):
        tf_batchnorm.prepare(model, Serial(), None, False)


def features(input_shape, num_classes):
    import torch

    return torch.nn.Sequential(torch.nn.BatchNorm1d(input_shape[0]), torch.nn.Linear(input_shape[0], num_classes))


def test_fixed_statistics_stay_from_the_first_step_on():
    """Also of a model that nothing has evaluated before, as on ranks other than 0."""
    frontend = opened("pytorch", {"name": f"{__name__}:features"}, shape=(6,), connect=False)
    frontend.freeze(["0.weight", "0.bias"], ["0.weight", "0.bias"])
    Replicated(frontend, Exchange(frontend.specs(), frontend.packing, make("none"), Serial(), frontend.ops))
    before = frontend.running_statistics()
    frontend.train_step(frontend.to_device(batch(shape=(6,))), 1.0, 0, 0.1)
    after = frontend.running_statistics()
    assert before.keys() == after.keys() and all((before[key] == after[key]).all() for key in before)

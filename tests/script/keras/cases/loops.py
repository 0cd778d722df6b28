"""Loops of the user's own."""

from __future__ import annotations

import contextlib
import io
import itertools
import re
import time
import warnings

import keras
import numpy as np

import hvd_train.keras as hk
from hvd_train.cli import guide
from hvd_train.core import control_sync
from hvd_train.script.keras import backends, loop_batches
from hvd_train.script.keras import loop as own_loop
from hvd_train.script.keras.gradients import Reduction
from tests.script.keras.cases.models import (
    BATCH,
    COUNT,
    FOLDER,
    SGD,
    Adam,
    compiled,
    cross_entropy,
    digits,
    fit,
    network,
    trained,
)
from tests.script.keras.cases.networks import descent
from tests.script.prefetching import early


def loop(dataset=False):
    """A loop of the user's own: two epochs, uneven at the end, in the second of which batches are taken early; the loss
    of even steps. ``dataset``: in a graph."""
    x, y = digits(COUNT + 3)  # the last batch has 23 samples: 12 and 11, or 8, 8 and 7
    model, optimizer, loss_of, losses = network(), Adam(0.01), cross_entropy(), []
    hk.distribute(model, optimizer)

    def step(x, y):
        values = descent(optimizer, model.trainable_weights, lambda: [loss_of(y, model(x)) + sum(model.losses)])
        return hk.reduce({"loss": values[0], "samples": keras.ops.shape(x)[0]})

    if dataset:
        import tensorflow as tf

        step = tf.function(step)
        batches = hk.shard(tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH))
    else:
        batches = hk.shard(x, y, batch_size=BATCH)
        next(iter(batches)) if hk.rank() == 0 else None
    for order in (iter, early):
        for part in order(batches):
            values = step(*part)
            losses.append(float(values["loss"])) if len(part[0]) == BATCH else None
    total = float(hk.reduce(len(losses), op="sum")) / hk.size()
    return trained(model, losses=losses, steps=0 if dataset else len(batches), total=total)


def taken(graph=False):
    """Loops in which a step is not always on the batch that was taken last, each with steps on other data after it.

    The last of three batches has 19 samples: 10 and 9, or 7, 6 and 6. ``graph``: in a tf.function."""
    x, y = digits(115)
    other = [np.array(a[hk.rank() :: hk.size()]) for a in digits(78)]  # 39, or 26 a rank

    def stepping():
        model, optimizer, loss_of = network(hidden=4), SGD(0.5), cross_entropy()
        hk.distribute(model, optimizer)

        def step(x, y):
            descent(optimizer, model.trainable_weights, lambda: [loss_of(y, model(x))])

        if graph:
            import tensorflow as tf

            step = tf.function(step)
        return model, lambda part: step(*map(keras.ops.convert_to_tensor, part))

    def batches(size=BATCH):
        return hk.shard(x, y, batch_size=size, shuffle=False)

    def left(step):
        for k, part in enumerate(batches()):
            step(part)
            if k == 2:
                break

    def left_before(step):
        last = None
        for k, part in enumerate(batches()):
            last = part
            if k == 2:
                break
        step(last)

    def all_at_once(step):
        part = next(iter(batches(120 // hk.size())))
        for _ in range(3):
            step(part)

    def again(step):
        for _, part in zip(range(8), itertools.cycle(batches()), strict=False):
            step(part)

    def without_the_first(step):
        for part in itertools.islice(batches(), 1, None):
            step(part)

    def backwards(step):
        for part in list(batches())[::-1]:
            step(part)

    def within(step):
        _, inner = stepping()
        for part in batches():
            for each in batches(24 // hk.size()):
                inner(each)
            step(part)

    def together(step):
        _, second = stepping()
        for part, each in zip(batches(), batches(60 // hk.size()), strict=False):
            step(part)
            second(each)

    results = {}
    loop_batches.warn_of_unknown_batch.cache_clear()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for run in (left, left_before, all_at_once, again, without_the_first, backwards, within, together):
            keras.utils.set_random_seed(3)
            model, step = stepping()
            run(step)
            for _ in range(2):
                step(other)
            results |= {f"{run.__name__} {k}": v for k, v in trained(model).items()}
        assert not [w for w in warned if "not known" in str(w.message)]
        taken = iter(batches())  # a loop that is not left: the last batch, or other data
        for _ in range(3):
            step(next(taken))
        step(other)
    told = [str(w.message) for w in warned if "not known" in str(w.message)]
    return results | {"own/told": np.array(told)}


def same_work():
    """What is told after a few steps: on the same samples on all ranks, on other ones, on the same in a graph, and
    where the script has added its gradients up."""
    told = {}
    Reduction.adds_arrays = False
    for kind in ("alike", "divided", *(["graph"] if keras.backend.backend() == "tensorflow" else []), "added"):
        rows = slice(hk.rank(), None, hk.size()) if kind == "divided" else slice(None)
        x, y = (keras.ops.convert_to_tensor(a[rows]) for a in digits(BATCH))
        model, optimizer, loss_of = network(hidden=4), SGD(0.1), cross_entropy()
        hk.distribute(model, optimizer)

        def step(x, y, model=model, optimizer=optimizer, loss_of=loss_of, kind=kind):
            if kind == "added":
                hk.reduce([keras.ops.ones((2, 2))], op="sum")
            descent(optimizer, model.trainable_weights, lambda: [loss_of(y, model(x))])

        if kind == "graph":
            import tensorflow as tf

            step = tf.function(step)
        loop_batches.warn_of_same_loop.cache_clear()
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            for _ in range(3):
                step(x, y)
            for _ in hk.shard(*digits(BATCH), batch_size=BATCH):  # its end tells what graphs have seen
                pass
        told[f"own/{kind}"] = np.array([str(w.message) for w in warned if "same gradients" in str(w.message)])
    return told


def left_statistics():
    """Running statistics of a loop that is left: each rank's own, with a warning, until all ranks meet."""
    model, optimizer, loss_of = network(batchnorm=True), SGD(0.1), cross_entropy()
    hk.distribute(model, optimizer)
    loop_batches.warn_of_own_statistics.cache_clear()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for _, part in zip(range(1), hk.shard(*digits(96), batch_size=BATCH), strict=False):
            descent(optimizer, model.trainable_weights, lambda: [loss_of(part[1], model(part[0], training=True))])  # noqa: B023
        own = trained(model)
        model.save(FOLDER / f"left{hk.rank()}.keras")
        told = [str(w.message) for w in warned if "hk.barrier" in str(w.message)]
        hk.barrier()
    return trained(model) | {"own/told": np.array(told), "own/before": own["weights/4"]}


def sums():
    """The recipe of the page for losses that are no plain means. Half of the targets are unknown."""
    import tensorflow as tf

    blocks = re.findall(r"^```python\n(.*?)^```$", guide.page("keras-script"), re.MULTILINE | re.DOTALL)
    code = next(block for block in blocks if 'op="sum"' in block).replace("batch_size=4", f"batch_size={BATCH}")
    x, labels = digits(COUNT + 3)  # the last batch has 23 samples: 12 and 11, or 8, 8 and 7
    y = np.where(np.random.default_rng(0).random((len(x), 10)) < 0.5, -1.0, np.eye(10)[labels])
    names = {"keras": keras, "tf": tf, "model": network(), "x": x, "y": y}
    exec(code, names)
    return trained(names["model"], norm=float(names["norm"]))


def main_rank():
    """What rank 0 alone prints and shows, and what it says of a validation that each rank adds up for itself."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        hk.print(hk.size(), "ranks", flush=True)
    own_loop._unshared.cache_clear()  # cases before may have reduced in a graph
    batches = hk.shard(np.arange(20.0 * hk.size()), batch_size=2)
    bar = hk.tqdm(batches, file=(shown := io.StringIO()))
    assert len(list(bar)) == 10 and hk.is_main() == (hk.rank() == 0)
    counts = []
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        hk.reduce(1.0)
        for _ in range(3):
            counts.append(len([w for w in warned if "made no step" in str(w.message)]))
            list(batches)
    # Whole numbers in, whole numbers out, exact beyond 2^53; a tensor keeps its type.
    whole = hk.reduce([2**53 + 1, keras.ops.convert_to_tensor(np.int32(3))], op="sum")
    assert [int(x) for x in whole] == [(2**53 + 1) * hk.size(), 3 * hk.size()]
    assert [keras.backend.standardize_dtype(x.dtype) for x in whole] == ["int64", "int32"]
    exact_numbers()
    return {"own/printed": printed.getvalue(), "own/shown": "10/10" in shown.getvalue(), "own/told": counts}


def exact_numbers():
    """Python's numbers keep 64 bits; integers that the sum over ranks would wrap around are refused."""
    numbers = [0.1, np.float64(0.1), 2**53 + 1, 2**70]
    assert [float(x) for x in hk.reduce(numbers)] == [float(x) for x in numbers]
    assert [float(x) for x in hk.reduce(numbers[:2], op="sum")] == [0.1 * hk.size()] * 2
    # The sum of 16 bits does not fit into them.
    for op, right in (("mean", 40000.0), ("sum", 40000.0 * hk.size())):
        assert float(hk.reduce(np.float16(40000), op=op)) == right
    # The largest that the sum of all ranks holds, and one more.
    most, least = (2**63 - 1) // hk.size(), -((2**63 - 1) // hk.size())
    assert [int(x) for x in hk.reduce([most, np.array(least)], op="sum")] == [hk.size() * most, hk.size() * least]
    wrong = [most + 1, np.array(most + 1), np.array([0, least - 1])]
    wrong += [np.array(2**30, np.int32)] * (hk.size() > 1)
    calls = [hk.reduce]
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        calls.append(tf.function(hk.reduce))
    for call in calls:
        for x in wrong:
            told = ""
            try:
                call(x, op="sum")
            except Exception as error:
                told = str(error)
            assert "may make a sum over the ranks that does not fit into its type" in told, (x, told)


def slow():
    """What rank 0 tells where rank 1 takes 20 ms longer than the others, from step 20 on."""
    steps = 0

    def wait(batch, logs=None):
        nonlocal steps
        steps += 1
        time.sleep(0.02 if hk.rank() == 1 and steps >= 20 else 0)

    backends.slow_rank_report.cache_clear()
    usual, control_sync.MOST_SECONDS = control_sync.MOST_SECONDS, 0.04
    model = hk.distribute(compiled())
    callback = keras.callbacks.LambdaCallback(on_train_batch_end=wait)
    with contextlib.redirect_stderr(printed := io.StringIO()):
        fit(model, *digits(), epochs=1, batch_size=5, callbacks=[callback])
    control_sync.MOST_SECONDS = usual
    return {"own/told": np.array(printed.getvalue())}

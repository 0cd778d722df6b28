"""One contract for every front-end: what the core relies on holds in NumPy, PyTorch and Keras/TensorFlow alike."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from itertools import permutations
from types import SimpleNamespace

import numpy as np
import pytest

from hvd_train.compression import make
from hvd_train.compression.sparse import Threshold
from hvd_train.config import Config, FrontEndConfig
from hvd_train.errors import ConfigError
from hvd_train.frontends.serial import Serial
from hvd_train.metrics.metric import LabelForm, Predictions
from hvd_train.metrics.table import METRICS
from hvd_train.protocol import Batch, Field, Groups, Placement, Sample
from hvd_train.task.task import Task
from hvd_train.update.exchange import Exchange
from hvd_train.update.replicated import Replicated
from hvd_train.update.state import read, training_state
from tests import numpy_frontend

SHAPE, CLASSES, ROWS = (4, 3, 1), 3, 6
OWN = {"pytorch": "tests.own_models:pytorch_dropout", "tensorflow": "tests.own_models:keras_dropout"}
FRAMEWORKS = ["pytorch", "tensorflow"]
ALL = ["numpy", *FRAMEWORKS]
BUILT_IN = [*FRAMEWORKS, "jax"]  # JAX has built-in models, and no own ones
EVERY = ["numpy", *BUILT_IN]


def module(framework):
    if framework == "numpy":
        return numpy_frontend
    if framework == "jax":
        pytest.importorskip("jax")
        from hvd_train.frontends.jax import model as jax_model

        return jax_model
    pytest.importorskip("torch")  # for both: torch before TensorFlow, as the ranks load them
    if framework == "pytorch":
        from hvd_train.frontends.pytorch import model as pt

        return pt
    from hvd_train.frontends.tensorflow import model as tf

    return tf


def sample_of(shape, classes, dtype="float32", labels=()):
    return Sample({"input": Field(shape, dtype)}, {"label": Field(labels, "int64", classes=classes)})


def built(framework, sample, ranks=None, compressor=None, wrap=lambda exchange: exchange, connect=True, **settings):
    """A front-end in 64 bits on a CPU, connected unless told otherwise. ``wrap`` gets its exchange."""
    known = framework if framework in BUILT_IN else "pytorch"  # of a configuration
    config = Config.model_validate({"framework": known, "precision": 64, "device": "cpu"} | settings)
    groups = Groups.of(ranks or Serial())
    frontend = module(framework).open_frontend(FrontEndConfig.of(config), groups, sample)
    if connect:
        parts = frontend.specs(), frontend.packing, compressor or make("none"), groups.data, frontend.ops
        Replicated(frontend, wrap(Exchange(*parts, small=0)))
    return frontend


def opened(framework, model=None, optim=None, compressor=None, shape=SHAPE, **keys):
    """A front-end of an MLP with momentum, unless told otherwise, on one rank."""
    keys["optim"] = {"lr": 0.1, "momentum": 0.9} if optim is None else optim
    keys["model"] = model or {"name": "mlp", "hidden": [5]}
    return built(framework, sample_of(shape, CLASSES), compressor=compressor, **keys)


def batch(seed=0, rows=ROWS, count=None, shape=SHAPE):
    rng = np.random.default_rng(seed)
    count = rows if count is None else count
    weights = (np.arange(rows) < count).astype(np.float32)
    inputs = rng.normal(size=(rows, *shape)).astype(np.float32)
    return Batch({"input": inputs}, {"label": rng.integers(0, CLASSES, rows)}, weights, np.arange(count))


def part(whole, rows):
    """Some rows of a batch."""
    inputs, labels = ({name: x[rows] for name, x in of.items()} for of in (whole.inputs, whole.labels))
    return Batch(inputs, labels, whole.weights[rows], np.arange(len(whole.weights[rows])))


def everything(frontend):
    """Weights, running statistics and slots."""
    return training_state(frontend, frontend.update)


def load(frontend, tree):
    frontend.load(tree)
    frontend.update.load(tree, Placement.REPLICATED)


def local_state(frontend):
    return read(frontend.update.state(), Placement.PER_RANK)


def weights(frontend):
    return {k: v for k, v in frontend.state().items() if k.startswith("weights/")}


def close(a, b, rtol=1e-10):
    assert a.keys() == b.keys()
    for key in a:
        np.testing.assert_allclose(a[key], b[key], rtol=rtol, atol=1e-13, err_msg=key)


def same(a, b):
    return a.keys() == b.keys() and all(a[k].dtype == b[k].dtype and (a[k] == b[k]).all() for k in a)


def stepped(frontend, batches, rate=0.1):
    for k, one in enumerate(batches):
        frontend.train_step(frontend.to_device(one), 1 / ROWS, k, rate)
    return frontend


# ---- a step


@pytest.mark.parametrize("parts", [1, 2])
def test_keras_regularizers_count_once_a_step(parts):
    """L2 of 0.25 takes lr / 2 of a weight; the second part is short."""
    keys = {"framework": "tensorflow", "optim": {"lr": 0.1}, "accumulate_grad_batches": parts}
    plain, regular = (
        opened(model={"name": f"tests.own_models:{name}"}, **keys) for name in ("keras_linear", "keras_regular")
    )
    load(regular, everything(plain))
    (name,) = [key for key in everything(plain) if key.endswith("kernel")]
    before = everything(plain)[name]
    whole = batch(rows=6, count=4)
    cuts = [part(whole, slice(k, k + 6 // parts)) for k in range(0, 6, 6 // parts)]
    for frontend in (plain, regular):
        for one in cuts[:-1]:
            frontend.add_gradients(frontend.to_device(one), 1 / 4, 0)
        frontend.train_step(frontend.to_device(cuts[-1]), 1 / 4, 0, 0.1)
    after = [everything(frontend)[name] for frontend in (plain, regular)]
    np.testing.assert_allclose(after[1], after[0] - 0.05 * before, rtol=1e-12)


def test_keras_losses_within_the_model_are_refused():
    model = {"name": "tests.own_models:keras_regular", "activity": True}
    frontend = opened("tensorflow", model)
    with pytest.raises(ConfigError, match="adds a loss of its own"):
        frontend.train_step(frontend.to_device(batch()), 1 / ROWS, 0, 0.1)
        frontend.run_queued()


@pytest.mark.parametrize("framework", EVERY)
def test_accumulated_parts_are_one_batch(framework):
    whole = batch(rows=ROWS)
    both = opened(framework, accumulate_grad_batches=2), opened(framework)
    load(both[0], everything(both[1]))
    parts = [part(whole, slice(k, k + 3)) for k in (0, 3)]
    for _ in range(2):  # twice: the second must not see the first's gradients
        sums = both[0].ops.to_numpy(both[0].add_gradients(both[0].to_device(parts[0]), 1 / ROWS, 0))
        sums = sums + both[0].ops.to_numpy(both[0].train_step(both[0].to_device(parts[1]), 1 / ROWS, 0, 0.1))
        joined = both[1].ops.to_numpy(both[1].train_step(both[1].to_device(whole), 1 / ROWS, 0, 0.1))
        np.testing.assert_allclose(sums, joined, rtol=1e-12)
    trees = [{k: v for k, v in everything(frontend).items() if not k.startswith("statistics/")} for frontend in both]
    close(*trees)


@pytest.mark.parametrize("framework", EVERY)
def test_padding_counts_for_nothing(framework):
    """Rows of weight 0 may hold anything finite; a batch of padding alone leaves the weights where they are."""
    padded, other = batch(count=4), batch(count=4)
    other.inputs["input"][4:] = 1e3
    frontends = [opened(framework) for _ in range(2)]
    sums = [
        f.ops.to_numpy(f.train_step(f.to_device(b), 1 / 4, 0, 0.1))
        for f, b in zip(frontends, (padded, other), strict=True)
    ]
    assert sums[0].tolist() == pytest.approx(sums[1].tolist()) and sums[0][2] == 4
    close(weights(frontends[0]), weights(frontends[1]))
    alone = opened(framework, optim={"lr": 0.1})
    before = everything(alone)
    assert alone.ops.to_numpy(alone.train_step(alone.to_device(batch(count=0)), 0.25, 0, 0.1)).tolist() == [0, 0, 0]
    close(weights(alone), {k: v for k, v in before.items() if k.startswith("weights/")})


@pytest.mark.parametrize("framework", EVERY)
def test_the_step_takes_what_the_exchange_gives(framework):
    """An exchange that gives zeros leaves the weights; one that doubles the gradient doubles the first change."""

    def scaled(factor):
        def wrap(exchange):
            finish = exchange.finish

            def times(started):
                gradients, states = finish(started)
                return [g * factor for g in gradients], states

            exchange.finish = times
            return exchange

        return wrap

    changes = []
    for factor in (0.0, 1.0, 2.0):
        frontend = opened(framework, wrap=scaled(factor))
        before = weights(frontend)
        stepped(frontend, [batch()])
        changes.append({k: v - before[k] for k, v in weights(frontend).items()})
    assert not any(x.any() for x in changes[0].values())
    close({k: 2 * x for k, x in changes[1].items()}, changes[2], rtol=1e-6)
    assert any(x.any() for x in changes[1].values())


@pytest.mark.parametrize("framework", EVERY)
def test_each_bucket_starts_once_a_step_and_holds_the_sum_of_the_scaled_gradients(framework):
    """Finite differences of the mean loss over the batch give the gradient that travels."""
    sent = {}

    def wrap(exchange):
        start = exchange.start

        def noted(b, gradient, state):
            sent.setdefault(b, []).append(gradient)
            return start(b, gradient, state)

        exchange.start = noted
        return exchange

    frontend = opened(framework, wrap=wrap, optim={"lr": 1.0})
    before = everything(frontend)
    one = batch()
    stepped(frontend, [one], rate=1.0)
    assert sorted(sent) == list(range(len(frontend.update.buckets))) and all(len(x) == 1 for x in sent.values())
    key = next(k for k in before if before[k].ndim == 2 and k.startswith("weights/"))
    gradient = before[key] - everything(frontend)[key]
    for place in [(0, 0), (2, 1)]:
        losses = []
        for side in (1e-5, -1e-5):
            moved = {k: v.copy() for k, v in before.items()}
            moved[key][place] += side
            load(frontend, moved)
            losses.append(frontend.ops.to_numpy(frontend.evaluate_batch(frontend.to_device(one)))[0] / ROWS)
        assert gradient[place] == pytest.approx((losses[0] - losses[1]) / 2e-5, rel=1e-6, abs=1e-9)


# ---- scores and predictions


@pytest.mark.parametrize("framework", EVERY)
def test_scores_are_sums_over_weighted_rows_of_the_logits(framework):
    frontend, one = opened(framework), batch(count=4)
    logits = np.asarray(frontend.predict(frontend.to_device(one)), np.float64)[:4]
    assert logits.shape == (4, CLASSES)
    logp = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    loss = -logp[np.arange(4), one.labels["label"][:4]].sum()
    correct = (logits.argmax(axis=1) == one.labels["label"][:4]).sum()
    sums = frontend.ops.to_numpy(frontend.evaluate_batch(frontend.to_device(one)))
    assert sums.dtype == np.float64
    np.testing.assert_allclose(sums, [loss, correct, 4], rtol=1e-12)


@pytest.mark.parametrize("framework", BUILT_IN)
def test_inference_needs_no_optimizer_and_holds_no_slots(framework):
    optim = {"name": "adam", "lr": 0.1}
    trained, alone = opened(framework, optim=optim), opened(framework, optim=optim, connect=False)
    stepped(trained, [batch()])
    alone.load(everything(trained))
    assert same(alone.state(), {key: x for key, x in everything(trained).items() if not key.startswith("slots/")})
    one = batch(7)
    for score in ("evaluate_batch", "predict"):
        a, b = (np.asarray(getattr(f, score)(f.to_device(one))) for f in (trained, alone))
        np.testing.assert_allclose(a, b, rtol=1e-13)


# ---- state


@pytest.mark.parametrize("framework", EVERY)
def test_state_is_a_copy_and_comes_back_bit_for_bit(framework):
    first = stepped(opened(framework), [batch(k) for k in range(3)])
    state = everything(first)
    kept = {k: v.copy() for k, v in state.items()}
    second = opened(framework)
    load(second, state)
    assert same(everything(second), kept)
    stepped(first, [batch(9)])
    assert same(state, kept), "later steps do not reach into it"
    again = training_state(first, first.update, state)
    assert same(again, everything(first)) and all(np.shares_memory(again[key], x) for key, x in state.items())
    assert same(everything(stepped(second, [batch(9)])), everything(first)), "weights and slots are all there is"
    load(second, {})
    assert same(everything(second), everything(first)), "what is not in the tree stays"


@pytest.mark.parametrize("framework", EVERY)
def test_specs_name_the_weights_of_the_state(framework):
    frontend = opened(framework)
    specs, state = frontend.specs(), weights(frontend)
    assert {f"weights/{s.name}" for s in specs} == state.keys()
    for s in specs:
        assert s.dtype == "float64" == state[f"weights/{s.name}"].dtype.name
        assert sorted(s.shape) == sorted(state[f"weights/{s.name}"].shape) and s.nbytes == 8 * s.size


@pytest.mark.parametrize("framework", EVERY)
def test_compressor_state_is_this_ranks_own_and_comes_back(framework):
    first = stepped(opened(framework, compressor=Threshold(0.05)), [batch(k) for k in range(2)])
    local = local_state(first)
    assert local and any(x.any() for x in local.values())
    assert not any("/" in k and k.startswith(("weights", "slots")) for k in local)
    second = opened(framework, compressor=Threshold(0.05))
    load(second, everything(first))
    second.update.load(local, Placement.PER_RANK)
    assert same(local_state(second), local)
    assert same(everything(stepped(second, [batch(5)])), everything(stepped(first, [batch(5)])))


@pytest.mark.parametrize("framework", EVERY)
def test_averaging_over_one_rank_changes_nothing(framework):
    frontend = stepped(opened(framework), [batch()])
    before = everything(frontend)
    frontend.average([spec.name for spec in frontend.specs()])
    frontend.average_statistics()
    assert same(everything(frontend), before)


def test_a_model_may_keep_a_tensor_from_its_first_forward_pass():
    """Whether that is the look for the order of channels or an evaluation."""
    shape = (8, 8, 1)
    for scored in (False, True):
        frontend = opened("pytorch", {"name": "tests.own_models:keeping"}, shape=shape)
        if scored:
            frontend.model.kept = None
            frontend.evaluate_batch(frontend.to_device(batch(shape=shape)))
        before = everything(frontend)
        stepped(frontend, [batch(shape=shape)])
        assert not same(everything(frontend), before)


@pytest.mark.parametrize("name", ["sgd", "adamw"])
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_weight_that_no_gradient_reaches_has_a_gradient_of_zero(framework, name):
    """So it decays, alike in both frameworks and on any number of ranks, where a torch loop of one's own skips it."""
    own = {"pytorch": "tests.own_models:pytorch_unused", "tensorflow": "tests.own_models:keras_unused"}[framework]
    frontend = opened(framework, {"name": own}, {"name": name, "lr": 0.1, "weight_decay": 0.1})
    (key,) = [key for key in weights(frontend) if "never" in key]
    before = weights(frontend)[key]
    stepped(frontend, [batch(), batch(1)], rate=0.1)
    np.testing.assert_allclose(weights(frontend)[key], 0.99**2 * before, rtol=1e-12)


# ---- both frameworks


@pytest.mark.parametrize(
    "optim",
    [{"lr": 0.1, "momentum": 0.9}, {"name": "adam"}, {"name": "lars", "momentum": 0.9}, {"name": "lamb"}],
    ids=["sgd", "adam", "lars", "lamb"],
)
@pytest.mark.parametrize(("here", "there"), [*permutations(FRAMEWORKS), ("pytorch", "jax"), ("jax", "pytorch")])
def test_training_goes_on_in_the_other_framework(here, there, optim):
    """Weights and slots cross: the next steps are those of the framework that was left."""
    model, shape = {"name": "cnn", "hidden": 11}, (20, 28, 3)
    batches = [batch(k, shape=shape) for k in range(4)]
    first = stepped(opened(here, model, optim, shape=shape), batches[:2])
    second = opened(there, model, optim, shape=shape)
    load(second, everything(first))
    close(everything(stepped(second, batches[2:])), everything(stepped(first, batches[2:])), rtol=1e-9)


# ---- a user's own model


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_an_own_model_has_statistics_and_draws_by_the_seed(framework):
    fronts = [opened(framework, {"name": OWN[framework]}) for _ in range(3)]
    for frontend in fronts:
        load(frontend, everything(fronts[0]))
    assert any(k.startswith("statistics/") for k in everything(fronts[0]))
    placed = [f.to_device(batch()) for f in fronts]
    for frontend, one, seed in zip(fronts, placed, (5, 5, 6), strict=True):
        frontend.train_step(one, 1 / ROWS, seed, 0.1)
    states = [everything(f) for f in fronts]
    assert same(states[0], states[1])
    assert any((states[0][k] != states[2][k]).any() for k in states[0] if k.startswith("weights/"))
    statistics = {k: v for k, v in states[0].items() if k.startswith("statistics/")}
    scores = [frontend.ops.to_numpy(fronts[0].evaluate_batch(placed[0])).tolist() for _ in range(2)]
    assert scores[0] == scores[1], "no dropout in evaluation"
    assert same(statistics, {k: v for k, v in everything(fronts[0]).items() if k in statistics}), "nor new statistics"


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_dropout_can_be_switched_off(framework):
    fronts = [opened(framework, {"name": OWN[framework]}) for _ in range(2)]
    found = []
    for frontend, seed in zip(fronts, (5, 6), strict=True):
        frontend.without_dropout()
        found.append(
            frontend.ops.to_numpy(frontend.train_step(frontend.to_device(batch()), 1 / ROWS, seed, 0.1)).tolist()
        )
    assert found[0] == found[1] and same(weights(fronts[0]), weights(fronts[1]))


@pytest.mark.parametrize("framework", EVERY)
def test_checksums_see_one_bit_of_one_weight(framework):
    frontend = opened(framework)
    before = frontend.checksums()
    assert sorted(before) == sorted(spec.name for spec in frontend.specs())
    for name in before:
        tree = weights(frontend)
        load(frontend, tree)
        assert frontend.checksums() == before
        changed = tree[f"weights/{name}"].copy()
        changed.view(np.uint8).flat[0] ^= 1
        load(frontend, {f"weights/{name}": changed})
        assert [n for n, x in frontend.checksums().items() if x != before[n]] == [name]
        load(frontend, tree)


@pytest.mark.parametrize("together", [3, 4, "auto"])
def test_steps_of_one_call_are_steps_one_by_one(together):
    """Bit for bit, with dropout, statistics and a residual; what is asked for between them has run before."""
    made = []
    for steps in (1, together):
        keys = {"model": {"name": OWN["tensorflow"]}, "compressor": make("topk", ratio=0.2), "precision": 32}
        frontend = opened("tensorflow", steps_per_execution=steps, **keys)
        sums = [frontend.train_step(frontend.to_device(batch(k)), 1 / ROWS, k, 0.1 / (1 + k)) for k in range(7)]
        waiting = len(frontend.queued)
        scores = frontend.ops.to_numpy(frontend.evaluate_batch(frontend.to_device(batch(9))))
        assert not frontend.queued
        sums = [frontend.ops.to_numpy(own).tolist() for own in sums]
        made.append((sums, scores.tolist(), {**everything(frontend), **local_state(frontend)}, waiting))
    assert made[0][:2] == made[1][:2] and same(made[0][2], made[1][2])
    assert made[0][3] == 0 and made[1][3] == {3: 1, 4: 3}.get(together, made[1][3])


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_seeds_are_no_state(framework):
    """Broadcasting a generator's state would give all ranks the same dropout masks."""
    assert not any("seed" in key for key in everything(opened(framework, {"name": OWN[framework]})))


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("nothing", "there is no model 'nothing'"),
        ("resnet81", "did you mean 'resnet'. 'hvd-train models' lists the zoo"),
        ("tests.nothing:build", "there is no module 'tests.nothing'"),
        ("tests.own_models:nothing", "has no function 'nothing'"),
        ("tests.own_models:broken", "hidden must be even"),
        ("tests.own_models:frozen", "no trainable parameter"),
    ],
)
def test_a_model_that_cannot_be_used(name, what):
    with pytest.raises(ConfigError, match=what) as caught:
        opened("pytorch", {"name": name})
    assert name in str(caught.value)


@pytest.mark.parametrize(("framework", "name"), [("pytorch", "pytorch_pair"), ("tensorflow", "keras_pair")])
def test_several_outputs_without_names_are_one_line(framework, name):
    frontend = opened(framework, {"name": f"tests.own_models:{name}"})
    with pytest.raises(ConfigError, match=r"the model gives a (tuple|list); .*; return a tensor, or a dict") as caught:
        frontend.evaluate_batch(frontend.to_device(batch()))
    assert name in str(caught.value) and "\n" not in str(caught.value)


def test_the_logits_of_an_object():
    """As transformers' models return: a dict with attributes, whose other items are no outputs."""
    given, results = batch(), []
    for named in (True, False):
        frontend = opened("pytorch", {"name": "tests.own_models:pytorch_logits", "named": named})
        results.append(frontend.predict(frontend.to_device(given)))
    np.testing.assert_array_equal(*results)


@pytest.mark.parametrize("framework", BUILT_IN)
def test_an_unknown_option_of_a_model_lists_the_known(framework):
    with pytest.raises(ConfigError, match=r"no option hiden.*it takes \['hidden', 'outputs'\]"):
        opened(framework, {"name": "mlp", "hiden": [3]})


@pytest.mark.parametrize("framework", BUILT_IN)
def test_images_too_small_for_the_cnn(framework):
    with pytest.raises(ConfigError, match="at least 16 x 16, not 8 x 8; set data.image_size or resize yours"):
        opened(framework, {"name": "cnn"}, shape=(8, 8, 1))


@pytest.mark.parametrize("framework", BUILT_IN)
def test_no_gpu_is_one_clear_error(framework):
    torch = pytest.importorskip("torch")

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(ConfigError, match="sees no GPU; device: cuda"):
        opened(framework, device="cuda")


def test_a_gpu_runs_kernels_that_repeat_their_bits(monkeypatch):
    torch = pytest.importorskip("torch")

    from hvd_train.frontends.pytorch import device

    monkeypatch.setattr(device, "gpus_of", lambda *_: [0])
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: None)
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", False)
    assert str(device.devices_of(Config(), Serial())[0]) == "cuda:0"
    assert torch.backends.cudnn.deterministic


@pytest.mark.parametrize("optim", ["sgd", "adam", "lamb"])
def test_weights_that_begin_at_multiples_of_bytes_train_to_the_same_numbers(optim, monkeypatch):
    """As on GPUs: with zeros between them, of which neither gradients nor checkpoints know."""
    pytest.importorskip("torch")
    from hvd_train.frontends.pytorch import model as pt

    layout, states = pt.Flat, []
    for align in (1, 64):
        monkeypatch.setattr(pt, "Flat", lambda *args, align=align: layout(*args[:3], align))
        frontend = opened("pytorch", {"name": "mlp", "hidden": [5, 7]}, {"name": optim, "lr": 0.1})
        stepped(frontend, [batch(k) for k in range(3)])
        states.append(everything(frontend))
        places = [weight.data_ptr() - flat.weight.data_ptr() for flat in frontend._flats for weight in flat.parameters]
        assert align == 1 or not any(place % align for place in places)
    assert states[0].keys() == states[1].keys()
    for key, array in states[0].items():  # a fused optimizer rounds a vector's last entries in its own way
        np.testing.assert_allclose(states[1][key], array, rtol=1e-14, atol=1e-17)


# ---- what a sample is made of


@pytest.mark.parametrize("framework", EVERY)
def test_bytes_become_the_floats_that_they_were(framework):
    """Bit for bit those of a division by 255 in float32, with statistics and gradients of them."""
    rng, fronts = np.random.default_rng(0), []
    one = batch()
    stored = rng.integers(0, 256, one.inputs["input"].shape, np.uint8)
    floats = replace(one, inputs={"input": np.divide(stored, np.float32(255), dtype=np.float32)})
    for precision in (32, 64):
        made = opened(framework, precision=precision), opened(framework, precision=precision)
        made[0]._sample = replace(made[0]._sample, inputs={"input": Field(SHAPE, "uint8", 255.0)})
        placed = [f.to_device(b) for f, b in zip(made, (replace(one, inputs={"input": stored}), floats), strict=True)]
        sums = [f.ops.to_numpy(f.train_step(x, 1 / ROWS, 0, 0.1)) for f, x in zip(made, placed, strict=True)]
        assert (sums[0] == sums[1]).all() and same(everything(made[0]), everything(made[1]))
        fronts.append(made)
    assert not same(everything(fronts[0][0]), everything(fronts[1][0]))


TWO = {"pytorch": "tests.own_models:pytorch_two_inputs", "tensorflow": "tests.own_models:keras_two_inputs"}


def two_inputs(dtype="int32", names=("tokens", "image")):
    inputs = dict(zip(names, (Field((5,), dtype), Field((4, 4, 1), "uint8", 255.0)), strict=True))
    return Sample(inputs, {"label": Field((), "int64", classes=CLASSES)})


def open_two(framework, sample, **options):
    return built(framework, sample, model={"name": TWO[framework]} | options)


def test_several_inputs_reach_the_model_by_name_in_both_frameworks():
    rng = np.random.default_rng(0)
    inputs = {
        "tokens": rng.integers(0, 7, (ROWS, 5), np.int32),
        "image": rng.integers(0, 256, (ROWS, 4, 4, 1), np.uint8),
    }
    one = Batch(inputs, {"label": rng.integers(0, CLASSES, ROWS)}, np.ones(ROWS, np.float32), np.arange(ROWS))
    fronts = [open_two(framework, two_inputs()) for framework in FRAMEWORKS]
    assert same(*(weights(f) for f in fronts)) and len(weights(fronts[0])) == 3
    close(*(everything(stepped(f, [one, one])) for f in fronts))
    moved = [f.predict(f.to_device(replace(one, inputs=inputs | {"image": 255 - inputs["image"]}))) for f in fronts]
    np.testing.assert_allclose(*moved, rtol=1e-10)
    assert np.abs(moved[0] - fronts[0].predict(fronts[0].to_device(one))).max() > 1e-3


def test_images_come_out_as_they_went_in():
    """Whatever order of axes a framework computes in, ``predict`` and the loss have the data's."""
    one, found = batch(), []
    one = replace(one, labels={"label": one.inputs["input"]})
    sample = Sample({"input": Field(SHAPE, "float32")}, {"label": Field(SHAPE, "float32")})
    for framework in FRAMEWORKS:
        frontend = built(framework, sample, model={"name": "autoencoder", "hidden": [5]}, task={"loss": "mse"})
        found.append(frontend.predict(frontend.to_device(one)))
        loss = frontend.task.results(frontend.ops.to_numpy(frontend.evaluate_batch(frontend.to_device(one))))["loss"]
        assert loss == pytest.approx(((found[-1] - one.inputs["input"]) ** 2).mean(), rel=1e-12)
    np.testing.assert_allclose(*found, rtol=0, atol=1e-12)
    assert found[0].shape == (ROWS, *SHAPE)


def open_plain(framework, field, model, label=None, **keys):
    sample = Sample({"input": field}, {"label": label or Field((), "int64", classes=CLASSES)})
    sizes = {"thin": {"depth": 2}, "mlp": {"hidden": [5]}, "autoencoder": {"hidden": [5]}}
    return built(framework, sample, model={"name": model} | sizes.get(model, {}), **keys)


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize(
    ("field", "expected"),
    [
        (Field((12, 7), "float32"), {"pytorch": (12, 7), "tensorflow": (12, 7)}),
        (Field((5, 6, 4), "float32", image=False), {"pytorch": (5, 6, 4), "tensorflow": (5, 6, 4)}),
        (Field((5, 6, 4), "float32", image=True), {"pytorch": (4, 5, 6), "tensorflow": (5, 6, 4)}),
    ],
    ids=str,
)
def test_the_model_gets_sequences_as_they_are(framework, field, expected):
    frontend, one = open_plain(framework, field, "mlp"), batch(shape=field.shape)
    (placed,) = frontend.to_device(one)[0].values()
    assert tuple(placed.shape)[1:] == expected[framework]
    first = np.asarray(placed[0, 1, 2] if not (field.image and framework == "pytorch") else placed[0, :, 1, 2])
    np.testing.assert_allclose(first, one.inputs["input"][0, 1, 2])


OWN_IMAGES = {"pytorch": "tests.own_models:pytorch_of_images", "tensorflow": "tests.own_models:keras_of_images"}


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_models_of_ones_own_that_want_images_hear_how_to_declare_them(framework):
    with pytest.raises(ConfigError, match="the model does not take its inputs .*; if they are images, set data.images"):
        open_plain(framework, Field((6, 6), "float32"), OWN_IMAGES[framework])
    open_plain(framework, Field((6, 6, 1), "float32"), OWN_IMAGES[framework])


@pytest.mark.parametrize(
    ("framework", "model"), [("pytorch", "pytorch_lazy"), ("pytorch", "frozen"), ("tensorflow", "keras_linear")]
)
def test_models_of_classes_and_a_loss_of_ones_own_hear_of_num_classes(framework, model):
    task = {"loss": "tests.own_models:weighted"}
    with pytest.raises(ConfigError, match="num_classes is None, as task.loss is not cross_entropy: set data.num_class"):
        open_plain(framework, Field((6, 6, 1), "float32"), f"tests.own_models:{model}", Field((), "int64"), task=task)


def test_samples_of_three_axes_that_are_not_images_give_the_same_in_both_frameworks():
    field = Field((5, 6, 4), "float32", image=False)
    one = batch(shape=field.shape)
    for model in ("mlp", "thin", "autoencoder"):
        own = {"label": field, "task": {"loss": "mse"}} if model == "autoencoder" else {}
        labels = {"labels": {"label": one.inputs["input"]}} if own else {}
        fronts = [open_plain(framework, field, model, **own) for framework in FRAMEWORKS]
        close(*(everything(stepped(f, [replace(one, **labels)])) for f in fronts))
        np.testing.assert_allclose(*(f.predict(f.to_device(one)) for f in fronts), rtol=0, atol=1e-9)


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("model", ["cnn", "resnet", "resnet50", "pyramidnet"])
def test_models_that_want_images_say_so(framework, model):
    for field in (Field((40, 32), "float32"), Field((40, 32, 4), "float32", image=False)):
        axes = "height, width" + ", channels" * (len(field.shape) - 2)
        with pytest.raises(ConfigError, match=re.escape(f"set data.images: true if they are ({axes})")) as caught:
            open_plain(framework, field, model)
        assert f"the model takes images, and the data give samples of shape {field}" in str(caught.value)
    with pytest.raises(ConfigError, match=r"samples of shape \(40,\) float32.*take mlp"):
        open_plain(framework, Field((40,), "float32"), model)


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize(
    ("keys", "word"),
    [
        ({"names": ("tokens", "picture")}, "picture"),
        ({"names": ("words", "image")}, "words"),
        ({"dtype": "float32"}, "tokens"),
    ],
    ids=str,
)
def test_inputs_that_the_model_does_not_take_are_one_line(framework, keys, word):
    if framework == "tensorflow" and "dtype" in keys:
        pytest.skip("Keras casts to the type of the model's input")
    with pytest.raises(ConfigError, match="the model does not take its inputs .*by name") as caught:
        open_two(framework, two_inputs(**keys))
    assert word in str(caught.value) and "\n" not in str(caught.value) and "tests.own_models" in str(caught.value)


def test_lazy_layers_take_their_shapes_from_the_data():
    frontend = opened("pytorch", {"name": "tests.own_models:pytorch_lazy"})
    assert {spec.name: spec.shape for spec in frontend.specs()}["3.weight"] == (CLASSES, 4 * 3 * 2)
    frontend.train_step(frontend.to_device(batch()), 1 / ROWS, 0, 0.1)
    with pytest.raises(ConfigError, match="spare has no shape yet: no sample reaches this lazy layer; model.name"):
        opened("pytorch", {"name": "tests.own_models:pytorch_lazy", "unused": True})


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_checkpoint_needs_no_pretrained_file(monkeypatch, tmp_path, framework):
    """``pretrained=False`` where a checkpoint follows; a function without it is told of it when its file is gone."""

    def linear(num_classes, pretrained=True):
        if pretrained:
            (tmp_path / "body.pt").read_bytes()
        if framework == "tensorflow":
            import keras

            return keras.Sequential([keras.layers.Flatten(), keras.layers.Dense(num_classes)])
        import torch

        return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, num_classes))

    own = SimpleNamespace(linear=linear, always=lambda num_classes: linear(num_classes))
    monkeypatch.setitem(sys.modules, "own_model", own)
    for name, restores, fix in (
        ("linear", True, None),
        ("linear", False, r"body.pt'; model.name: own_model:linear$"),
        ("always", True, "the checkpoint has all weights: give the function a parameter pretrained=True"),
    ):
        config = Config.model_validate(
            {"framework": framework, "model": {"name": f"own_model:{name}"}, "device": "cpu"}
        )
        config = config.restoring() if restores else config
        if fix is None:
            module(framework).open_frontend(FrontEndConfig.of(config), Groups.of(Serial()), sample_of(SHAPE, CLASSES))
            continue
        with pytest.raises(ConfigError, match=fix) as caught:
            module(framework).open_frontend(FrontEndConfig.of(config), Groups.of(Serial()), sample_of(SHAPE, CLASSES))
        assert "the model cannot be built: [Errno 2]" in str(caught.value) and "\n" not in str(caught.value)


# ---- tasks

TASKS = {
    "mse": ({"loss": "mse", "metrics": ["mae", "rmse", "r2", "huber"]}, "numbers"),
    "mae": ({"loss": "mae"}, "numbers"),
    "huber": ({"loss": "huber"}, "numbers"),
    "bce": ({"loss": "bce", "metrics": ["accuracy", "f1", "recall_micro", "auc"]}, "binary"),
    "own": ({"loss": "tests.own_models:weighted", "metrics": ["tests.own_models:weighted", "mse"]}, "numbers"),
    "classes": ({"metrics": ["accuracy", "top5", "f1", "precision", "cross_entropy"]}, "classes"),
}


def task_batches(kind):
    """Four batches of different counts; labels of three numbers, or a class."""
    rng = np.random.default_rng(3)
    for count in (6, 4, 1, 0):
        one = batch(count, count=count)
        labels = one.labels["label"]
        if kind != "classes":
            drawn = rng.normal(size=(ROWS, CLASSES))
            labels = (drawn > 0 if kind == "binary" else drawn).astype(np.float32)
            labels[count:] = 0
        yield replace(one, labels={"label": labels})


def task_run(framework, task, kind):
    field = Field((), "int64", classes=CLASSES) if kind == "classes" else Field((CLASSES,), "float32")
    sample = Sample({"input": Field(SHAPE, "float32")}, {"label": field})
    options = {"units": CLASSES} if kind != "classes" else {}
    frontend = built(framework, sample, model={"name": TASK_MODELS[framework]} | options, task=task)
    load(
        frontend,
        {"weights/kernel": np.linspace(-1, 1, 12 * CLASSES).reshape(12, CLASSES), "weights/bias": np.zeros(CLASSES)},
    )
    vectors = []
    for k, one in enumerate(task_batches(kind)):
        placed = frontend.to_device(one)
        scale = [1 / max(float(c), 1) for c in frontend.counts(one)] if frontend.task.weighted_by_data else 1 / ROWS
        vectors.append(frontend.ops.to_numpy(frontend.train_step(placed, scale, k, 0.1)))
        vectors.append(frontend.ops.to_numpy(frontend.evaluate_batch(placed)))
    return frontend, vectors


TASK_MODELS = {"pytorch": "tests.own_models:pytorch_units", "tensorflow": "tests.own_models:keras_units"}


@pytest.mark.parametrize("name", TASKS)
def test_a_task_is_the_same_in_both_frameworks_and_in_numpy(name):
    task, kind = TASKS[name]
    (first, one), (second, two) = (task_run(framework, task, kind) for framework in FRAMEWORKS)
    (one, scores), (two, others) = (
        zip(*(np.split(x, [first.task.length]) for x in rows), strict=True) for rows in (one, two)
    )
    for a, b in zip(one, two, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12)
    for a, b in zip(scores, others, strict=True):
        np.testing.assert_allclose(*(counted(x, first.task.ranked) for x in (a, b)), rtol=1e-12, atol=1e-12)
    close(everything(first), everything(second), rtol=1e-11)
    assert first.task.results(sum(one)) == pytest.approx(second.task.results(sum(two)), rel=1e-11)
    *_, last = (x for x in task_batches(kind) if x.count == 6)
    logits = np.asarray(first.predict(first.to_device(last)))
    row = first.ops.to_numpy(first.evaluate_batch(first.to_device(last)))
    sums, scores = np.split(row, [first.task.length])
    plain = Task(first.config.task, first._sample, OPS["numpy"]())
    if plain.has_user_functions:
        plain.probe(logits[:2], {"label": last.labels["label"][:2]}, np.ones(2))
    labels = last.labels["label"].astype(np.float64 if kind != "classes" else np.int64)
    np.testing.assert_allclose(plain(logits, {"label": labels}, np.ones(6))[1], sums, rtol=1e-12, atol=1e-12)
    wanted = plain.scores(logits, {"label": labels}, np.ones(6))[plain.length :]
    # The batch is padded, and so are its scores: what does not count is marked 0.
    np.testing.assert_allclose(*(counted(x, plain.ranked) for x in (scores, wanted)), rtol=1e-12, atol=1e-12)


def counted(scores, ranked):
    """The scores of an evaluation's batch and their marks, without places that do not count; a step has none."""
    parts = []
    for _ in ranked if len(scores) else ():
        end = 1 + 2 * int(scores[0])
        part, scores = scores[1:end].reshape(2, -1), scores[end:]
        parts.append(part[:, part[1] > 0])
    return np.concatenate(parts or [np.zeros((2, 0))], 1)


def test_class_weights_give_pytorchs_mean_and_gradient(monkeypatch):
    """What the message advises for CrossEntropyLoss(weight=w), over parts of unequal weight as ranks have them."""
    torch = pytest.importorskip("torch")

    w, y = torch.tensor([1.0, 2.0, 5.0], dtype=torch.float64), torch.arange(11) % 3
    z = torch.randn(11, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    wanted = torch.nn.CrossEntropyLoss(weight=w)(z, y)
    (gradient,) = torch.autograd.grad(wanted, z)
    own = {"weighted": lambda z, y: (torch.nn.functional.cross_entropy(z, y, reduction="none"), w[y])}
    monkeypatch.setitem(sys.modules, "own_task", SimpleNamespace(**own))
    sample = Sample({}, {"label": Field((), "int64")})
    task = Task(Config.model_validate({"task": {"loss": "own_task:weighted"}}).task, sample, OPS["pytorch"]())
    task.probe(z[:2], {"label": y[:2]}, torch.ones(2, dtype=torch.float64))
    parts = [(z[k], {"label": y[k]}, torch.ones(len(k), dtype=torch.float64)) for k in torch.arange(11).split(4)]
    count = sum(task.counts(labels, weights) for _, labels, weights in parts)
    losses, sums = zip(*(task(*part, 1 / count) for part in parts), strict=True)
    assert task.results(sum(sums).numpy())["loss"] == pytest.approx(wanted.item(), rel=1e-12)
    np.testing.assert_allclose(torch.autograd.grad(sum(losses), z)[0], gradient, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize(
    ("loss", "words"),
    [("tests.own_models:mean_loss", "one number for a batch"), ("tests.own_models:nothing_here", "has no function")],
)
def test_a_loss_that_cannot_be_used_is_one_line_before_training(framework, loss, words):
    with pytest.raises(ConfigError, match=words) as caught:
        task_run(framework, {"loss": loss}, "numbers")
    assert loss in str(caught.value) and "\n" not in str(caught.value)


# ---- verbs

OPS = {
    "numpy": lambda: module("numpy").cpu_ops(),
    "pytorch": lambda: module("pytorch").cpu_ops(),
    "tensorflow": lambda: module("tensorflow").cpu_ops(),
    "jax": lambda: module("jax").cpu_ops(),
}
X = np.array([3.0, -1.0, 0.0, 2.0, -5.0, 2.5])
A, B = np.arange(6.0).reshape(2, 3), np.arange(12.0).reshape(3, 4)


@pytest.mark.parametrize("framework", EVERY)
@pytest.mark.parametrize(
    ("verb", "expected"),
    [
        (lambda o, f: o.cast(f(X), "float32"), X.astype(np.float32)),
        (lambda o, f: o.reshape(f(X), (2, 3)), X.reshape(2, 3)),
        (lambda o, f: o.reshape(f(A), (-1,)), A.ravel()),
        (lambda o, f: o.take(f(X), o.topk(f(X), 2)), [3.0, 2.5]),
        (lambda o, f: o.above(f(X), 1.0), [0, 3, 5]),
        (lambda o, f: o.above(f(X), 99.0), []),
        (lambda o, f: o.take(f(X), o.above(f(X), 1.0)), [3.0, 2.0, 2.5]),
        (lambda o, f: o.scatter(4, f(np.array([1, 3, 1])), f(np.array([1.0, 2.0, 5.0]))), [0, 6, 0, 2]),
        (lambda o, f: o.matmul(f(A), f(B)), A @ B),
        (lambda o, f: o.matmul(f(A.T.copy()), f(B), transpose_a=True), A @ B),
        (lambda o, f: o.matmul(f(A), f(B.T.copy()), transpose_b=True), A @ B),
        (lambda o, f: o.matmul(f(B), f(B[:2]), transpose_b=True), B @ B[:2].T),
        (lambda o, f: o.minus_product(f(A @ A.T), f(A), f(A)), np.zeros((2, 2))),
        (lambda o, f: o.clip(f(X), 2.0), np.clip(X, -2, 2)),
        (lambda o, f: o.sum_of_squares(f(A)), (A**2).sum()),
        (lambda o, f: o.round(f(np.array([-1.5, 0.5, 1.2, 2.5]))), [-2, 0, 1, 2]),
        (lambda o, f: o.max(f(X)), 3.0),
        (lambda o, f: o.where(f(X) > 0, f(X), 1.0), [3, 1, 1, 2, 1, 2.5]),
        (lambda o, f: o.where(f(X) > 0, 0.0, f(X)), [0, -1, 0, 0, -5, 0]),
        (lambda o, f: o.sum(f(A), 0), A.sum(axis=0)),
        (lambda o, f: o.sum(f(A), -1), A.sum(axis=-1)),
        (lambda o, f: o.concat(list(o.split(f(X), [1, 3, 2]))), X),
        (lambda o, f: o.take_last(f(A), f(np.array([1, 0]))), [A[0, 1], A[1, 0]]),
        (lambda o, f: o.all_finite(f(X)), True),
        (lambda o, f: o.all_finite(f(np.array([1.0, np.inf]))), False),
        (lambda o, f: o.all_finite(f(np.array([1.0, np.nan]))), False),
    ],
)
def test_verbs(framework, verb, expected):
    ops = OPS[framework]()
    found = ops.to_numpy(verb(ops, ops.from_numpy))
    expected = np.asarray(expected)
    assert found.shape == expected.shape
    if expected.dtype == np.float32:
        assert found.dtype == np.float32
    values = np.sort(found) if found.ndim == 1 and set(found) == {3.0, 2.5} else found
    np.testing.assert_allclose(values, np.sort(expected) if values is not found else expected, rtol=1e-12)


def counted_past_24_bits(ops, metric, logits):
    """The sums of two samples, of which the first counts 2^24 times and the second once."""
    x, y = ops.from_numpy(np.array(logits, np.float32)), ops.from_numpy(np.array([1, 1]))
    weights = ops.from_numpy(np.array([2.0**24, 1], np.float32))
    return ops.to_numpy(metric.sums(Predictions(x, y, weights, None, (x, y), ops)))


@pytest.mark.parametrize("framework", EVERY)
def test_counts_of_one_batch_may_exceed_24_bits(framework):
    """As those of masks do: 32 images of 1024 x 1024 are 2^25 places, and 32 bits stop at 2^24."""
    ops, two = OPS[framework](), LabelForm("classes", 2)
    counts = counted_past_24_bits(ops, METRICS["iou"].metric_class(two, rate="iou", average=""), [1, 1])
    assert counts.reshape(3, 2).tolist() == [[0, 2**24 + 1]] * 3
    areas = counted_past_24_bits(ops, METRICS["auc"].metric_class(two, average=""), [1, 1])
    assert areas.max() == 2**24 + 1


@pytest.mark.parametrize("framework", EVERY)
def test_orthonormal_basis_spans_the_columns(framework):
    ops = OPS[framework]()
    x = np.random.default_rng(0).normal(size=(7, 3))
    q = ops.to_numpy(ops.orthonormal(ops.from_numpy(x)))
    np.testing.assert_allclose(q.T @ q, np.eye(3), atol=1e-12)
    np.testing.assert_allclose(q @ (q.T @ x), x, atol=1e-12)


@pytest.mark.parametrize("framework", EVERY)
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_a_cross_entropy_of_some_places_has_the_bits_of_all(framework, share):
    ops, rng = OPS[framework](), np.random.default_rng(0)
    z, y, own = rng.normal(size=(5, 7, 40)), rng.integers(0, 40, (5, 7)), 1.0 * (rng.random((5, 7)) < share)
    some, whole = (
        ops.to_numpy(ops.cross_entropy(ops.from_numpy(z), ops.from_numpy(y), *map(ops.from_numpy, given)))
        for given in ([own], [])
    )
    assert some.shape == whole.shape == own.shape and (some[own == 1] == whole[own == 1]).all()


@pytest.mark.parametrize("share", [0.0, 0.3])
def test_pytorch_takes_the_gradient_of_the_places_that_count(share):
    torch = pytest.importorskip("torch")

    ops, rng = OPS["pytorch"](), torch.Generator().manual_seed(0)
    x, table = torch.randn(4, 9, 16, generator=rng), torch.randn(300, 16, generator=rng)
    y, own = torch.randint(0, 300, (4, 9), generator=rng), (torch.rand(4, 9, generator=rng) < share).float()
    found = []
    for given in ([own], []):
        parts = x.clone().requires_grad_(), table.clone().requires_grad_()
        values = ops.cross_entropy(parts[0] @ parts[1].T, y, *given)
        found.append(torch.autograd.grad(torch.where(own != 0, values, 0.0).flatten().dot(own.flatten()), parts))
    assert all((a == b).all() for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("framework", EVERY)
@pytest.mark.parametrize("name", ["float16", "float32", "float64", "int8", "int32"])
def test_types_have_numpys_names(framework, name):
    ops = OPS[framework]()
    assert ops.dtype(ops.cast(ops.from_numpy(X), name)) == name == ops.to_numpy(ops.cast(ops.from_numpy(X), name)).dtype


@pytest.mark.parametrize("framework", EVERY)
def test_verbs_give_copies(framework):
    ops, x = OPS[framework](), X.copy()
    tensor = ops.from_numpy(x)
    x[:] = 0
    assert (ops.to_numpy(tensor) == X).all()


# ---- 32 bits


@pytest.mark.parametrize("framework", EVERY)
def test_precision_32_computes_in_float32_and_counts_in_float64(framework):
    frontend = opened(framework, precision=32)
    assert {s.dtype for s in frontend.specs()} == {"float32"}
    sums = frontend.train_step(frontend.to_device(replace(batch())), 1 / ROWS, 0, 0.1)
    assert frontend.ops.to_numpy(sums).dtype == np.float64
    assert {x.dtype.name for x in everything(frontend).values()} == {"float32"}


@pytest.mark.parametrize("framework", ALL)
def test_the_compression_error_leaves_no_trace(framework):
    model, shape = {"name": "resnet", "width": 2, "blocks": [1, 1]}, (8, 8, 1)
    asked, other = (opened(framework, model, compressor=Threshold(0.05), shape=shape) for _ in range(2))
    before = everything(asked)
    assert any(k.startswith("statistics/") for k in before)
    figures = asked.ops.to_numpy(asked.compression_error(asked.to_device(batch(0, shape=shape)), 1 / ROWS, 0))
    assert figures.shape == (5,) and 0 < figures[0] <= np.sqrt(figures[1] * figures[2]) * (1 + 1e-9)
    assert same(everything(asked), before) and not any(x.any() for x in local_state(asked).values())
    ends = [stepped(one, [batch(1, shape=shape)]) for one in (asked, other)]
    assert same(everything(ends[0]), everything(ends[1])) and same(local_state(ends[0]), local_state(ends[1]))

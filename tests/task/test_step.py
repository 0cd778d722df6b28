"""``task.step``: the user's training step gives the numbers of built-in losses, on any number of ranks."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

from hvd_train.config import load_config
from hvd_train.errors import ConfigError
from tests.cli.running import commands, run

PYTORCH = """
import torch
from torch.nn.functional import cross_entropy, normalize

class Net(torch.nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 12, bias=False), torch.nn.Tanh())
        self.head, self.back = torch.nn.Linear(12, num_classes, bias=False), torch.nn.Linear(12, 64, bias=False)
    def forward(self, x):
        return self.head(self.body(x))

def lightnings(model, batch, batch_idx=0):
    return plain(model, *batch)

def plain(model, x, y):
    logits = model(x)
    return {"loss": cross_entropy(logits, y, reduction="none"), "outputs": logits}

def both(model, x, y):
    code = model.body(x)
    logits, picture = model.head(code), model.back(code)
    penalty = 0.005 * sum(w.square().sum() for w in model.parameters())
    error = (picture - x.flatten(1)).square()
    return {"name": cross_entropy(logits, y, reduction="none"), "picture": error, "penalty": penalty, "outputs": logits}

def some(model, x, y):
    logits = model(x)
    return cross_entropy(logits, y, reduction="none"), (y != 3) * (1.0 + y)

def mean(model, x, y):
    return cross_entropy(model(x), y)

def several(model, x, y):
    return {"name": cross_entropy(model(x), y, reduction="none"), "loss": 0}

def text(model, x, y):
    return "loss"

def pairs(model, x, y):
    z = normalize(model.body(x))
    return cross_entropy(z @ z.T, torch.arange(len(z)), reduction="none")

def varying(model, x, y):
    return {"loss": cross_entropy(model(x), y, reduction="none"), "penalty": model(x).abs().mean()}

def failing(model, x, y):
    return model.nothing(x)

def confident(model, x, y):
    logits = model(x)
    return cross_entropy(logits, y, reduction="none"), torch.softmax(logits, 1).amax(1)

def adversary(model, x, y):
    x = x.clone().requires_grad_()
    with torch.enable_grad():
        cross_entropy(model(x), y).backward()
    return cross_entropy(model(x + 0.1 * x.grad.sign()), y, reduction="none")

def slope(model, x, y):
    x = x.clone().requires_grad_()
    values = cross_entropy(model(x), y, reduction="none")
    return values + torch.autograd.grad(values.sum(), x, create_graph=True)[0].square().flatten(1).sum(1)

def broadcast(model, x, y):
    return (model(x)[:, :1] - y).square()

def drawing(model, x, y):
    values = cross_entropy(model(x + torch.randn_like(x)), y, reduction="none")
    return {"loss": values, "penalty": sum(())}

def without(model, x, y):
    return cross_entropy(model(x), y, reduction="none")

def parts(outputs, labels):
    return cross_entropy(outputs, labels, reduction="none"), (labels != 3) * (1.0 + labels)
"""

TENSORFLOW = """
import keras
from keras import ops

def cross_entropy(logits, y):
    return keras.losses.sparse_categorical_crossentropy(y, logits, from_logits=True)

class Net(keras.Model):
    def __init__(self, num_classes):
        super().__init__()
        hidden = keras.layers.Dense(12, activation="tanh", use_bias=False)
        self.body = keras.Sequential([keras.layers.Flatten(), hidden])
        self.head, self.back = (keras.layers.Dense(k, use_bias=False) for k in (num_classes, 64))
        self.build((None, 8, 8, 1))
    def build(self, shape):
        self.body.build(shape)
        self.head.build((None, 12))
        self.back.build((None, 12))
        self.built = True
    def call(self, x, training=False):
        return self.head(self.body(x, training=training))

def plain(model, x, y, training):
    logits = model(x, training=training)
    return {"loss": cross_entropy(logits, y), "outputs": logits}

def both(model, x, y, training):
    code = model.body(x, training=training)
    logits, picture = model.head(code), model.back(code)
    penalty = 0.005 * sum(ops.sum(ops.square(w)) for w in model.trainable_variables)
    error = ops.square(picture - ops.reshape(x, (-1, 64)))
    return {"name": cross_entropy(logits, y), "picture": error, "penalty": penalty, "outputs": logits}

def some(model, x, y, training):
    weights = ops.cast(y != 3, "float64") * (1.0 + ops.cast(y, "float64"))
    return cross_entropy(model(x, training=training), y), weights

def confident(model, x, y, training):
    logits = model(x, training=training)
    return cross_entropy(logits, y), ops.max(ops.softmax(logits), 1)

def noisy(model, x, y, training):
    return cross_entropy(model(x + keras.random.normal(ops.shape(x), dtype="float64")), y)

def forgetful(model, x, y):
    return cross_entropy(model(x), y)

def parts(outputs, labels):
    weights = ops.cast(labels != 3, "float64") * (1.0 + ops.cast(labels, "float64"))
    return cross_entropy(outputs, labels), weights
"""
FRAMEWORKS = {"pytorch": PYTORCH, "tensorflow": TENSORFLOW}


def words(framework, folder, task, *sets):
    each = [f"framework={framework}", "model.name=mine:Net", "data={name: digits, num_classes: 10}", f"task={task}"]
    each += ["precision=64", "max_steps=8", "optim.lr=0.1", *sets]
    return ["fit", "--run-dir", folder, *[word for one in each for word in ("--set", one)]]


def values(folder, *names):
    summary = json.loads((folder / "summary.json").read_text())
    return [summary[f"val_{name}"] for name in names]


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_step_is_the_loss_that_it_computes(framework, tmp_path):
    (tmp_path / "mine.py").write_text(FRAMEWORKS[framework])
    two = "{step: 'mine:both', loss_weights: {name: 1.0, picture: 0.5}, metrics: [accuracy, f1_macro]}"
    folders = [tmp_path / name for name in ("built_in", "step", "own", "some", "decay", "both")]
    tasks = [
        "{metrics: [accuracy, f1_macro]}",
        "{step: 'mine:plain', metrics: [accuracy, f1_macro]}",
        "{loss: 'mine:parts', metrics: []}",
        "{step: 'mine:some'}",
    ]
    lines = [words(framework, *pair, "batch_size=60") for pair in zip(folders, tasks, strict=False)]
    # The penalty is that of a weight decay of 0.01, as SGD adds it to the gradient.
    free = two.replace("both", "bare")
    bare = FRAMEWORKS[framework].replace("def both", "def bare").replace("penalty = 0.005 *", "penalty = 0.0 *")
    (tmp_path / "mine.py").write_text(FRAMEWORKS[framework] + bare[bare.index("def bare") : bare.index("def some")])
    decay = ("optim={name: sgd, lr: 0.1, weight_decay: 0.01}", "batch_size=60")
    lines += [words(framework, folders[4], free, *decay), words(framework, folders[5], two, "batch_size=60")]
    resumed = [*words(framework, folders[5], two, "batch_size=60", "max_steps=8"), "--resume", "auto"]
    done = commands(*lines, resumed, ["eval", "--run-dir", folders[5]], cwd=tmp_path)
    assert not any(one.code for one in done), done
    names = ["loss", "accuracy", "f1_macro"]
    assert values(folders[0], *names) == pytest.approx(values(folders[1], *names), rel=1e-12)
    assert values(folders[2], "loss") == pytest.approx(values(folders[3], "loss"), rel=1e-12)
    names += ["name_loss", "picture_loss"]
    want = values(folders[5], *names)
    assert values(folders[4], *names) == pytest.approx(want, rel=1e-12)
    assert want[0] == pytest.approx(want[3] + 0.5 * want[4], rel=1e-14)
    worlds = (2, two, folders[5], names, ()), (3, tasks[3], folders[3], ["loss"], ("accumulate_grad_batches=2",))
    for ranks, task, one, asked, sets in worlds:
        folder, batch = tmp_path / f"{ranks}", f"batch_size={60 // ranks // (1 + len(sets))}"
        run(*map(str, words(framework, folder, task, batch, *sets)), "-np", str(ranks), cwd=tmp_path)
        assert values(folder, *asked) == pytest.approx(values(one, *asked), rel=1e-12)


def test_a_resumed_run_has_the_bits_of_the_undisturbed_one(tmp_path):
    (tmp_path / "mine.py").write_text(PYTORCH)
    task = "{step: 'mine:some'}"
    sets = ("batch_size=60", "checkpoint.every_n_steps=4")
    whole, cut = (tmp_path / name for name in ("whole", "cut"))
    again = [*words("pytorch", cut, task, *sets), "--resume", "auto"]
    done = commands(
        words("pytorch", whole, task, *sets), words("pytorch", cut, task, *sets, "max_steps=4"), again, cwd=tmp_path
    )
    assert not any(one.code for one in done), done
    assert values(whole, "loss") == values(cut, "loss")


@pytest.mark.parametrize(
    ("step", "keys", "told"),
    [
        ("lightnings", "", "has a parameter batch, as a training_step of Lightning; .*step.model, inputs, labels."),
        ("mean", "", "gives one number for a batch, but means of unequal parts cannot be averaged; task.step"),
        ("several", "", "the step gives name, loss, and not loss, outputs, penalty; .*task.loss_weights"),
        ("several", ", loss_weights: {name: 1}", "the step gives name, loss, and not name, outputs, penalty"),
        ("text", "", "'loss' is a str, not a tensor; .*return a value for each sample"),
        ("varying", "", "the penalty depends on the samples, .*add it to the values of each sample"),
        ("failing", "", r"the step failed: .*nothing.*it is called with inputs \(2, 1, 8, 8\) and labels \(2,\)"),
        ("without", ", metrics: [accuracy]", "the step returns no outputs to compute metrics of; task.metrics"),
        ("absent", "", "absent"),
        ("broadcast", "", r"'loss' has shape \(5, 5\) for 5 samples and \(1, 1\) for one; .*outputs\[:, 0\]"),
        ("confident", "", "the weights of a loss depend on the model; task.step: .*belongs in the values"),
        ("adversary", "", r"the step calls backward\(\), .*torch.autograd.grad"),
        ("slope", "", r"the step failed: .*does not require grad.*with torch.enable_grad\(\)"),
    ],
)  # fmt: skip
def test_bad_steps(
    step,
    keys,
    told,
    tmp_path,
):
    (tmp_path / "mine.py").write_text(PYTORCH)
    (done,) = commands(words("pytorch", tmp_path / "run", f"{{step: 'mine:{step}'{keys}}}"), cwd=tmp_path)
    assert done.code == 2 and len(done.err.strip().splitlines()) == 1, done
    assert re.search(told, done.err)


def test_a_step_of_keras_is_told_whether_it_trains(tmp_path):
    (tmp_path / "mine.py").write_text(TENSORFLOW)
    (done,) = commands(words("tensorflow", tmp_path / "run", "{step: 'mine:forgetful'}"), cwd=tmp_path)
    assert done.code == 2 and "has no parameter training, without which dropout would be off" in done.err


def test_weights_of_a_keras_step_come_from_the_labels(tmp_path):
    (tmp_path / "mine.py").write_text(TENSORFLOW)
    (done,) = commands(words("tensorflow", tmp_path / "run", "{step: 'mine:confident'}"), cwd=tmp_path)
    assert done.code == 2 and "the weights of a loss depend on the model" in done.err, done


def test_random_numbers_of_a_keras_step_are_those_of_a_run_that_nobody_stopped(tmp_path):
    (tmp_path / "mine.py").write_text(TENSORFLOW)
    task, sets, whole, cut = (
        "{step: 'mine:noisy'}",
        ["checkpoint.every_n_steps=4"],
        tmp_path / "whole",
        tmp_path / "cut",
    )
    first = words("tensorflow", cut, task, *sets, "max_steps=4")
    again = [*words("tensorflow", cut, task, *sets), "--resume", "auto"]
    done = commands(words("tensorflow", whole, task, *sets), first, cwd=tmp_path) + commands(again, cwd=tmp_path)
    assert not any(one.code for one in done), done
    assert values(whole, "loss") == values(cut, "loss")


VIEWS = """
import numpy as np
from hvd_train.data.formats import read_digits

IMAGES, LABELS = read_digits()

def data():
    images = (IMAGES / 16)[..., None]
    return (images[:24], LABELS[:24]), (images[24:60], LABELS[24:60])
"""
TWO_VIEWS = {
    "pytorch": """
import torch
from torch.nn.functional import cross_entropy

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.head = torch.nn.BatchNorm1d(64), torch.nn.Linear(64, 10)
    def forward(self, x):
        return self.head(self.norm(x.flatten(1)))

def views(model, x, y):
    first, second = model(torch.cat([x, x.flip(-1)])).chunk(2)
    return cross_entropy(first, y, reduction="none") + (first - second).square().mean(1)
""",
    "tensorflow": """
import keras
from keras import ops

def Net():
    keras.utils.set_random_seed(1)
    layers = [keras.Input((8, 8, 1)), keras.layers.Flatten(), keras.layers.BatchNormalization(), keras.layers.Dense(10)]
    return keras.Sequential(layers)

def views(model, x, y, training):
    first, second = ops.split(model(ops.concatenate([x, ops.flip(x, 2)]), training=training), 2)
    loss = keras.losses.sparse_categorical_crossentropy(y, first, from_logits=True)
    return loss + ops.mean(ops.square(first - second), 1)
""",
}


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_two_views_of_a_batch_with_padding(framework, tmp_path):
    """All samples in one step: on one rank without padding, on two with some, which no batch norm may count."""
    (tmp_path / "mine.py").write_text(VIEWS + TWO_VIEWS[framework])
    line = words(framework, tmp_path / "1", "{step: 'mine:views'}", "data={name: 'mine:data', num_classes: 10}")
    (alone,) = commands([*line, "--set", "batch_size=24"], cwd=tmp_path)
    assert alone.code == 0, alone
    line[2] = tmp_path / "2"
    run(*map(str, line), "--set", "batch_size=15", "--set", "sync_batchnorm=true", "-np", "2", cwd=tmp_path)
    assert values(tmp_path / "2", "loss") == pytest.approx(values(tmp_path / "1", "loss"), rel=1e-11)


def test_samples_that_are_compared_are_told(tmp_path):
    (tmp_path / "mine.py").write_text(PYTORCH)
    lines = [words("pytorch", tmp_path / name, f"{{step: 'mine:{name}'}}") for name in ("pairs", "drawing")]
    done, drawing = commands(*lines, cwd=tmp_path)
    assert drawing.code == 0 and "note: task.step" not in drawing.out, drawing
    assert done.code == 0 and "mine:pairs: the value of a sample depends on the others of its batch" in done.out


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"task": {"step": "mine:step", "loss": "mse"}}, "step: it takes the place of loss; leave one of the two out"),
        ({"task": {"step": "mine"}}, "'mine' is no function: write package.module:function"),
        ({"task": {"step": "m:s", "metrics": {"a": ["mse"]}}}, "a step has one list of metrics"),
        ({"task": {"step": "m:s", "class_weights": "balanced"}}, r"belong to loss: cross_entropy"),
        ({"task": {"step": "m:s", "loss_weights": {"loss": 1.0}}}, "'loss' is no name for a loss"),
        ({"task": {"loss_weights": {"a": 1.0}}}, "there is no loss a; give several losses, by their outputs"),
        ({"task": {"loss": {"a": "mse", "b": "mse"}, "loss_weights": {"c": 1.0}}}, "no loss c; task.loss has a, b"),
        ({"task": {"step": "m:s"}, "parallel": {"pipeline": 2}}, "task.step.* does not go with parallel.pipeline"),
        (
            {"task": {"step": "m:s"}, "data": {"name": "digits", "transforms": [{"name": "mixup", "alpha": 0.2}]}},
            "task.step.*does not go with mixup or cutmix, .*two labels",
        ),
    ],
)
def test_the_configuration(keys, told):
    with pytest.raises(ConfigError, match=told):
        load_config(base=keys)


def test_names_of_the_log():
    task = {"step": "m:s", "loss_weights": {"b": 1.0, "a": 0.5}, "metrics": ["accuracy"]}
    config = load_config(base={"task": task})
    assert config.task.names == ["loss", "a_loss", "b_loss", "accuracy"] and config.task.loss == "m:s"
    assert load_config(base=config.model_dump(mode="json")) == config


OUTPUTS = """
import numpy as np
import torch

def data():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(90, 3))
    return [(x[k], {"a": x[k].sum(1), "b": x[k, :1] * 2}) for k in (slice(0, 60), slice(60, 90))]

class Net(torch.nn.Module):
    def __init__(self, factor=1.0):
        super().__init__()
        self.a, self.b = torch.nn.Linear(3, 1), torch.nn.Linear(3, 1)
    def forward(self, x):
        return {"a": self.a(x), "b": self.b(x)}

def third(outputs, labels):
    return (outputs - labels).square() / 3

def whole(outputs, labels):
    return (outputs - labels).square()
"""


def test_losses_of_several_outputs_have_weights(tmp_path):
    (tmp_path / "mine.py").write_text(OUTPUTS)
    lines, folders = [], [tmp_path / "weighted", tmp_path / "divided"]
    tasks = ["{loss: {a: mse, b: 'mine:whole'}, loss_weights: {b: 0.3333333333333333}}"]
    tasks.append("{loss: {a: mse, b: 'mine:third'}}")
    for folder, task in zip(folders, tasks, strict=True):
        sets = [f"task={task}", "model.name=mine:Net", "data.name=mine:data", "precision=64", "max_steps=9"]
        lines.append(["fit", "--run-dir", folder, *[word for one in sets for word in ("--set", one)]])
    done = commands(*lines, cwd=tmp_path)
    assert not any(one.code for one in done), done
    (a, b, loss), (other_a, other_b, other) = (values(one, "a_loss", "b_loss", "loss") for one in folders)
    assert np.allclose([a, b / 3, loss], [other_a, other_b, other], rtol=1e-12)

"""``hvd_train.fit`` from a script or notebook: alone in both frameworks, on 2 ranks, and its errors."""

from __future__ import annotations

import json
import pickle

import numpy as np
import pytest

import hvd_train
from hvd_train.checkpoint import store
from hvd_train.config import load_config
from hvd_train.config.user_code import user_function
from hvd_train.data.order import permute
from hvd_train.errors import CheckpointError, CommunicationError, ConfigError, DataError
from hvd_train.report.text_tables import side_by_side
from hvd_train.report.watch import WatchedRun

CLASSES = 3
rng = np.random.default_rng(0)
X = rng.normal(size=(90, 6)).astype(np.float32)
Y = X[:, :CLASSES].argmax(1)
DATA = (X[:60], Y[:60]), (X[60:], Y[60:])
NUMBERS = tuple((x, x[:, :CLASSES]) for x, _ in DATA)


def config(folder, **keys):
    settings = {"max_epochs": 2, "global_batch_size": 16, "optim": {"lr": 0.1}, "tensorboard": False}
    return settings | {"run_dir": str(folder)} | keys


def built(framework, dtype="float32"):
    if framework == "pytorch":
        import torch

        torch.manual_seed(0)
        return torch.nn.Linear(6, CLASSES)
    import keras

    layer = keras.layers.Dense(CLASSES, dtype=dtype, kernel_initializer="zeros")
    return keras.Sequential([keras.Input((6,)), layer])


def answers(model, x):
    import torch

    found = model(torch.from_numpy(x)) if isinstance(model, torch.nn.Module) else model(x)
    return np.asarray(found.detach() if hasattr(found, "detach") else found)


class Losses(hvd_train.Hook):
    def __init__(self):
        self.found = []

    def on_epoch(self, trainer, epoch):
        self.found.append(epoch.metrics["val_loss"])
        self.train = {name: x for name, x in epoch.metrics.items() if name.startswith("train_")}


@pytest.mark.parametrize("framework", ["pytorch", "tensorflow"])
def test_a_built_model_is_trained_in_place(tmp_path, framework):
    """Twice in one process, as in a notebook; what the caller holds is what was evaluated."""
    model, losses = built(framework), Losses()
    for name in ("first", "second"):
        settings = config(tmp_path / name, framework=framework)
        summary = hvd_train.fit(settings, model=model, data=DATA, hooks=[losses])
        assert summary == json.loads((tmp_path / name / "summary.json").read_text())
    assert losses.train["train_loss"] > 0 and losses.train.items() <= dict(summary).items()
    assert len(losses.found) == 4 and losses.found[-1] == summary["val_loss"] < losses.found[0]
    right = answers(model, DATA[1][0]).argmax(1) == DATA[1][1]
    assert right.mean() == summary.val_accuracy > 0.5


@pytest.mark.parametrize("framework", ["pytorch", "tensorflow"])
def test_a_resumed_run_needs_its_pretrained_file_no_more(tmp_path, framework):
    """The checkpoint has all weights, as for eval, predict and export."""
    body = tmp_path / "body"

    def model(input_shape, num_classes, pretrained=True):
        if pretrained:
            body.read_bytes()
        return built(framework)

    settings = config(tmp_path / "run", framework=framework)
    with pytest.raises(ConfigError, match="the model cannot be built: .*No such file"):
        hvd_train.fit(settings, model=model, data=DATA, resume="auto")
    body.write_bytes(b"weights")
    hvd_train.fit(settings | {"max_epochs": 1}, model=model, data=DATA)
    body.unlink()
    summary = hvd_train.fit(settings, model=model, data=DATA, resume="auto")
    whole = hvd_train.fit(
        settings | {"run_dir": str(tmp_path / "whole")}, model=lambda num_classes: built(framework), data=DATA
    )
    assert summary.weights_sha256 == whole.weights_sha256


def test_a_snapshot_that_finds_no_room_in_memory_is_left_out(tmp_path, capfd, monkeypatch):
    (tmp_path / "full").write_text("")  # a folder cannot be made in it
    monkeypatch.setenv("HVD_TRAIN_SNAPSHOTS", str(tmp_path / "full" / "snapshots"))
    rule = {"snapshot_every_n_steps": 1}
    summary = hvd_train.fit(config(tmp_path / "run", checkpoint=rule), model=built("pytorch"), data=DATA)
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("warning: ")]
    assert len(lines) == 1 and "warning: a snapshot in memory is left out: the checkpoint cannot be written" in lines[0]
    assert lines[0].endswith("training goes on without") and summary.epochs == 2
    assert list((tmp_path / "run" / "checkpoints").iterdir())


def normed(framework):
    if framework == "pytorch":
        import torch

        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, CLASSES))
    import keras

    dense, norm = keras.layers.Dense, keras.layers.BatchNormalization
    return keras.Sequential([keras.Input((6,)), dense(4), norm(), dense(CLASSES)])


def copied(model):
    """A model of the same weights that no training has touched."""
    if not hasattr(model, "state_dict"):
        import keras

        other = keras.models.clone_model(model)
        other.set_weights(model.get_weights())
        return other
    other = normed("pytorch")
    other.load_state_dict(model.state_dict(), strict=False)
    return other


@pytest.mark.parametrize("framework", ["pytorch", "tensorflow"])
def test_a_second_fit_leaves_the_first_ones_batches_behind(tmp_path, framework):
    """The first ends with an empty micro-batch: 5 samples by 2 in two parts."""
    model, few = normed(framework), tuple((x[:5], y[:5]) for x, y in DATA)
    keys = {"framework": framework, "global_batch_size": 2, "accumulate_grad_batches": 2, "data": {"num_classes": 3}}
    hvd_train.fit(config(tmp_path / "first", **keys), model=model, data=few)
    fresh = copied(model)
    again, alone = (
        hvd_train.fit(config(tmp_path / name, **keys), model=one, data=few)
        for name, one in (("again", model), ("alone", fresh))
    )
    assert again.val_loss == pytest.approx(alone.val_loss, rel=1e-5)


def test_functions_and_names(tmp_path):
    """Closures for the model and the data; a file for the configuration; a model of the zoo by its name."""
    import torch

    def network(input_shape, num_classes, width=4):
        return torch.nn.Sequential(torch.nn.Linear(*input_shape, width), torch.nn.Linear(width, num_classes))

    settings = config(tmp_path / "1", model={"width": 5}, data={"options": {"count": 40}})
    summary = hvd_train.fit(settings, model=network, data=lambda count: ((X[:count], Y[:count]), DATA[1]))
    assert summary.train_samples == 2 * 40 and summary.model.endswith("test_functions_and_names.<locals>.network")
    (tmp_path / "job.yaml").write_text(f"max_steps: 1\ntensorboard: false\nrun_dir: {tmp_path / '2'}\n")
    assert hvd_train.fit(tmp_path / "job.yaml", model="mlp", data=DATA).steps == 1


def far(outputs, labels):
    """The share of the numbers that are off by more than a half."""
    return abs(outputs - labels) > 0.5


@pytest.mark.parametrize("framework", ["pytorch", "tensorflow"])
def test_loss_and_metrics_of_ones_own(tmp_path, framework):
    """Functions give what their names in the configuration give; a run folder says what ``eval`` needs."""
    from tests.own_models import weighted

    def near(outputs, labels):
        return abs(outputs - labels) < 0.5

    model = built(framework)

    def trained(name, task=None, **handed):
        keys = config(tmp_path / name, framework=framework, task=task)
        return tmp_path / name, hvd_train.fit(keys, model=model, data=NUMBERS, **handed)

    named = {"loss": "tests.own_models:weighted", "metrics": ["tests.api.test_fit:far"]}
    first, one = trained("named", task=named)
    model = built(framework)
    _, other = trained("handed", loss=weighted, metrics=[far])
    assert one.weights_sha256 == other.weights_sha256 and one.val_loss == other.val_loss
    assert one.val_far == other.val_far == pytest.approx(far(answers(model, NUMBERS[1][0]), NUMBERS[1][1]).mean())
    local, summary = trained("local", loss="mse", metrics=["mae", near])
    assert summary.val_near == pytest.approx(near(answers(model, NUMBERS[1][0]), NUMBERS[1][1]).mean())
    with pytest.raises(ConfigError) as caught:
        user_function(load_config(local / "config.yaml").task.metrics[1], "task.metrics")
    assert str(caught.value).endswith(
        "; task.metrics; it was handed over in Python; put it into a module of its own and name it, "
        "--set task.metrics=package.module:name"
    )
    assert user_function(load_config(first / "config.yaml").task.loss, "task.loss") is weighted
    with pytest.raises(ConfigError, match="two functions are called tests.api.test_fit:test_loss_and_metrics_of_on"):
        trained("twice", metrics=[lambda z, y: z, lambda z, y: y])
    with pytest.raises(ConfigError, match="task.metrics: '<lambda>' is no name for the log: use def"):
        trained("unnamed", loss="mse", metrics=[lambda z, y: z])
    with pytest.raises(ConfigError, match="one number for a batch, but means of unequal parts cannot be averaged"):
        trained("scalar", loss=lambda z, y: ((z - y) ** 2)[0, 0])


def centered(outputs, labels):
    """Compare each sample with the mean of its batch."""
    import keras

    mean = outputs.mean(0) if hasattr(outputs, "mean") else keras.ops.mean(outputs, 0)
    return ((outputs - mean) - labels)[:, 0] ** 2


@pytest.mark.parametrize("framework", ["pytorch", "tensorflow"])
def test_what_compares_samples_sees_no_padding(tmp_path, framework):
    """Keras had copies of the first sample in the last batch: a validation loss of 2.7431, where 2.6799 is right."""
    model = built(framework)
    w = (answers(model, np.eye(6, dtype=np.float32)) - answers(model, np.zeros((1, 6), np.float32)))[:, 0]
    keys = config(tmp_path, framework=framework, max_epochs=1, seed=3)
    summary = hvd_train.fit(keys, model=model, data=NUMBERS, loss=centered)
    (x, y), (xv, yv) = ((x.astype(float), y[:, 0].astype(float)) for x, y in NUMBERS)
    order = permute(np.arange(60), 60, 3, 0)
    for rows in np.split(order, [16, 32, 48]):
        left = x[rows] @ w - (x[rows] @ w).mean() - y[rows]
        w = w - 0.1 * 2 / len(rows) * x[rows].T @ (left - left.mean())
    values = [xv[part] @ w - (xv[part] @ w).mean() - yv[part] for part in (slice(0, 16), slice(16, 30))]
    assert summary.val_loss == pytest.approx((np.concatenate(values) ** 2).mean(), rel=1e-4)


def test_keras_regularizers_count_in_a_step_without_a_label(tmp_path):
    """They counted by the labels of the first loss, and left weights as they were where it had none."""
    import keras

    (x, y), val = DATA
    labels = np.full(60, -100)
    first, second = np.split(permute(np.arange(60), 60, 0, 0)[:32], 2)
    labels[first] = y[first]
    kernels = []
    for steps in (1, 2):
        keras.utils.set_random_seed(0)
        model = keras.Sequential(
            [keras.Input((6,)), keras.layers.Dense(CLASSES, kernel_regularizer=keras.regularizers.L2(0.25))]
        )
        keys = config(tmp_path / str(steps), framework="tensorflow", max_steps=steps, max_epochs=None)
        hvd_train.fit(keys, model=model, data=((x, labels), val))
        kernels.append(model.layers[0].kernel.numpy())
    np.testing.assert_allclose(kernels[1], (1 - 0.1 * 2 * 0.25) * kernels[0], rtol=1e-5)


def on_ranks(np, folder, framework):
    """Of each rank, after two trainings in 64 bits: classes, then numbers with a loss and a metric of its own."""

    def work():
        losses = Losses()
        keys = config(folder, framework=framework, precision=64, optim={"lr": 0.1, "momentum": 0.9})
        first = hvd_train.fit(keys | {"model": {"name": "mlp", "hidden": [8]}}, data=DATA, hooks=[losses])
        again = hvd_train.fit(
            keys | {"max_epochs": 3, "global_batch_size": 11},
            data=NUMBERS,
            model="mlp",
            loss=lambda outputs, labels: (abs(outputs - labels) ** 1.5, labels > -1),
            metrics=[far],
            overwrite=True,
        )
        return [*losses.found, first.val_loss, again.val_loss, again.val_far], first.weights_sha256, again.epochs

    return hvd_train.launch(work, np=np)


@pytest.mark.parametrize(
    "framework", ["pytorch", pytest.param("tensorflow", marks=pytest.mark.long("the same code under another record"))]
)
def test_two_ranks_are_one(tmp_path, framework):
    one, two = (on_ranks(np, tmp_path / str(np), framework) for np in (1, 2))
    assert two[0] == two[1] and two[0][2] == 3
    np.testing.assert_allclose(two[0][0], one[0][0], rtol=1e-9)


def test_mistakes_are_the_command_lines_own(tmp_path):
    settings = config(tmp_path / "run", max_steps=1)
    with pytest.raises(ConfigError, match=r"optim\.lrr: unknown key; did you mean 'optim\.lr'\?"):
        hvd_train.fit(settings | {"optim": {"lrr": 1}})
    with pytest.raises(ConfigError, match="str is no hook; hooks; "):
        hvd_train.fit(settings, hooks=["print"])
    with pytest.raises(ConfigError, match="int is no model; model; "):
        hvd_train.fit(settings, model=3)
    with pytest.raises(DataError, match=r"the data are a tuple of 3; data; give \(train, val\)"):
        hvd_train.fit(settings, data=(X, Y, X))
    with pytest.raises(ConfigError, match=r"the model's weights are float32; precision: 64; build it in a function"):
        hvd_train.fit(settings | {"framework": "tensorflow", "precision": 64}, model=built("tensorflow"), data=DATA)
    assert not (tmp_path / "run").exists() or not list((tmp_path / "run").iterdir())
    task = {"loss": "tests.own_models:weighted_by_outputs"}
    with pytest.raises(ConfigError, match="weights add up to .*, but for outputs of zeros to 0; .*weighted_by_outputs"):
        hvd_train.fit(
            config(tmp_path / "weighted", task=task, max_steps=1, log_every_n_steps=1),
            model=built("pytorch"),
            data=NUMBERS,
        )
    summary = hvd_train.fit(settings, model=built("pytorch"), data=DATA)
    with pytest.raises(AttributeError, match="the summary has framework, .*; not 'val_f1'"):
        _ = summary.val_f1
    assert pickle.loads(pickle.dumps(summary)) == summary  # as launch brings it back
    with pytest.raises((CheckpointError, ConfigError), match="--overwrite"):
        hvd_train.fit(settings, model=built("pytorch"), data=DATA)


def greedy(framework):
    """Asks for more memory than any machine has."""
    if framework == "pytorch":
        import torch

        class Greedy(torch.nn.Linear):
            def forward(self, x):
                return super().forward(x) + torch.zeros(1 << 48)[: len(x), None]

        return Greedy(6, CLASSES)
    import keras

    class Greedy(keras.layers.Dense):
        def call(self, x):
            many = keras.ops.full((keras.ops.shape(x)[0], 1 << 48), x[0, 0])
            return super().call(x) + many[:, :1]

    return keras.Sequential([keras.Input((6,)), Greedy(CLASSES, dtype="float32")])


def test_a_start_says_what_a_slip_does(tmp_path, capsys):
    """A mistyped run folder, and a batch of more samples than there are: both trained without a word."""
    keys = config(tmp_path / "frist", global_batch_size=4096, max_epochs=1)
    hvd_train.fit(keys, model=built("pytorch"), data=DATA, resume="auto")
    out = capsys.readouterr().out
    assert f"note: --resume auto found no checkpoint in {tmp_path / 'frist'}: the run begins anew\n" in out
    held = f"note: the global batch holds more than the {len(DATA[0][0])} training samples: a step takes all of them"
    assert held in out
    hvd_train.fit({**keys, "max_epochs": 2}, model=built("pytorch"), data=DATA, resume="auto")
    assert "found no checkpoint" not in capsys.readouterr().out


@pytest.mark.parametrize("framework", ["pytorch", "tensorflow"])
def test_too_little_memory_is_one_line(tmp_path, framework):
    with pytest.raises(CommunicationError, match="out of memory: .*; lower batch_size"):
        hvd_train.fit(config(tmp_path / "run", framework=framework), model=greedy(framework), data=DATA)


@pytest.mark.parametrize("framework", ["pytorch", "tensorflow"])
def test_an_evaluation_in_which_no_label_counts_has_no_value(tmp_path, framework, capfd):
    """It had a loss of 0, a perplexity of 1 and the best checkpoint of all; nor may it stop a run or lower its rate."""
    places = np.repeat(Y[:, None], 2, 1)
    few = places[:60].copy()
    few[8:] = -100  # most batches of 4 have no label
    data = (np.repeat(X[:60, None], 2, 1), few), (np.repeat(X[60:, None], 2, 1), places[60:] * 0 - 100)
    model = built(framework)
    if framework == "tensorflow":
        import keras

        model = keras.Sequential([keras.Input((2, 6)), keras.layers.Dense(CLASSES)])
    rules = {"early_stopping": {"monitor": "val_perplexity", "patience": 1}, "log_every_n_steps": 1}
    rules |= {"optim": {"lr": 0.1, "plateau": {"monitor": "val_loss", "patience": 1, "factor": 0.5}}}
    task = {"metrics": ["accuracy", "perplexity", "f1_macro", "top5"]}
    keys = config(tmp_path, framework=framework, task=task, max_epochs=4, global_batch_size=4, **rules)
    summary = hvd_train.fit(keys, model=model, data=data)
    assert summary.epochs == 4 and summary.val_samples == 30
    assert {
        name: summary[name] for name in summary if name.startswith("val_") and name != "val_samples"
    } == dict.fromkeys(("val_loss", "val_accuracy", "val_perplexity", "val_f1_macro", "val_top5"))
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert {row["lr"] for row in rows if row["event"] != "time"} == {0.1}
    losses = [row["loss"] for row in rows if row["event"] == "train"]
    assert None in losses and any(losses) and 0.0 not in losses
    assert summary.train_loss > 0, "that of the labels which there are"
    out, err = capfd.readouterr()
    assert "done: an evaluation without a value" in out
    assert WatchedRun(tmp_path).state_words() == "done: an evaluation without a value"
    assert err.count("the evaluation has no value of val_loss and val_perplexity: no label counts in it") == 1
    with pytest.raises(CheckpointError, match="no checkpoint has a val_loss"):
        store.resolve(tmp_path, "best", "val_loss")
    assert "-" in side_by_side([tmp_path]) and "nan" not in side_by_side([tmp_path]).lower()

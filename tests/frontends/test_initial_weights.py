"""``model.init_from``: which arrays of a file become first weights, in which axes, and what is told of the others."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

import hvd_train
from hvd_train.checkpoint.store import newest
from hvd_train.config import load_config
from hvd_train.errors import CheckpointError, ConfigError, TrainError
from hvd_train.frontends.named_arrays import TensorLayout
from hvd_train.jobs.initial_weights import WeightFile, _other_meanings, _safetensors, assign
from hvd_train.protocol import Field, Sample
from tests.update.test_parameter_groups import DATA, X, Y

TWO = tuple((x, y % 2) for x, y in DATA)
STATE = {
    "weights/body.kernel": (2, 3),
    "weights/body.bias": (3,),
    "weights/head.kernel": (3, 2),
    "statistics/n.mean": (3,),
}


def assigned(arrays, exclude=(), rename=(), canonical=True):
    state = {key: np.zeros(shape, np.float32) for key, shape in STATE.items()}
    aliases = {key.partition("/")[2]: (key, None) for key in state}
    if not canonical:  # a kernel (out, in), as in PyTorch
        layout = TensorLayout("body.kernel", (3, 2), (3, 2), (1, 0), (2, 3))
        aliases = {"fc.weight": ("weights/body.kernel", layout)}
    return assign(WeightFile(arrays, canonical), aliases, state, list(exclude), dict(rename), "model.init_from: x")


def test_what_fits_is_taken_and_all_else_is_told():
    arrays = {
        "body.kernel": np.arange(6.0).reshape(2, 3),
        "body.bias": np.ones(3),
        "head.kernel": np.ones((3, 10)),
        "tail.bias": np.ones(1),
        "n.num_batches_tracked": np.ones(()),
    }
    done = assigned(arrays, exclude=["*.bias"])
    assert list(done.loaded) == ["weights/body.kernel"] and done.loaded["weights/body.kernel"].dtype == np.float32
    assert done.left == {
        "body.bias": "excluded",
        "head.kernel": "(3, 10) in the file, (3, 2) in the model",
        "tail.bias": "the model has no such weight",
    }
    assert done.kept == {
        "body.bias": "excluded",
        "head.kernel": "(3, 10) in the file, (3, 2) in the model",
        "n.mean": "not in the file",
    }


def test_names_change_by_patterns_and_axes_by_layouts():
    x = np.arange(6.0).reshape(3, 2)
    done = assigned({"encoder.fc.weight": x}, rename={"encoder.*": "*"}, canonical=False)
    assert (done.loaded["weights/body.kernel"] == x.T).all()
    done = assigned({"a.kernel": np.ones((2, 3)), "a.bias": np.ones(3)}, rename={"a/*": "body/*"})
    assert list(done.loaded) == ["weights/body.kernel", "weights/body.bias"]


def test_a_tied_weight_is_found_under_either_name():
    """Two names of one weight: the values are taken once, and must not differ."""
    state = {"weights/emb.weight": np.zeros((2, 3), np.float32)}
    aliases = dict.fromkeys(("emb.weight", "head.weight"), ("weights/emb.weight", None))
    x = np.arange(6.0).reshape(2, 3)

    def loaded(rename=None, **arrays):
        file = WeightFile({f"{name}.weight": array for name, array in arrays.items()}, False)
        return assign(file, aliases, state, [], rename or {}, "model.init_from: x")

    for arrays in ({"head": x}, {"emb": x}, {"emb": x, "head": x}):
        done = loaded(**arrays)
        assert (done.loaded["weights/emb.weight"] == x).all() and not done.left and not done.kept
    with pytest.raises(
        ConfigError, match="head.weight and emb.weight of the file differ, and are one weight"
    ) as caught:
        loaded(emb=x, head=x + 1)
    assert loaded(json.loads(str(caught.value).partition("rename: ")[2]), emb=x, head=x + 1).left == {
        "head.weight": "the model has no such weight"
    }


def test_numbers_of_another_kind_are_refused():
    """Codes of a quantized model are no weights; whole numbers of the model stay whole ones of the file."""
    for x, kind, message in (
        (np.ones(3, np.int8), np.float32, "b is int8 in the file, and float32 in the model, which takes no codes"),
        (np.ones(3, bool), np.float64, "b is bool in the file, and float64 in the model, which takes no codes"),
        (np.ones(3, complex), np.float32, "b is complex128 in the file, and float32 in the model; model"),
        (np.full(3, 0.5), np.int64, "b is float64 in the file, and int64 in the model; model.init_from: x; save"),
        (np.full(3, 300), np.uint8, "b is int64 in the file, and uint8 in the model; model.init_from: x; save"),
    ):
        state = {"weights/b": np.zeros(3, kind)}
        file = WeightFile({"b": x}, True)
        with pytest.raises(ConfigError) as caught:
            assign(file, {"b": ("weights/b", None)}, state, [], {}, "model.init_from: x")
        assert str(caught.value).startswith(message)
        assert not assign(file, {"b": ("weights/b", None)}, state, ["b"], {}, "").loaded, "it is excluded"
    for x, kind in ((np.arange(3.0), np.int64), (np.array([0, 1, 1], np.uint8), bool), (np.arange(3), np.int32)):
        done = assign(WeightFile({"b": x}, True), {"b": ("s/b", None)}, {"s/b": np.zeros(3, kind)}, [], {}, "")
        assert (done.loaded["s/b"] == x).all() and done.loaded["s/b"].dtype == kind


def test_bfloat16_needs_no_other_package(tmp_path):
    """In a process without TensorFlow's packages, NumPy knows no such type."""
    import torch
    from safetensors.torch import save_file

    x = torch.randn(2, 3).bfloat16()
    save_file({"a": x, "b": torch.arange(3)}, tmp_path / "a.safetensors")
    code = (
        "import sys, pathlib; from hvd_train.jobs.initial_weights import _safetensors\n"
        f"arrays = _safetensors(pathlib.Path({str(tmp_path / 'a.safetensors')!r}), '').arrays\n"
        "print(arrays['a'].dtype, arrays['a'].tolist(), arrays['b'].dtype, 'ml_dtypes' in sys.modules)"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown == f"float32 {x.float().tolist()} int64 False\n"
    save_file({"a": x.to(torch.float8_e4m3fn)}, tmp_path / "b.safetensors")
    with pytest.raises(CheckpointError, match="a has the type F8_E4M3, which cannot hold weights"):
        _safetensors(tmp_path / "b.safetensors", "model.init_from: b")


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"exclude": ["haed.*"]},
            "exclude: 'haed.*' matches nothing; model.init_from: x; is it 'head'? there",
        ),
        ({"rename": {"bdy.*": "body.*"}}, "rename: 'bdy.*' matches nothing; model.init_from: x; is it 'body'?"),
        ({"rename": {"tail.bias": "body.bias"}}, "two arrays of the file are body.bias, one of them tail.bias"),
    ],
)
def test_patterns_that_match_nothing_are_refused(keys, message):
    with pytest.raises(ConfigError) as caught:
        assigned({"body.bias": np.ones(3), "tail.bias": np.ones(3)}, **keys)
    assert message in str(caught.value)


def test_a_path_stands_for_the_section():
    assert load_config(None, ["model.init_from=runs/a"]).model.init_from.path == "runs/a"
    config = load_config(
        None, ['model.init_from={path: a, exclude: ["*.bias"], rename: {"a.*": "b.*"}}', "model.hidden=[3]"]
    )
    assert config.model.options == {"hidden": [3]} and config.model.init_from.rename == {"a.*": "b.*"}
    for value, message in {
        '{exclude: ["a"]}': "model.init_from.path: give a run folder",
        '{path: a, rename: {"a.*": "b"}}': "model.init_from.rename: 'b' has other * than 'a.*'",
    }.items():
        with pytest.raises(ConfigError, match=message.replace("*", r"\*")):
            load_config(None, [f"model.init_from={value}"])


def run(folder, framework="pytorch", data=DATA, model=None, resume=None, allow_change=(), **keys):
    config = {"framework": framework, "precision": "64", "tensorboard": False, "run_dir": str(folder)}
    config |= {"global_batch_size": 30, "max_epochs": 1, "optim": {"lr": 1e-300}}
    if model is None:
        config["model"] = {"name": "mlp", "hidden": [5]} | keys.pop("model_keys", {})
    else:
        config["model"] = keys.pop("model_keys", {})
    hvd_train.fit(config | keys, model=model, data=data, resume=resume, allow_change=allow_change)
    return newest(folder / "checkpoints", print).tree


def test_numbers_that_mean_other_things_than_in_the_file_are_told(tmp_path, capsys):
    """Tables of the same shapes, whose classes and columns have other names."""

    def table(name, columns, words):
        rows = [f"{a:.3f},{b:.3f},{words[y]}" for (a, b), y in zip(X[:, :2], Y, strict=True)]
        (tmp_path / name).write_text("\n".join([f"{columns},kind", *rows]))
        return {"data": {"name": "table", "path": str(tmp_path / name), "labels": "kind"}}

    def trained(name, data, **keys):
        job = {"tensorboard": False, "run_dir": str(tmp_path / name), "model": {"name": "mlp", "hidden": [5]} | keys}
        hvd_train.fit(job | data)
        return capsys.readouterr().err

    first = table("a.csv", "width,height", ["cat", "dog", "eel"])
    trained("first", first)
    init = {"init_from": str(tmp_path / "first")}
    assert "warning: " not in trained("same", first, **init)
    out = trained("other", table("b.csv", "height,width", ["dog", "cat", "fox"]), **init)
    assert ": classes of the file's run are cat, dog, eel; here they are cat, dog, fox\n" in out
    assert ": columns of the file's run are width, height; here they are height, width\n" in out
    first["data"]["transforms"] = [{"name": "normalize", "mean": 0.5, "std": [2, 3]}]
    out = trained("scaled", first, **init)
    assert (
        ": inputs 'input' of the file's run were as stored; here they are normalized by mean 0.5 and std 2, 3\n" in out
    )


def test_columns_that_are_prepared_otherwise_are_told(tmp_path, capsys):
    """Another scale gave a loss of 1193 for 0.63, and words with other numbers an accuracy of 0.29, without a word."""

    def trained(name, towns, init=None, **keys):
        rows = [f"{a:.3f},{towns[y]},{y}" for (a, _), y in zip(X[:, :2], Y, strict=True)]
        (tmp_path / f"{name}.csv").write_text("\n".join(["width,town,kind", *rows]))
        data = {"name": "table", "path": str(tmp_path / f"{name}.csv"), "labels": "kind", "categories": "auto", **keys}
        model = {"name": "mlp", "hidden": [5]} | ({"init_from": str(tmp_path / init)} if init else {})
        hvd_train.fit({"tensorboard": False, "run_dir": str(tmp_path / name), "model": model, "data": data})
        return capsys.readouterr().err

    towns = ["Bonn", "Köln", "Ulm"]
    trained("first", towns, scale="standard")
    assert "prepared otherwise" not in trained("same", towns, "first", scale="standard")
    line = trained("unscaled", towns, "first")
    assert "columns are prepared otherwise than in the file's run: width was number, (x - " in line
    assert ", and is number (data.fitted takes that of its config.yaml)" in line
    line = trained("others", ["Aachen", "Bonn", "Köln"], "first", scale="standard")
    assert "town was words, Bonn, Köln, Ulm, and is words, Aachen, Bonn, Köln" in line


def test_fewer_classes_of_other_names_are_told():
    """A model of three outputs, whose first two were other classes: an accuracy of 0 for 1, without a word."""

    def lines(before, now, all_loaded=True):
        run, here = (
            Sample({}, {"label": Field((), "int64", classes=len(names), names=names)}) for names in (before, now)
        )
        data = SimpleNamespace(sample=here, vocabulary="", fitted=None)
        return _other_meanings(WeightFile({}, True, sample=run), data, all_loaded)

    old = ("old", "rich", "young")
    assert lines(old, ("rich", "young")) == [
        "classes of the file's run are old, rich, young; here they are rich, young"
    ]
    assert not lines(old, ("rich", "young"), all_loaded=False)  # with a new head
    assert not lines(old, ("old", "rich")) and not lines(old, (*old, "zen")) and not lines(old, ())


def test_another_vocabulary_than_that_of_the_file_is_told():
    data = SimpleNamespace(sample=Sample({}, {}), vocabulary='{"a": 1, "b": 2}')
    assert not _other_meanings(WeightFile({}, True, vocabulary='{"b": 2, "a": 1}'), data, True)
    (line,) = _other_meanings(WeightFile({}, True, vocabulary='{"a": 2, "b": 1}'), data, True)
    assert line.startswith("tokens have other numbers in the file's run, with another vocabulary; data.voc")


@pytest.fixture(scope="module")
def before(tmp_path_factory):
    """A run of three classes, in PyTorch."""
    folder = tmp_path_factory.mktemp("init") / "before"
    return folder, run(folder, optim={"lr": 0.3})


@pytest.mark.parametrize("framework", ["pytorch", "tensorflow"])
def test_another_head_on_the_body_of_a_run_which_then_needs_nothing_else(before, tmp_path, framework, capsys):
    folder, tree = tmp_path / "copied", before[1]
    shutil.copytree(before[0], folder)
    keys = {"init_from": {"path": str(folder), "exclude": ["fc2.bias"]}}
    drawn = run(tmp_path / "drawn", framework, TWO)
    here = run(tmp_path / "run", framework, TWO, model_keys=keys)
    for name in ("fc1.kernel", "fc1.bias"):
        assert (here[f"weights/{name}"] == tree[f"weights/{name}"]).all()
    for name in ("fc2.kernel", "fc2.bias"):
        assert np.abs(here[f"weights/{name}"] - drawn[f"weights/{name}"]).max() < 1e-200
    out = capsys.readouterr().out
    assert f"model.init_from: 2 tensors of 35 weights taken from {folder}\n" in out
    assert "  kept as drawn: fc2.kernel ((5, 3) in the file, (5, 2) in the model)\n" in out
    assert "  kept as drawn: fc2.bias (excluded)\n" in out
    shutil.rmtree(folder)
    rest = run(tmp_path / "run", framework, TWO, resume="last", model_keys=keys, max_epochs=2)
    assert (rest["weights/fc1.kernel"] == tree["weights/fc1.kernel"]).all()


def test_files_of_pytorch(tmp_path, capsys):
    """A state dictionary, one within a checkpoint of another trainer, safetensors; never what could run code."""
    import torch
    from safetensors.torch import save_file

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.norm = torch.nn.Linear(6, 6), torch.nn.BatchNorm1d(6)
            self.head = torch.nn.Linear(6, 3)

        def forward(self, x):
            return self.head(self.norm(self.body(x)))

    torch.manual_seed(1)
    source = Model()
    source.norm.running_mean += 3
    weights = source.state_dict()
    torch.save(weights, tmp_path / "a.pt")
    torch.save({"epoch": 3, "state_dict": {f"net.{n}": x for n, x in weights.items()}}, tmp_path / "b.ckpt")
    save_file(weights, tmp_path / "c.safetensors")
    save_file({n: x.bfloat16() for n, x in weights.items() if x.is_floating_point()}, tmp_path / "d.safetensors")
    for name, part in (("one", slice(None)), ("two", slice(4))):  # as Hugging Face publishes models
        (tmp_path / name).mkdir()
        few = dict([*weights.items()][part])
        save_file(few, tmp_path / name / ("model.safetensors" if name == "one" else "model-1-of-2.safetensors"))
    save_file({n: x for n, x in weights.items() if n not in few}, tmp_path / "two" / "model-2-of-2.safetensors")
    files = {n: f"model-{1 if n in few else 2}-of-2.safetensors" for n in weights}
    index = tmp_path / "two" / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": files}))
    for name, keys in {
        "one": {},
        "two": {},
        "a.pt": {},
        "b.ckpt": {"rename": {"net.*": "*"}},
        "c.safetensors": {},
        "d.safetensors": {},
    }.items():
        keys = {"init_from": {"path": str(tmp_path / name), **keys}}
        tree = run(tmp_path / f"run {name}", model=Model(), model_keys=keys)
        exact = weights["body.weight"].bfloat16() if name.startswith("d") else weights["body.weight"]
        assert (tree["weights/body.weight"] == exact.double().numpy()).all(), name
        assert (tree["statistics/norm.running_mean"] > 2).all()
        assert "kept as drawn" not in capsys.readouterr().out
    with pytest.raises(TrainError, match="there is no checkpoint"):
        (tmp_path / "one" / "checkpoints").mkdir()  # a run into which a model was exported
        run(tmp_path / "refused", model=Model(), model_keys={"init_from": str(tmp_path / "one")})
    for content, told in (
        ({"weight_map": files | {"more": "model-1-of-2.safetensors"}}, "its files lack more; .*; fetch all files"),
        ({"weight_map": files | {"more": "../c.safetensors"}}, "it names files of other folders"),
        ({"weight_map": files | {"more": "model-3-of-2.safetensors"}}, "the file cannot be read: No such file"),
        ({}, "the list of files cannot be read: KeyError"),
    ):
        index.write_text(json.dumps(content))
        with pytest.raises(TrainError, match=told):
            run(tmp_path / "refused", model=Model(), model_keys={"init_from": str(tmp_path / "two")})
    index.unlink()
    os.mkfifo(index)
    os.mkfifo(tmp_path / "pipe.pt")
    for name, told in (
        ("two", "the list of files cannot be read: .*no plain file"),
        ("pipe.pt", "it is no plain file"),
    ):
        with pytest.raises(TrainError, match=told):
            run(tmp_path / "refused", model=Model(), model_keys={"init_from": str(tmp_path / name)})
    torch.save(source.body, tmp_path / "whole.pt")
    refused = {
        "whole.pt": "the file cannot be read: it holds torch.nn.modules.linear.Linear, and to read",
        "nothing.pt": "there is no such file or folder",
        "model.keras": "a file .keras cannot be read here",
    }
    (tmp_path / "model.keras").write_bytes(b"")
    for name, message in refused.items():
        with pytest.raises(TrainError, match=message) as caught:
            run(tmp_path / "refused", model=Model(), model_keys={"init_from": str(tmp_path / name)})
        assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match="nothing of the file fits the model: it has body.weight") as caught:
        run(tmp_path / "refused", model_keys={"init_from": str(tmp_path / "a.pt")})
    assert "\n" not in str(caught.value)


def test_checkpoints_of_other_trainers(tmp_path, capsys):
    """A set of weights within a file is found by what fits; a prefix of all names is told by the line that mends it."""
    import torch

    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Linear(5, 3))
    model[1].register_parameter("also", model[0].weight)
    torch.manual_seed(1)
    weights = {n: torch.randn(x.shape) for n, x in model.named_parameters()}
    slots = {"state": {0: {"exp_avg": torch.ones(2)}}, "by name": {"exp_avg": torch.ones(2)}}
    prefixed = {f"module.{n}": x for n, x in weights.items()}
    tied = {"1.also" if n == "0.weight" else n: x for n, x in weights.items()}
    less = {n: x * 0.5 for n, x in weights.items()}
    codes = {n: (x * 100).to(torch.int8) for n, x in weights.items()}

    def started(rename=None, **content):
        path = tmp_path / "a.pt"
        torch.save(content, path)
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        keys = {"init_from": {"path": str(path), **({"rename": rename} if rename else {})}}
        tree = run(tmp_path / "run", model=model, model_keys=keys)
        for name, x in weights.items():
            assert (tree[f"weights/{name}"] == x.double().numpy()).all(), name
        return capsys.readouterr().out

    out = started(epoch=3, optimizer=slots, model_state_dict=weights, loss=0.3)
    assert f"4 tensors of 53 weights taken from model_state_dict of {tmp_path}/a.pt\n" in out and "note:" not in out
    assert "note:" not in started(optimizer=slots, model={"state_dict": tied})
    out = started(model=weights, model_ema=less)
    assert "  note: model_ema of the file would fit as well; the first one was taken\n" in out
    with pytest.raises(ConfigError, match="nothing of the file fits") as caught:
        started(optimizer=slots, model_state_dict=prefixed)
    advice = json.loads(str(caught.value).partition("4 tensors would fit with init_from: ")[2])
    assert advice == {"path": f"{tmp_path}/a.pt", "rename": {"module.*": "*"}}
    assert "note:" not in started(advice["rename"], optimizer=slots, model_state_dict=prefixed)
    with pytest.raises(ConfigError, match="0.weight is int8 in the file"):
        started(model_state_dict=codes)


def test_files_of_keras(tmp_path, before, capsys):
    import keras
    import tensorflow as tf

    keras.backend.clear_session()

    def layers():
        return [
            keras.Input((6,)),
            keras.layers.Dense(4, name="body"),
            keras.layers.BatchNormalization(name="norm"),
            keras.layers.Dropout(0.1),
            keras.layers.Dense(3, name="head"),
        ]

    def model(input_shape, num_classes):
        return keras.Sequential(layers())

    source = keras.Sequential(layers())
    source.compile("adam", "mse")
    source.get_layer("norm").moving_mean.assign([3.0] * 4)
    source.save(tmp_path / "a.keras")
    source.save_weights(tmp_path / "b.weights.h5")
    for name in ("a.keras", "b.weights.h5"):
        keys = {"init_from": str(tmp_path / name)}
        tree = run(tmp_path / f"run {name}", "tensorflow", model=model, model_keys=keys)
        kernel = next(x for key, x in tree.items() if key.startswith("weights/") and key.endswith("body.kernel"))
        assert (kernel == source.get_layer("body").kernel.numpy()).all(), name
        mean = next(x for key, x in tree.items() if key.endswith("norm.moving_mean"))
        assert (mean > 2).all()
        assert "kept as drawn" not in capsys.readouterr().out
    half, codes = (keras.Sequential(layers()) for _ in range(2))
    half.set_weights(source.get_weights())
    for layer in half.layers:
        for v in layer.weights:
            v._value = tf.Variable(tf.cast(v.value, tf.bfloat16))
            v._dtype = "bfloat16"
    half.save_weights(tmp_path / "c.weights.h5")
    tree = run(tmp_path / "run c", "tensorflow", model=model, model_keys={"init_from": f"{tmp_path}/c.weights.h5"})
    kernel = next(x for key, x in tree.items() if key.startswith("weights/") and key.endswith("body.kernel"))
    assert (kernel == tf.cast(half.get_layer("body").kernel.value, tf.float64)).numpy().all()
    codes.quantize("int8")
    codes.save(tmp_path / "d.keras")
    with pytest.raises(ConfigError, match="body.0 is int8 in the file, and float64 in the model, which takes no codes"):
        run(tmp_path / "refused", "tensorflow", model=model, model_keys={"init_from": f"{tmp_path}/d.keras"})
    with pytest.raises(ConfigError, match="the weights are of a pytorch model, whose axis order"):
        run(tmp_path / "refused", "tensorflow", model=model, model_keys={"init_from": str(before[0])})


@pytest.mark.parametrize("framework", ["pytorch", "tensorflow"])
def test_a_built_model_is_frozen_for_one_training_alone(tmp_path, framework):
    """Twice in one process, as in a notebook."""
    if framework == "pytorch":
        import torch

        model = torch.nn.Sequential(torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 3))
        frozen = "0.*"
    else:
        import keras

        norm = keras.layers.BatchNormalization(name="norm", dtype="float64")
        model = keras.Sequential([keras.Input((6,)), norm, keras.layers.Dense(3, dtype="float64")])
        frozen = "*norm.*"
    groups = [{"match": frozen, "freeze": True, "fix_statistics": True}]
    first = run(tmp_path / "first", framework, model=model, optim={"lr": 0.1, "groups": groups})
    fixed = {key: x for key, x in first.items() if key.startswith("statistics/")}
    assert len(fixed) == 2 and all((x == ("var" in key)).all() for key, x in fixed.items()), "as at the start"
    second = run(tmp_path / "second", framework, model=model, optim={"lr": 0.1})
    weights = {key for key in first if key.startswith("weights/")}
    assert weights == {key for key in second if key.startswith("weights/")}
    moved = {key for key in first if (first[key] != second[key]).any()}
    assert moved == first.keys(), "all weights and running statistics"

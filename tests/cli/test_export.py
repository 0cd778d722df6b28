"""Exports, opened by the plain frameworks in processes that never load hvd_train, give what ``predict`` gives."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from hvd_train.config import Config, load_config
from hvd_train.data.catalog import open_data
from hvd_train.installation import install_fix
from hvd_train.jobs import export
from hvd_train.protocol import Field, Sample
from tests.cli.running import ROOT, SECONDS, commands, run

DIGITS, LARGE = "data={name: digits}", "data={name: digits, image_size: 28}"
OWN = "tests.own_models"
# run: what trains, in 64 bits where nothing else is said; the zoo's models cross to the other framework
RUNS = {
    "cnn": ["framework=pytorch", LARGE, "model={name: cnn, hidden: 12}", "precision=64"],
    "gpt": ["framework=pytorch", "model={name: gpt, width: 16, depth: 1, heads: 2}", "precision=64"],
    "resnet": ["framework=tensorflow", DIGITS, "model={name: resnet, width: 4, blocks: [1, 1]}", "precision=64"],
    "mlp": ["framework=tensorflow", DIGITS, "model={name: mlp, hidden: [24]}"],
    "thin": ["framework=tensorflow", DIGITS, "model={name: thin, depth: 3}", "precision=bf16-mixed"],
    "own-pytorch": ["framework=pytorch", DIGITS, f"model={{name: '{OWN}:pytorch_norm'}}", "precision=64"],
    "own-keras": ["framework=tensorflow", DIGITS, f"model={{name: '{OWN}:keras_dropout'}}", "precision=64"],
}
FORMATS = {run: ["safetensors", "pytorch", "keras", "onnx"] for run in ("cnn", "gpt", "resnet", "mlp")}
FORMATS |= {"thin": ["pytorch", "keras"], "own-pytorch": ["pytorch", "onnx"], "own-keras": ["keras", "onnx"]}
for one in ("cnn", "gpt", "resnet", "own-pytorch"):
    FORMATS[one].append("torch-export")
CASES = [(run, to) for run, formats in FORMATS.items() for to in formats if to != "safetensors"]

# The user's side: the printed line opens the file. stdin: [how, line, inputs, outputs] of each file.
OPEN = """
import json, sys
import numpy as np
code = dict.fromkeys(("hvd_train", "pt_models", "tests"))  # None: cannot be imported
def forget():
    for name in code:
        if sys.modules.get(name, code) is None:
            del sys.modules[name]
for how, line, inputs, outputs in json.load(sys.stdin):
    sys.modules.update(code) if how == "torch-export" else forget()
    x, known = np.load(inputs), {}
    if how == "onnx":
        known["x"] = x.astype("float32" if x.dtype.kind == "f" else "int64")
    exec(line, known)
    if how in ("pytorch", "torch-export"):
        import torch
        with torch.no_grad():
            own = next(known["model"].parameters()).dtype
            x = torch.from_numpy(x)
            logits = known["model"](x.to(own) if x.is_floating_point() else x.long()).numpy()
    else:
        logits = known["logits"] if how == "onnx" else known["model"](x, training=False).numpy()
    np.save(outputs, logits)
forget()
assert not [name for name in sys.modules if name.split(".")[0] == "hvd_train"]
"""


def settings(name: str, folder: Path) -> list[str]:
    sets = [*RUNS[name], "max_steps=3", "global_batch_size=16", "optim={lr: 0.1, momentum: 0.9}", "tensorboard=false"]
    if name == "gpt":
        sets.append(f"data={{name: text, path: {folder / 'text.txt'}, sequence_length: 16}}")
    return sets


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Each run trained, its predictions, its exports with what the command printed, and what plain loading gave."""
    folder = tmp_path_factory.mktemp("exports")
    (folder / "text.txt").write_text("To be, or not to be, that is the question. " * 12)
    lines, keys = [], []
    for name in RUNS:
        sets = [word for one in settings(name, folder) for word in ("--set", one)]
        lines.append(["fit", "--run-dir", str(folder / name), *sets])
        lines.append(["predict", "--run-dir", str(folder / name), "-o", str(folder / f"{name}.npy")])
        keys += [(name, "fit"), (name, "predict")]
        for to in FORMATS[name]:  # an export reads no data
            where = ["--run-dir", str(folder / name), "--set", "data.path=nowhere"]
            lines.append(["export", *where, "--to", to])
            keys.append((name, to))
    done = commands(*lines)
    assert not [one for one in done if one.code], done
    told = {key: one.out for key, one in zip(keys, done, strict=True)}
    _open_all(folder, told)
    return SimpleNamespace(folder=folder, told=told)


def _open_all(folder: Path, told: dict) -> None:
    jobs: dict[str, list] = {"keras": [], "torch and ONNX": []}
    for name in RUNS:
        val = open_data(load_config(None, settings(name, folder)).data).val
        x = val.fetch(np.arange(len(val)))[0]["input"]
        first = x.transpose(0, 3, 1, 2) if x.ndim == 4 else x
        np.save(folder / f"{name}.last.npy", x)
        np.save(folder / f"{name}.first.npy", np.ascontiguousarray(first))
    for name, to in CASES:
        _, takes, load = told[name, to].splitlines()
        order = "first" if "channels first" in takes else "last"
        files = folder / f"{name}.{order}.npy", folder / f"{name}.{to}.npy"
        job = [to, load.removeprefix("to load it: "), *map(str, files)]
        jobs["keras" if to == "keras" else "torch and ONNX"].append(job)
    for rows in jobs.values():
        words = {"input": json.dumps(rows), "cwd": ROOT, "capture_output": True, "text": True, "timeout": SECONDS}
        done = subprocess.run([sys.executable, "-c", OPEN], check=False, **words)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


@pytest.mark.parametrize(("name", "to"), CASES)
def test_the_plain_framework_gives_the_predictions(made, name, to):
    wanted, found = np.load(made.folder / f"{name}.npy"), np.load(made.folder / f"{name}.{to}.npy")
    assert found.shape == wanted.shape and len(found) > 1 and wanted.std() > 0
    wide = "precision=64" in RUNS[name]
    assert found.dtype == ("float64" if wide and to != "onnx" else "float32")
    if name == "thin":  # trained in 16 bits, of which an export knows nothing
        np.testing.assert_allclose(found, wanted, atol=0.02 * np.abs(wanted).max())
    elif wide and to != "onnx":
        np.testing.assert_allclose(found, wanted, rtol=1e-9, atol=1e-9 * np.abs(wanted).max())
    else:
        np.testing.assert_allclose(found, wanted, atol=1e-5)


def test_weights_alone_are_those_of_the_checkpoint(made):
    """Under neutral names; the perceptron is computed from them by hand."""
    for name in ("cnn", "gpt", "resnet", "mlp"):
        own = load_file(made.folder / name / "checkpoints" / "step-00000003" / "weights.safetensors")
        found = load_file(made.folder / name / "model.safetensors")
        assert found.keys() == {key.partition("/")[2] for key in own}
        assert all(np.array_equal(found[key.partition("/")[2]], array) for key, array in own.items())
    x = np.load(made.folder / "mlp.last.npy").reshape(-1, 64)
    w = load_file(made.folder / "mlp" / "model.safetensors")
    logits = np.maximum(x @ w["fc1.kernel"] + w["fc1.bias"], 0) @ w["fc2.kernel"] + w["fc2.bias"]
    np.testing.assert_allclose(logits, np.load(made.folder / "mlp.npy"), atol=1e-5)


def test_a_file_tells_what_it_is(made):
    import onnx

    with safe_open(made.folder / "cnn" / "model.safetensors", "np") as file:
        told = file.metadata()
    assert told["model"] == "cnn" and json.loads(told["options"]) == {"hidden": 12} and told["step"] == "3"
    assert told["sample"] == "(28, 28, 1) as the data give it, channels last; numbers from 0 to 1"
    model = onnx.load(made.folder / "cnn" / "model.onnx")
    assert {p.key: p.value for p in model.metadata_props} == told
    for name in ("cnn", "own-keras"):
        model = onnx.load(made.folder / name / "model.onnx")
        axes = [[d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim] for v in model.graph.input]
        assert axes == [["batch", *((1, 28, 28) if name == "cnn" else (8, 8, 1))]]
        assert [v.name for v in (*model.graph.input, *model.graph.output)] == ["input", "logits"]


def test_the_command_tells_what_was_written(made):
    what, takes, load = made.told["cnn", "pytorch"].splitlines()
    path = made.folder / "cnn" / "model.pt"
    assert what == f"pytorch: {path} (cnn, step 3, {path.stat().st_size:,} bytes)"
    assert takes == (
        "inputs and outputs: input (n, 1, 28, 28) float64, channels first, numbers from 0 to 1 -> logits (n, 10)"
    )
    assert load.startswith("to load it: import torch, pt_models.cnn; model = pt_models.cnn.build(input_shape=")
    assert "channels last, numbers from 0 to 1 -> logits (n, 10)" in made.told["cnn", "keras"]
    assert "input (n, 1, 28, 28) float64, channels first, numbers" in made.told["cnn", "safetensors"]
    assert "input (n, 8, 8, 1) float64, channels last, numbers" in made.told["resnet", "safetensors"]
    assert made.told["cnn", "torch-export"].endswith("model.pt2').module()\n")
    assert "input (n, 16) int64, numbers the bytes' numbers -> logits (n, 16, 256)" in made.told["gpt", "onnx"]
    assert "import keras, tf_models.gpt;" in made.told["gpt", "keras"], "its layers are its own"
    assert "import keras;" in made.told["resnet", "keras"]


def test_of_several_inputs_a_file_tells_which_are_divided():
    """All were said to be numbers from 0 to 1, also beside bytes of an image."""
    fields = {"image": Field((4, 4, 3), "uint8", 255.0, image=True), "age": Field((), "float32")}
    meta = {"sample": asdict(Sample(fields, {"label": Field((), "int64", classes=2)}))}
    config = Config.model_validate({"data": {"name": "npz"}})
    snapshot = SimpleNamespace(meta=meta, model={}, step=1, framework="pytorch", config=lambda: config)
    scale = export._trained(config, snapshot).scale
    assert scale == "of image from 0 to 1 (uint8 divided by 255), of others as stored in the data"


def test_another_place_and_another_checkpoint(made, tmp_path):
    """best, and a path."""
    shutil.copytree(made.folder / "mlp", tmp_path / "run")
    step = tmp_path / "run" / "checkpoints" / "step-00000003"
    where = ["export", "--run-dir", "run", "--to", "safetensors", "-o"]
    best, path = [*where, "deep/best", "--checkpoint", "best"], [*where, "deep/weights", "--checkpoint", step]
    assert not [done for done in commands(best, path, [*path, "--overwrite"], cwd=tmp_path) if done.code]
    assert sorted(p.name for p in (tmp_path / "deep").iterdir()) == ["best", "weights"], "no partial file is left"
    for name in ("best", "weights"):
        found = load_file(tmp_path / "deep" / name)
        assert found.keys() == load_file(made.folder / "mlp" / "model.safetensors").keys()
    with safe_open(tmp_path / "deep" / "weights", "np") as file:
        assert file.metadata()["sample"].startswith("(8, 8, 1) ")


# ---- mistakes: one line, and nothing is written


MISTAKES = [
    ("mlp", ["--to", "tflite"], 2, "'tflite' is not one of 'pytorch', 'keras', 'torch-export', 'onnx'"),
    ("mlp", [], 2, "Missing option '--to'"),
    ("mlp", ["--to", "safetensors"], 2, "the file exists already; {run}/model.safetensors; give --overwrite, or"),
    ("mlp", ["--to", "keras", "-o", "model.h5"], 2, "Keras loads only files that end in .keras; -o model.h5"),
    ("mlp", ["--to", "safetensors", "-o", "/proc/x/y"], 2, "cannot be written: No such file or directory; /proc/x"),
    ("mlp", ["--to", "safetensors", "-o", "."], 2, "is a directory"),
    ("mlp", ["--to", "safetensors", "-o", "w", "--checkpoint", "step-9"], 4, "there is no checkpoint; step-9"),
    ("own-pytorch", ["--to", "keras"], 2, "a pytorch model of your own cannot become a keras one; model.name: "),
    ("own-pytorch", ["--to", "keras"], 2, "take --to pytorch, torch-export, onnx or safetensors"),
    ("own-keras", ["--to", "pytorch"], 2, "take --to keras, onnx or safetensors"),
    ("own-keras", ["--to", "torch-export"], 2, "cannot become a torch-export one"),
]


def test_mistakes(made, tmp_path):
    lines = [["export", "--run-dir", made.folder / name, *arguments] for name, arguments, _, _ in MISTAKES]
    another = [
        "export",
        "--run-dir",
        made.folder / "mlp",
        "--to",
        "pytorch",
        "-o",
        "m.pt",
        "--set",
        "model.hidden=[16]",
    ]
    *told, shapes = commands(*lines, another, cwd=tmp_path)
    for (name, arguments, code, words), done in zip(MISTAKES, told, strict=True):
        assert (done.code, done.out, done.err.count("\n")) == (code, "", 1), (name, arguments, done)
        assert done.err.startswith("error: ") and words.format(run=made.folder / name) in done.err, (arguments, done)
    assert shapes.code == 4, "hidden is not what was trained"
    assert "fc1.kernel: (64, 24) in the checkpoint, (64, 16) in the model" in shapes.err
    assert list(tmp_path.iterdir()) == []


def test_a_world_of_ranks_is_refused(made):
    line = ["export", "--run-dir", str(made.folder / "mlp"), "--to", "safetensors", "-o", "w"]
    done = run(*line, code=2, OMPI_COMM_WORLD_RANK="0", OMPI_COMM_WORLD_SIZE="2")
    assert "export runs in one process" in done.stderr and "start it without a launcher" in done.stderr


def test_onnx_without_its_packages(made, tmp_path):
    (tmp_path / "onnx.py").write_text("raise ModuleNotFoundError('gone', name='onnx')\n")
    line = ["export", "--run-dir", str(made.folder / "cnn"), "--to", "onnx", "-o", str(tmp_path / "model.onnx")]
    done = run(*line, code=2, PYTHONPATH=f"{tmp_path}:{ROOT}")
    assert done.stderr == (
        "error: ONNX files need the package onnx, which is not installed; --to onnx; "
        f"{install_fix(pip='pip install onnx onnxscript')}\n"
    )


def test_a_model_that_onnx_cannot_hold(tmp_path):
    """Its branches depend on the samples."""
    where = ["--run-dir", str(tmp_path), "--set", f"model={{name: '{OWN}:changing'}}", "--set", "max_steps=1"]
    fit, done = commands(["fit", *where], ["export", *where, "--to", "onnx", "-c", tmp_path / "config.yaml"])
    assert (fit.code, done.code, done.err.count("\n")) == (0, 2, 1), (fit, done)
    assert done.err.startswith("error: the model cannot be written as ONNX: ")
    assert not (tmp_path / "model.onnx").exists()

"""Refused commands change nothing; a run goes on as it was, or says what is other; foreign folders run no code."""

from __future__ import annotations

import hashlib
import io
import json
import marshal
import pickle
import shutil
import signal
import struct
import subprocess
import sys
import time
import zipfile
from types import SimpleNamespace

import numpy as np
import pytest

from hvd_train.checkpoint.manifest import encode
from tests.cli.running import ROOT, SECONDS, commands

SETS = ["model={name: mlp, hidden: [8]}", "global_batch_size=16", "max_steps=6", "tensorboard=false", "precision=64"]


def fit(run_dir, *more, sets=()):
    words = [word for one in (*SETS, *sets) for word in ("--set", one)]
    return ["fit", "--run-dir", run_dir, *words, *more]


def content(folder):
    return {str(p): p.read_bytes() if p.is_file() else b"" for p in sorted(folder.rglob("*"))}


def write_data(path, n, seed=0, classes=3, shift=0):
    rng = np.random.default_rng(seed)
    x, y = rng.normal(size=(n, 4)).astype(np.float32), np.arange(n) % classes
    x[-1] += shift
    np.savez(path, train_x=x, train_y=y, val_x=x[:9], val_y=y[:9])
    return path


class Canary:
    """Whoever unpickles it makes the file ``ran``."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return open, (self.path, "w")


def keras_lambda(path):
    """A .keras file whose Lambda layer does the same."""
    code = marshal.dumps(compile(f"open({str(path)!r}, 'w')", "canary", "eval"))
    layer = {
        "class_name": "Lambda",
        "config": {"function": {"class_name": "__lambda__", "config": {"code": code.hex()}}},
    }
    with zipfile.ZipFile(found := io.BytesIO(), "w") as file:
        file.writestr("config.json", json.dumps({"class_name": "Sequential", "config": {"layers": [layer]}}))
    return found.getvalue()


def external_link(path):
    """An HDF5 file whose data lie in another file."""
    import h5py

    with h5py.File(found := io.BytesIO(), "w") as file:
        file["weights/head.bias"] = h5py.ExternalLink("/etc/passwd", "/")
    return found.getvalue()


def tensors(header, length=None):
    """A safetensors file with this header, which says that it has ``length`` bytes."""
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text


def foreign(run, folder, name, content):
    """A copy of the run ``run``, whose checkpoint has this file under a valid hash."""
    shutil.copytree(run, folder)
    (step,) = (folder / "checkpoints").iterdir()
    path = step / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["files"][name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    path.write_bytes(encode(manifest))
    (step / name).write_bytes(content)
    return folder


def canaries(run, folder):
    """{name: the run folder that somebody else made, what the line says}"""
    ran, weights, refused = folder / "ran", "weights.safetensors", "no checkpoint can be used"
    names = [weights, "optimizer.safetensors", "rank-0.safetensors", "manifest.json"]
    pickled = {f"pickle as {name}": (name, pickle.dumps(Canary(ran)), refused) for name in names[:3]}
    huge = {"x": {"dtype": "F64", "shape": [1 << 31, 1 << 31], "data_offsets": [0, 1 << 62]}}
    found = pickled | {
        "pickle as manifest.json": (names[3], pickle.dumps(Canary(ran)), "the manifest is damaged (no JSON)"),
        "Keras Lambda": (weights, keras_lambda(ran), refused),
        "HDF5 external link": (weights, external_link(ran), refused),
        "a header without an end": (weights, tensors({}, 1 << 62), refused),
        "a header of a gigabyte": (weights, tensors({}, 1 << 30), refused),
        "a tensor of exabytes": (weights, tensors(huge), refused),
        "..": ("../step-00000006/weights.safetensors", b"", "the manifest is damaged"),
    }
    (folder / "foreign").mkdir()
    return {
        name: (foreign(run, folder / "foreign" / f"run-{k}", *given), words)
        for k, (name, (*given, words)) in enumerate(found.items())
    }


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A run on a copy of the data (6 of 8 steps of an epoch) and what every command line did to it."""
    folder = tmp_path_factory.mktemp("made")
    data = [f"data={{name: npz, path: {write_data(folder / 'data.npz', 120)}}}"]
    (done,) = commands(fit(folder / "run", sets=data))
    assert done.code == 0, done.err
    small = write_data(folder / "small.npz", 40)
    other = write_data(folder / "other.npz", 120, shift=1)
    shutil.copytree(folder / "run", folder / "damaged")
    (weights,) = (folder / "damaged" / "checkpoints").glob("*/weights.safetensors")
    weights.write_bytes(weights.read_bytes()[:-1])
    own = "model={name: 'tests.own_models:wrong_shape'}"
    run, go_on = folder / "run", ("--resume", "auto")
    refused = {
        "used": (fit(run, sets=data), 2, "the run folder holds a run already"),
        "config": (fit(run, *go_on, sets=[*data, "optim.lr=0.3"]), 2, "optim.lr: 0.01 -> 0.3"),
        "data.name": (fit(run, *go_on), 2, "data.name: npz -> digits"),
        "smaller": (fit(run, *go_on, sets=[data[0].replace("data.npz", "small.npz")]), 3, "120 samples -> 40"),
        "other": (fit(run, *go_on, sets=[data[0].replace("data.npz", "other.npz")]), 3, "120 samples, but others"),
        "missing": (fit(run, "--overwrite", sets=["data={name: npz, path: nowhere.npz}"]), 3, "no such file"),
        "model": (fit(run, "--overwrite", sets=[*data, "model={name: nothing}"]), 2, "there is no model 'nothing'"),
        "first step": (fit(run, "--overwrite", sets=[*data, own]), 2, "the model gives logits of shape"),
        "no such checkpoint": (fit(run, "--resume", "step-9", sets=data), 4, "there is no checkpoint"),
        "of another": (fit(run, "--resume", folder / "damaged", sets=data), 2, "holds a run already, and /"),
        "damaged": (fit(folder / "damaged", *go_on, sets=data), 4, "no checkpoint can be used"),
        "new": (fit(folder / "new" / "one", sets=["data={name: npz, path: nowhere.npz}"]), 3, "no such file"),
    }
    for name, (own, words) in canaries(run, folder).items():
        where = ["--run-dir", own]
        refused[f"{name}: resume"] = fit(own, *go_on, sets=data), 4, words
        refused[f"{name}: eval"] = ["eval", *where], 4, words
        refused[f"{name}: predict"] = ["predict", *where, "-o", folder / "p.npy"], 4, words
    before = content(folder)
    lines = [["eval", "--run-dir", run], *(line for line, _, _ in refused.values()), ["eval", "--run-dir", run]]
    told = commands(*lines)
    return SimpleNamespace(
        folder=folder, run=run, data=data, small=small, other=other, refused=refused, before=before,
        first=told[0], told=dict(zip(refused, told[1:-1], strict=True)), last=told[-1], after=content(folder),
    )  # fmt: skip


REFUSED = ["used", "config", "data.name", "smaller", "other", "missing", "model", "first step", "no such checkpoint"]
REFUSED += ["of another"]


@pytest.mark.parametrize("name", [*REFUSED, "damaged", "new"])
def test_a_refused_command_is_one_line(made, name):
    _, code, words = made.refused[name]
    told = made.told[name]
    assert (told.code, words in told.err) == (code, True), told.err
    lines = [line for line in told.err.splitlines() if not line.startswith("warning: ")]
    assert len(lines) == 1 and lines[0].startswith("error: ")


def test_canaries_of_foreign_folders_do_not_sing(made):
    """A pickle, a Lambda, a link, a bomb or a path in a checkpoint is one line; nothing runs, nothing is written."""
    found = [name for name in made.refused if name.endswith((": resume", ": eval", ": predict"))]
    assert len(found) == 30
    for name in found:
        test_a_refused_command_is_one_line(made, name)
    assert not (made.folder / "ran").exists() and not (made.folder / "p.npy").exists()


def test_a_canary_sings_where_it_is_unpickled(tmp_path):
    pickle.loads(pickle.dumps(Canary(tmp_path / "ran"))).close()
    assert (tmp_path / "ran").exists()


def test_refused_commands_change_no_byte(made):
    assert made.after == made.before
    assert made.first.code == made.last.code == 0 and made.first.out == made.last.out


def test_from_another_run_in_the_place_of_a_run(made, tmp_path):
    """Nothing that the folder held stays, and nothing is mixed with it."""
    more = ["max_steps=8"]
    first, second = commands(
        fit(tmp_path / "run", sets=[*made.data, "max_steps=16"]),
        fit(
            tmp_path / "run", "--resume", made.run, "--overwrite", "--allow-change", "max_steps", sets=made.data + more
        ),
    )
    assert first.code == second.code == 0, first.err + second.err
    assert "resumed at step 6" in second.out
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert rows and {row["step"] for row in rows} <= {7, 8}
    assert sorted(p.name for p in (tmp_path / "run" / "checkpoints").iterdir()) == ["step-00000008"]


def test_eval_and_export_use_what_the_checkpoint_was_trained_with(made, tmp_path):
    """config.yaml may be another's, or gone: a refused fit once wrote it."""
    shutil.copytree(made.run, tmp_path / "run")
    (tmp_path / "run" / "config.yaml").write_text("data: {name: synthetic}\nmodel: {name: mlp, hidden: [99]}\n")
    shutil.copytree(made.run, tmp_path / "bare")
    (tmp_path / "bare" / "config.yaml").unlink()
    to = ["-o", tmp_path / "x.safetensors", "--to", "safetensors"]
    found = commands(
        ["eval", "--run-dir", tmp_path / "run"],
        ["eval", "--run-dir", tmp_path / "bare", "--checkpoint", "best"],
        ["eval", "--run-dir", tmp_path / "bare", "--set", f"data.path={made.small}", "--split", "train"],
        ["export", "--run-dir", tmp_path / "run", *to],
        ["predict", "--run-dir", tmp_path / "run", "-o", tmp_path / "p.npy"],
    )
    assert [one.code for one in found] == [0] * 5, found
    assert found[0].out == found[1].out == made.first.out
    assert json.loads(found[2].out)["samples"] == 40
    assert np.load(tmp_path / "p.npy").shape == (9, 3)


def test_data_that_changed_go_on_when_allowed(made, tmp_path):
    """The begun epoch begins anew; the same data elsewhere are no change."""
    for name in "abc":
        shutil.copytree(made.run, tmp_path / name)
    moved = tmp_path / "moved.npz"
    shutil.copy(made.folder / "data.npz", moved)
    lines = []
    for name, path in (("a", made.small), ("b", made.other), ("c", moved)):
        more = () if name == "c" else ("--allow-change", "data")
        data = f"data={{name: npz, path: {path}}}"
        lines.append(fit(tmp_path / name, "--resume", "auto", *more, sets=[data, "max_steps=9"]))
    a, b, c = commands(*lines)
    assert (a.code, b.code, c.code) == (0, 0, 0), a.err + b.err + c.err
    for told in (a, b):
        assert told.out.count("the training data changed: epoch 1 starts over") == 1
    assert "starts over" not in c.out and "epoch 1, 96 samples of it used" in c.out
    seen = [json.loads((tmp_path / n / "summary.json").read_text())["train_samples"] for n in "abc"]
    assert seen == [96 + 40, 96 + 48, 96 + 24 + 16]


def test_overwrite_replaces_the_run_once_the_new_one_trains(made, tmp_path):
    shutil.copytree(made.run, tmp_path / "run")
    (tmp_path / "run" / "mine.txt").write_text("mine")
    (told,) = commands(fit(tmp_path / "run", "--overwrite", sets=[*made.data, "max_steps=3"]))
    assert told.code == 0, told.err
    steps = [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()]
    assert steps == ["step-00000003"]
    names = {path.name for path in (tmp_path / "run").iterdir()}
    files = {"config.yaml", "environment.json", "metrics.jsonl", "steps.jsonl", "summary.json"}
    assert names == {"checkpoints", "mine.txt", *files}


# ---- two at once


def test_a_second_fit_is_refused_while_one_trains_and_not_after_it_was_killed(tmp_path):
    """Also with --overwrite and --resume; the first one's numbers are those of a run that nobody disturbed."""
    long = fit(tmp_path / "run", sets=["max_steps=10000000", "checkpoint.every_n_steps=50", "log_every_n_steps=1"])
    line = [sys.executable, "-m", "hvd_train", *map(str, long)]
    first = subprocess.Popen(line, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        stop = time.monotonic() + SECONDS
        while not list(tmp_path.glob("run/checkpoints/step-000*")):
            assert first.poll() is None and time.monotonic() < stop
            time.sleep(0.05)
        settings = (tmp_path / "run" / "config.yaml").read_bytes()
        refused = commands(
            fit(tmp_path / "run"),
            fit(tmp_path / "run", "--overwrite"),
            fit(tmp_path / "run", "--resume", "auto"),
        )
        assert first.poll() is None
        for told in refused:
            assert told.code == 4 and told.err.count("\n") == 1, told
            assert f"the run folder is in use by process {first.pid} on " in told.err
        assert (tmp_path / "run" / "config.yaml").read_bytes() == settings
    finally:
        first.send_signal(signal.SIGKILL)
        first.wait()
    assert (tmp_path / "run" / "lock").exists()
    again = list(long)
    again[again.index("max_steps=10000000")] = "max_steps=1"
    (told,) = commands([*again, "--resume", "auto"])
    assert told.code == 0 and "resumed at step" in told.out, told.err
    assert not [p.name for p in (tmp_path / "run").iterdir() if p.name.startswith("lock")]
    steps = [json.loads(row)["step"] for row in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert steps == sorted(steps)


# ---- folders from somebody else

EVIL = """
from pathlib import Path
Path(__file__).with_name("ran").touch()
import numpy as np
def data(**options):
    x, y = np.zeros((20, 4), np.float32), np.arange(20) % 3
    return (x, y), (x, y)
def model(input_shape, num_classes):
    import torch
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 3)).double()
"""


@pytest.mark.parametrize("key", ["data", "model"])
def test_nothing_that_a_run_folder_names_is_imported(made, tmp_path, key):
    """The folder is one that others can write, too."""
    shutil.copytree(made.run, tmp_path / "run")
    (tmp_path / "run").chmod(0o777)
    (tmp_path / "evil.py").write_text(EVIL)
    (step,) = (tmp_path / "run" / "checkpoints").iterdir()
    manifest = json.loads((step / "manifest.json").read_text())
    manifest["meta"]["config"][key] |= {"name": f"evil:{key}"}
    if key == "model":
        del manifest["meta"]["config"]["model"]["hidden"]
    else:
        manifest["meta"]["config"]["data"]["path"] = None  # which a function does not read
    (step / "manifest.json").write_bytes(encode(manifest))
    where = ["--run-dir", tmp_path / "run"]
    own = ["--set", f"{key}.name=evil:{key}"]
    lines = [
        ["eval", *where],
        ["eval", *where, "--checkpoint", "best"],
        ["eval", *where, "--checkpoint", step],
        ["predict", *where, "-o", "p.npy"],
        *[["export", *where, "--to", "pytorch"]] * (key == "model"),  # it opens no data
        ["compare", tmp_path / "run"],
        fit(tmp_path / "run", "--resume", "auto", sets=[*made.data, "max_steps=7"]),
    ]
    before = content(tmp_path)
    told = commands(*lines, cwd=tmp_path)
    assert (
        not (tmp_path / "ran").exists() and {k: v for k, v in content(tmp_path).items() if "pycache" not in k} == before
    )
    for one in told[:-2]:
        assert one.code == 2 and one.err.count("\n") == 1, one
        assert f'{key}.name: "evil:{key}"' in one.err and "--trust" in one.err and "chmod -R go-w" in one.err
    assert told[-2].code == 0
    assert told[-1].code == 2 and f"{key}.name: evil:{key} -> " in told[-1].err
    told = commands(
        ["eval", *where, "--trust"], ["eval", *where, *own], ["eval", *where, "--set", "seed=3"], cwd=tmp_path
    )
    assert (tmp_path / "ran").exists(), told
    wanted = 0 if key == "data" else 4  # of another shape than what was trained
    assert [one.code for one in told] == [wanted, wanted, 2], told


# ---- full disks


def test_predictions_on_a_full_disk(made, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    line = ["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(disk)]
    if subprocess.run(line, capture_output=True, check=False).returncode:
        pytest.skip("no file system of 64 KB: mount is not allowed here")
    try:
        big = write_data(tmp_path / "big.npz", 9000)
        line = ["predict", "--run-dir", made.run, "--set", f"data.path={big}", "--split", "train", "-o", disk / "p.npy"]
        wide = "model={name: mlp, hidden: [1024]}"  # 266 KB
        told, trained = commands(line, fit(disk / "run", sets=[wide]))
        assert trained.code == 4 and trained.err.count("\n") == 1, trained
        assert "the disk has no room for a checkpoint: " in trained.err and " bytes needed, " in trained.err
        assert told.code == 2 and told.err.count("\n") == 1, told
        assert "the predictions cannot be written: No space left on device" in told.err
        assert [path for path in disk.rglob("*") if path.is_file()] == []
    finally:
        subprocess.run(["umount", str(disk)], check=True)


# ---- user models whose outputs are not logits


@pytest.mark.parametrize("framework", ["pytorch", "tensorflow"])
def test_outputs_that_are_no_logits(tmp_path, framework):
    """After a sigmoid all outputs are above 0: the accuracy was the share of yes, whatever the model had learned."""
    kind = {"pytorch": "pytorch", "tensorflow": "keras"}[framework]
    names = [f"tests.own_models:{kind}_{end}" for end in ("softmax", "one_output", "dropout")]
    base = [f"framework={framework}", "steps_per_execution=1", "precision=32"]
    sets = [[*base, f"model={{name: '{name}'}}"] for name in names]
    lines = [fit(tmp_path / str(k), sets=own) for k, own in enumerate(sets)]
    base = [f"framework={framework}", "task.loss=bce", "data.name=tests.own_models:odd_digits", "max_steps=2"]
    models = [f"model={{name: 'tests.own_models:{kind}_sigmoid', last: {last}}}" for last in ("true", "false")]
    lines += [fit(tmp_path / "bce", "--check", sets=[*base, model]) for model in models]
    own = "task={loss: 'tests.own_models:of_first_class', metrics: [accuracy]}"
    lines += [fit(tmp_path / f"own{k}", "--check", sets=[*sets[k], own]) for k in (0, 2)]
    softmax, one, plain, sigmoid, logits, own_softmax, own_plain = commands(*lines)
    assert softmax.code == plain.code == 0, softmax.err + plain.err
    assert softmax.err.count("warning: the model gives probabilities") == 1 and names[0] in softmax.err
    assert "warning" not in plain.err
    assert one.code == 2 and one.err.count("\n") == 1, one.err
    assert "logits of shape (16, 1) for labels of shape (16,) in 10 classes" in one.err
    assert not (tmp_path / "1").exists()
    assert sigmoid.code == logits.code == 0, sigmoid.err + logits.err
    assert sigmoid.err.count("the loss applies the sigmoid again") == 1, sigmoid.err
    assert "leave its last sigmoid out" in sigmoid.err and "warning" not in logits.err
    assert own_softmax.code == own_plain.code == 0, own_softmax.err + own_plain.err
    assert "metrics and predict apply softmax again" in own_softmax.err and "warning" not in own_plain.err

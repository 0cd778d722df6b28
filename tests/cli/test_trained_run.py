"""A run that is evaluated, used for predictions, and compared."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest

from hvd_train.config import Config, DataConfig
from hvd_train.data.catalog import open_data
from hvd_train.jobs.confusion import show
from hvd_train.jobs.mistakes import show_mistakes
from tests.cli.running import commands, run
from tests.data.files import pictures


@pytest.fixture(scope="module")
def made(trained, tmp_path_factory):
    """What each command said of a trained run, and the folder for what they wrote."""
    folder, run_dir = tmp_path_factory.mktemp("made"), trained[0]
    (folder / "mine.npy").write_text("mine")
    (folder / "bare").mkdir()
    (folder / "bare" / "config.yaml").write_text("max_epochs: 1\n")
    (folder / "text.txt").write_text("To be, or not to be, that is the question. " * 12)
    (folder / "t.csv").write_text("a,y\n" + "".join(f"{k},{k % 2}\n" for k in range(40)))
    text = ["global_batch_size=8", f"data={{name: text, path: {folder / 'text.txt'}, sequence_length: 16}}"]
    table = [f"data={{name: table, path: {folder / 't.csv'}, labels: y}}", "model.name=mlp"]
    predict = ["predict", "--run-dir", run_dir, "-o"]
    lines = {
        "eval": ["eval", "--run-dir", run_dir, "--confusion", folder / "c.png", "--mistakes", folder / "w.png"],
        "predict": [*predict, folder / "1.npy"],
        "taken": [*predict, folder / "mine.npy"],
        "taken, of ranks": [*predict, folder / "mine.npy", "-np", "2"],
        "replaced": [*predict, folder / "1.npy", "--overwrite"],
        "nowhere": [*predict, "/proc/nowhere/x.npy"],
        "another format": [*predict, "x.npz"],
        "a path": ["eval", "--run-dir", run_dir, "--set", "data.path=new.csv"],
        "no checkpoint": ["eval", "--run-dir", folder / "bare"],
        "compare": ["compare", run_dir, run_dir, "-o", folder / "new" / "curves.png"],
        "no run": ["compare", folder],
        "text": fit(folder / "text", *text, "model={name: gpt, width: 16, depth: 1, heads: 2}"),
        "text, predict": ["predict", "--run-dir", folder / "text", "-o", folder / "text.npy"],
        "text, mlp": fit(folder / "b", *text, "model={name: mlp}"),
        "table": fit(folder / "table", *table),
        "table, mistakes": ["eval", "--run-dir", folder / "table", "--mistakes", folder / "x.png"],
    }
    return folder, dict(zip(lines, commands(*lines.values()), strict=True))


def fit(folder, *sets):
    return ["fit", "--run-dir", folder, *(word for one in (*sets, "tensorboard=false") for word in ("--set", one))]


REFUSED = {
    "taken": (2, "the file exists already; {folder}/mine.npy; give --overwrite, or another place with -o\n"),
    "taken, of ranks": (2, "the file exists already; {folder}/mine.npy; "),
    "nowhere": (2, "the predictions cannot be written: No such file or directory; /proc/nowhere/x.npy\n"),
    "another format": (
        2,
        "predictions are a .npy file or a .csv table; -o x.npz; end its name in .npy or .csv\n",
    ),
    "a path": (3, "data set 'digits' reads no path; data.path: new.csv; "),  # it would evaluate the digits
    "no checkpoint": (4, "there is no checkpoint; "),
    "no run": (4, "the folder holds no finished run; {folder}\n"),
    "text, mlp": (2, "the model does not take its inputs (input (16,) uint8)"),
    "table, mistakes": (2, "the samples are not images with one class each; --mistakes; leave it out"),
}


def test_refused_commands_are_one_line(made):
    folder, done = made
    for name, (code, words) in REFUSED.items():
        assert (done[name].code, done[name].err.count("\n")) == (code, 1), done[name]
        assert done[name].err.startswith("error: ") and words.format(folder=folder) in done[name].err, done[name]
    assert (folder / "mine.npy").read_text() == "mine"


def test_eval_gives_what_training_measured(trained, made):
    """And which class is taken for which: scikit-learn's matrix, and the mistakes with the largest softmax. Two ranks
    of the other framework print the same."""
    folder, done = made
    summary = json.loads((trained[0] / "summary.json").read_text())
    one = done["eval"].out.splitlines()
    words = ("--confusion", str(folder / "c.png"), "--mistakes", str(folder / "w.png"))
    two = run("eval", "--run-dir", str(trained[0]), *words, "-np", "2", "--set", "framework=tensorflow").stdout
    for found in map(json.loads, (one[0], two.splitlines()[0])):
        assert found["split"] == "val" and found["samples"] == 359 and found["accuracy"] == summary["val_accuracy"]
        assert found["loss"] == pytest.approx(summary["val_loss"], rel=1e-9)
    assert one[1:] == two.splitlines()[1:]
    assert all((folder / name).stat().st_size > 10_000 for name in ("c.png", "w.png"))
    end = one.index(f"picture: {folder / 'c.png'}")
    shown = [line.split() for line in one[end + 2 : -1]]
    assert one[-1] == f"picture: {folder / 'w.png'}"
    assert one[1].split() == ["true", "\\", "predicted", *map(str, range(10))]
    counts = np.array([line.split()[1:] for line in one[2:end]], int)
    val = open_data(DataConfig(name="digits")).val
    labels, logits = val.fetch(np.arange(len(val)))[1]["label"], np.load(folder / "1.npy")
    assert (counts == pytest.importorskip("sklearn.metrics").confusion_matrix(labels, logits.argmax(1))).all()
    chances = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    sure = np.where(logits.argmax(1) != labels, chances.max(1), 0)
    worst = [k for k in np.argsort(-sure) if sure[k]][:16]
    assert 1 < len(shown) == len(worst)
    assert shown == [[str(val.rows[k]), str(labels[k]), str(logits[k].argmax()), f"{sure[k]:.4f}"] for k in worst]


def test_of_many_classes_the_pairs_that_are_confused_most_are_shown(tmp_path):
    counts = np.diag(np.full(30, 5.0))
    counts[3, 7], counts[20, 1] = 4, 2
    lines = show(counts, [f"c{k}" for k in range(30)], tmp_path / "c.png").splitlines()
    assert [line.split() for line in lines[1:3]] == [["c3", "c7", "4"], ["c20", "c1", "2"]]
    assert lines[3:] == [f"picture of all: {tmp_path / 'c.png'}"]


@pytest.mark.parametrize("split", ["train", "val"])
def test_mistakes_have_the_names_of_their_files(tmp_path, split):
    """Of files of which a part is held out, a part has a list of its own."""
    pictures(tmp_path / "photos")
    data = open_data(DataConfig(name="imagefolder", path=str(tmp_path / "photos"), image_size=8, val_fraction=0.5))
    job, part = SimpleNamespace(data=data, split=split, config=Config()), data.parts[split]
    last = len(part) - 1
    shown = show_mistakes(job, [(0.1, last, 1, 0), (0.2, 0, 0, 1)], tmp_path / "w.png").splitlines()
    assert [line.split()[0] for line in shown[1:-1]] == [part.files[last], part.files[0]]
    assert len({*data.train.files, *data.val.files}) == len(data.train) + len(data.val)


def test_predictions_are_in_the_order_of_the_data(trained, made):
    """Logits of one rank and of three (which 359 does not divide by) are equal and reach the measured accuracy."""
    folder, done = made
    assert done["predict"].out == f"359 predictions of the val split: {folder / '1.npy'}\n", done["predict"]
    run("predict", "--run-dir", str(trained[0]), "-o", str(folder / "deep" / "3.npy"), "-np", "3")
    one, three = np.load(folder / "1.npy"), np.load(folder / "deep" / "3.npy")
    assert one.shape == (359, 10) and np.isfinite(one).all() and done["replaced"].code == 0
    np.testing.assert_allclose(one, three, rtol=1e-12)
    labels = open_data(DataConfig(name="digits")).val.fetch(np.arange(359))[1]["label"]
    summary = json.loads((trained[0] / "summary.json").read_text())
    assert (one.argmax(1) == labels).mean() == pytest.approx(summary["val_accuracy"])
    assert [p.name for p in (folder / "deep").iterdir()] == ["3.npy"], "no partial file is left"


def test_text_trains_and_predicts_at_every_place(made):
    folder, done = made
    assert done["text"].code == done["text, predict"].code == 0, done["text"].err + done["text, predict"].err
    logits = np.load(folder / "text.npy")
    assert logits.shape == (6, 16, 256) and np.isfinite(logits).all()


def test_compare_shows_runs_side_by_side(made):
    folder, done = made
    header, *rows, last = done["compare"].out.splitlines()
    assert header.startswith("run folder") and len(rows) == 2 and rows[0] == rows[1]
    assert last == f"curves: {folder}/new/curves.png"
    assert (folder / "new" / "curves.png").read_bytes().startswith(b"\x89PNG")

"""A run that is evaluated, used for predictions, and compared."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest

from hvd_train.jobs.confusion import show
from tests.cli.running import run
from tests.data.files import pictures


@pytest.mark.parametrize("extra", [[], ["-np", "2"], ["--set", "framework=tensorflow"]], ids=" ".join)
def test_eval_gives_what_training_measured(trained, extra):
    folder, _ = trained
    summary = json.loads((folder / "summary.json").read_text())
    found = json.loads(run("eval", "--run-dir", str(folder), *extra).stdout.splitlines()[-1])
    assert found["split"] == "val" and found["samples"] == 359
    assert found["loss"] == pytest.approx(summary["val_loss"], rel=1e-9)
    assert found["accuracy"] == summary["val_accuracy"]


def test_eval_shows_which_class_is_taken_for_which(trained, tmp_path):
    """Also on two ranks in the other framework: scikit-learn's matrix, and the mistakes with the largest softmax."""
    from hvd_train.config import DataConfig
    from hvd_train.data.catalog import open_data

    folder, picture, wrong = trained[0], tmp_path / "c.png", tmp_path / "w.png"
    words = ("eval", "--run-dir", str(folder), "--confusion", str(picture), "--mistakes", str(wrong))
    one = run(*words).stdout.splitlines()
    two = run(*words, "-np", "2", "--set", "framework=tensorflow").stdout.splitlines()
    assert one[1:] == two[1:] and picture.stat().st_size > 10_000 and wrong.stat().st_size > 10_000
    end = one.index(f"picture: {picture}")
    shown = [line.split() for line in one[end + 2 : -1]]
    assert one[-1] == f"picture: {wrong}" and one[1].split() == ["true", "\\", "predicted", *map(str, range(10))]
    counts = np.array([line.split()[1:] for line in one[2:end]], int)
    run("predict", "--run-dir", str(folder), "-o", str(tmp_path / "p.npy"))
    val = open_data(DataConfig(name="digits")).val
    _, labels = val.fetch(np.arange(len(val)))
    wanted = pytest.importorskip("sklearn.metrics").confusion_matrix(
        labels["label"], np.load(tmp_path / "p.npy").argmax(1)
    )
    assert (counts == wanted).all()
    logits, order = np.load(tmp_path / "p.npy"), val.rows
    chances = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    sure = np.where(logits.argmax(1) != labels["label"], chances.max(1), 0)
    worst = [k for k in np.argsort(-sure) if sure[k]][:16]
    assert 1 < len(shown) == len(worst)
    assert shown == [[str(order[k]), str(labels["label"][k]), str(logits[k].argmax()), f"{sure[k]:.4f}"] for k in worst]


def test_of_many_classes_the_pairs_that_are_confused_most_are_shown(tmp_path):
    counts = np.diag(np.full(30, 5.0))
    counts[3, 7], counts[20, 1] = 4, 2
    lines = show(counts, [f"c{k}" for k in range(30)], tmp_path / "c.png").splitlines()
    assert [line.split() for line in lines[1:3]] == [["c3", "c7", "4"], ["c20", "c1", "2"]]
    assert lines[3:] == [f"picture of all: {tmp_path / 'c.png'}"]


@pytest.mark.parametrize("split", ["train", "val"])
def test_mistakes_have_the_names_of_their_files(tmp_path, split):
    """Of files of which a part is held out, a part has a list of its own."""
    from hvd_train.config import Config, DataConfig
    from hvd_train.data.catalog import open_data
    from hvd_train.jobs.mistakes import show_mistakes

    pictures(tmp_path / "photos")
    data = open_data(DataConfig(name="imagefolder", path=str(tmp_path / "photos"), image_size=8, val_fraction=0.5))
    job, part = SimpleNamespace(data=data, split=split, config=Config()), data.parts[split]
    last = len(part) - 1
    shown = show_mistakes(job, [(0.1, last, 1, 0), (0.2, 0, 0, 1)], tmp_path / "w.png").splitlines()
    assert [line.split()[0] for line in shown[1:-1]] == [part.files[last], part.files[0]]
    assert len({*data.train.files, *data.val.files}) == len(data.train) + len(data.val)


def test_mistakes_are_of_images(tmp_path):
    rows = "\n".join(f"{k},{k % 2}" for k in range(40))
    (tmp_path / "t.csv").write_text(f"a,y\n{rows}\n")
    data = f"data={{name: table, path: {tmp_path / 't.csv'}, labels: y}}"
    sets = ("--set", data, "--set", "model.name=mlp", "--set", "max_epochs=1", "--set", "tensorboard=false")
    run("fit", "--run-dir", str(tmp_path / "r"), *sets)
    done = run("eval", "--run-dir", str(tmp_path / "r"), "--mistakes", str(tmp_path / "w.png"), code=2)
    assert "the samples are not images with one class each; --mistakes; leave it out" in done.stderr


def test_eval_without_a_checkpoint(tmp_path):
    (tmp_path / "config.yaml").write_text("max_epochs: 1\n")
    done = run("eval", "--run-dir", str(tmp_path), code=4)
    assert done.stderr.startswith("error: there is no checkpoint; ") and done.stderr.count("\n") == 1


def test_a_path_that_the_data_do_not_read_is_refused(trained):
    """It would evaluate the digits of the run, training part and all."""
    said = run("eval", "--run-dir", str(trained[0]), "--set", "data.path=new.csv", code=3).stderr
    assert said.startswith("error: data set 'digits' reads no path; data.path: new.csv; ") and said.count("\n") == 1


def test_predictions_are_in_the_order_of_the_data(trained, tmp_path):
    """Logits of one rank and of three (which 359 does not divide by) are equal and reach the measured accuracy."""
    from hvd_train.config import DataConfig
    from hvd_train.data.catalog import open_data

    folder, _ = trained
    files = [tmp_path / "1.npy", tmp_path / "deep" / "3.npy"]
    for file, extra in zip(files, ([], ["-np", "3"]), strict=True):
        done = run("predict", "--run-dir", str(folder), "-o", str(file), *extra)
        assert f"359 predictions of the val split: {file}" in done.stdout
    one, three = (np.load(file) for file in files)
    assert one.shape == (359, 10) and np.isfinite(one).all()
    np.testing.assert_allclose(one, three, rtol=1e-12)
    labels = open_data(DataConfig(name="digits")).val.fetch(np.arange(359))[1]["label"]
    summary = json.loads((folder / "summary.json").read_text())
    assert (one.argmax(1) == labels).mean() == pytest.approx(summary["val_accuracy"])
    assert sorted(p.name for p in tmp_path.rglob("*") if p.is_file()) == ["1.npy", "3.npy"], "no partial file is left"


def test_text_trains_and_predicts_at_every_place(tmp_path):
    (tmp_path / "text.txt").write_text("To be, or not to be, that is the question. " * 12)
    data = f"data={{name: text, path: {tmp_path / 'text.txt'}, sequence_length: 16}}"
    model = "model={name: gpt, width: 16, depth: 1, heads: 2}"
    folder, file = tmp_path / "run", tmp_path / "logits.npy"
    settings = [x for one in (data, model, "global_batch_size=8", "tensorboard=false") for x in ("--set", one)]
    run("fit", "--run-dir", str(folder), *settings)
    run("predict", "--run-dir", str(folder), "-o", str(file), "-np", "2")
    logits = np.load(file)
    assert logits.shape == (6, 16, 256) and np.isfinite(logits).all()
    mixed = run("fit", "--run-dir", str(tmp_path / "b"), *settings, "--set", "model={name: mlp}", code=2)
    assert "the model does not take its inputs (input (16,) uint8)" in mixed.stderr and mixed.stderr.count("\n") == 1


def test_predictions_replace_no_file_unless_asked(trained, tmp_path):
    """Open a trained run as export does."""
    file = tmp_path / "x.npy"
    file.write_text("mine")
    for more in ([], ["-np", "2"]):
        told = run("predict", "--run-dir", str(trained[0]), "-o", str(file), *more, code=2).stderr
        assert told == f"error: the file exists already; {file}; give --overwrite, or another place with -o\n"
    assert file.read_text() == "mine"
    run("predict", "--run-dir", str(trained[0]), "-o", str(file), "--overwrite")
    assert len(np.load(file)) == 359


def test_predictions_are_not_written_under_the_name_of_another_format(trained):
    told = run("predict", "--run-dir", str(trained[0]), "-o", "x.npz", code=2).stderr
    assert told.startswith("error: the predictions are written as .npy; -o x.npz; end its name in .npy; ")


def test_predictions_that_cannot_be_written(trained):
    done = run("predict", "--run-dir", str(trained[0]), "-o", "/proc/nowhere/x.npy", code=2)
    assert done.stderr == "error: the predictions cannot be written: No such file or directory; /proc/nowhere/x.npy\n"


def test_compare_shows_runs_side_by_side(trained, tmp_path):
    folder, _ = trained
    done = run("compare", str(folder), str(folder), "-o", str(tmp_path / "new" / "curves.png"))
    header, *rows, last = done.stdout.splitlines()
    assert header.startswith("run folder") and len(rows) == 2 and rows[0] == rows[1]
    assert last == f"curves: {tmp_path}/new/curves.png"
    assert (tmp_path / "new" / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert run("compare", str(tmp_path), code=4).stderr == f"error: the folder holds no finished run; {tmp_path}\n"

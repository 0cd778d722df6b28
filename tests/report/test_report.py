"""Tables and pictures of runs, from run folders as training leaves them and as a kill leaves them."""

from __future__ import annotations

import json

import pytest

from hvd_train.errors import CheckpointError, ConfigError
from hvd_train.report import plots, text_tables
from hvd_train.run_folder import metrics_file

SUMMARY = {
    "framework": "pytorch",
    "model": "mlp",
    "world_size": 2,
    "epochs": 3,
    "steps": 21,
    "val_loss": 0.25,
    "val_accuracy": 0.9876543,
    "samples_per_second": 12345.6,
}


def row(event, epoch, step, value, samples):
    numbers = {"epoch": epoch, "step": step, "loss": value, "accuracy": value / 10, "samples": samples}
    return {"event": event, **numbers}


ROWS = [row("train", 1, 0, 4.0, 30), row("train", 1, 5, 1.0, 10), row("val", 1, 5, 2.0, 5)]
ROWS += [row("train", 2, 15, 1.0, 40), row("val", 2, 15, 1.5, 5)]


def write(folder, rows=(), summary=None, tail=""):
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows) + tail)
    if summary is not None:
        (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def test_a_table_in_a_pipe_has_one_plain_line_per_row():
    text = text_tables.table(["name", "n"], [["a [b]", 1], ["longer", 22]])
    assert text.splitlines() == ["name    n", "a [b]   1", "longer  22"]


def test_a_table_on_a_terminal_keeps_every_cell(monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    text = text_tables.table(["name", "n"], [["a [b]", 1], ["longer", 22]])
    assert all(word in text for word in ("name", "a [b]", "longer", "22")) and len(text.splitlines()) == 3


def test_runs_side_by_side(tmp_path):
    a = write(tmp_path / "a", summary=SUMMARY)
    b = write(tmp_path / "b", summary=SUMMARY | {"framework": "tensorflow", "val_loss": None, "val_accuracy": None})
    _, first, second = text_tables.side_by_side([a, b]).splitlines()
    assert first.split()[1:] == ["pytorch", "mlp", "2", "3", "21", "0.2500", "0.9877", "12,346"]
    assert second.split()[6:8] == ["-", "-"]


def test_keys_in_which_runs_differ_are_shown(tmp_path):
    """The page says so, and the table showed none of them."""
    runs = [write(tmp_path / name, summary=SUMMARY) for name in "abc"]
    for run, optim, more in zip(runs, ("sgd", "adam", "sgd"), ("", "", "ema: {decay: 0.9}\n"), strict=True):
        text = f"run_dir: {run}\nframework: pytorch\noptim: {{name: {optim}, lr: 0.1}}\n{more}"
        (run / "config.yaml").write_text(text)
    lines = text_tables.side_by_side(runs).splitlines()
    assert lines[4] == "" and lines[5].split() == ["key", *map(str, runs)]
    assert [line.split() for line in lines[6:]] == [
        ["optim.name", "sgd", "adam", "sgd"],
        ["ema.decay", "-", "-", "0.9"],
    ]
    assert len(text_tables.side_by_side(runs[:1]).splitlines()) == 2, "one run has no other"
    (runs[1] / "config.yaml").write_text("a: &a 3\nb: *a\n")
    assert text_tables.side_by_side(runs).splitlines()[6].split() == ["optim.name", "sgd", "-", "sgd"], "it is not read"


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda path: path.mkdir(), "the folder holds no finished run"),
        (lambda path: (path.mkdir(), (path / "summary.json").write_text("{")), "the file is damaged: no JSON"),
        (lambda path: (path.mkdir(), (path / "summary.json").write_text("[3]")), "is damaged: it is not a JSON object"),
        (
            lambda path: write(path, summary=SUMMARY | {"steps": "x"}),
            r"is damaged: it is not the summary of a run \(steps\)",
        ),
        (lambda path: write(path, summary={"framework": "pytorch"}), "is damaged: it is not the summary of a run"),
    ],
)
def test_a_folder_without_a_finished_run(tmp_path, make, words):
    with pytest.raises(ConfigError, match="there is no such run folder"):
        text_tables.summary(tmp_path / "x")
    make(tmp_path / "x")
    with pytest.raises(CheckpointError, match=words):
        text_tables.summary(tmp_path / "x")


def test_epochs_weigh_lines_by_their_samples(tmp_path):
    rows, damaged = metrics_file.read(write(tmp_path / "a", ROWS, tail='{"event": "tr'))
    assert rows == ROWS and damaged == 0, "a line that a kill cut short is left out"
    assert plots.epochs(rows, "train", "loss") == ([1, 2], [3.25, 1.0])
    assert plots.epochs(rows, "val", "loss") == ([1, 2], [2.0, 1.5])
    assert plots.epochs([], "val", "loss") == ([], [])
    assert plots.steps(rows, "train", "loss") == ([0, 5, 15], [4.0, 1.0, 1.0]), "and steps are drawn line by line"


@pytest.mark.parametrize(
    "line", [b"\xff\n", b"[" * 99999 + b"\n", b"5\n", b"{}\n", b'{"event": "val", "epoch": "1", "step": 3}\n']
)
def test_a_damaged_line_is_left_out_of_a_picture(tmp_path, line):
    run = write(tmp_path / "a", ROWS)
    text = (run / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    strange = b'{"event": "val", "epoch": 2, "step": 3, "loss": "x"}\n'
    (run / "metrics.jsonl").write_bytes(b"".join([text[0], line, strange, *text[1:]]))
    rows, damaged = metrics_file.read(run)
    assert damaged == 1 and len(rows) == len(ROWS) + 1
    assert plots.epochs(rows, "val", "loss") == ([1, 2], [2.0, 1.5])


def test_curves_are_drawn_for_each_run(tmp_path, monkeypatch):
    from matplotlib import pyplot

    drawn = []
    monkeypatch.setattr(pyplot, "close", drawn.append)
    runs = [write(tmp_path / name, ROWS) for name in ("a", "b")]
    plots.curves(runs, tmp_path / "new" / "curves.png")
    monkeypatch.undo()
    (figure,) = drawn
    loss, accuracy = figure.axes
    assert (loss.get_ylabel(), accuracy.get_ylabel(), loss.get_xlabel()) == ("loss", "accuracy", "epoch")
    labels = [line.get_label() for line in loss.lines]
    assert labels == ["a, train", "a, val", "b, train", "b, val"]
    assert list(loss.lines[0].get_xdata()) == [1, 2] and list(accuracy.lines[0].get_ydata()) == [0.325, 0.1]
    assert len({line.get_color() for line in loss.lines}) == 2
    assert len({line.get_linewidth() for line in loss.lines}) == 1, "the widest looked most important"
    assert len({line.get_marker() for line in loss.lines}) == 2, "and marks show equal runs"
    pyplot.close(figure)
    assert (tmp_path / "new" / "curves.png").stat().st_size > 5000


@pytest.mark.parametrize(
    ("values", "log", "labels"),
    [
        ([0.1, 0.01, 0.011, 0.01, 1], True, ["0.01", "0.1", "1"]),
        ([0.9, 0.99, 0.85], False, ["0.85", "0.9", "0.99"]),
        ([16, 16], False, ["16"]),
        ([0.000220502, 0.00079485, 0.00175785, 0.0863291, 0.155888], True, ["0.000220502", "0.00175785", "0.0863291"]),
    ],
)
def test_ticks_do_not_collide(values, log, labels):
    from matplotlib import pyplot

    axis = (figure := pyplot.figure()).add_subplot()
    plots.set_ticks(axis, values, log)
    figure.canvas.draw()
    shown = [*axis.get_xticklabels(), *axis.get_xticklabels(minor=True)]
    assert [text.get_text() for text in shown if text.get_text()] == labels
    pyplot.close(figure)


def test_a_picture_that_cannot_be_written(tmp_path):
    run = write(tmp_path / "a", ROWS)
    with pytest.raises(CheckpointError, match="the picture cannot be written"):
        plots.curves([run], tmp_path / "a" / "metrics.jsonl" / "x.png")
    with pytest.raises(CheckpointError, match="the picture cannot be written"):
        plots.curves([run], tmp_path / "x.nonsense")

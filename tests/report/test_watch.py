"""``hvd-train watch``: a run in the terminal, from its files alone."""

from __future__ import annotations

import json
import os

import pytest

from hvd_train.errors import ConfigError
from hvd_train.report import watch
from hvd_train.report.braille import EMPTY, Canvas
from hvd_train.report.watch import WatchedRun, frame, news
from hvd_train.run_folder import lock
from hvd_train.run_folder.lock import Lock


def row(event, step, **values):
    return json.dumps({"event": event, "epoch": step // 10 + 1, "step": step, "samples": 5, "lr": 0.1, **values}) + "\n"


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.yaml").write_text("framework: pytorch\nmodel: {name: mlp}\nmax_epochs: 3\n")
    lines = [row("train", s, loss=4.0 - s / 10, samples_per_second=1234.5) for s in range(0, 21, 5)]
    (tmp_path / "metrics.jsonl").write_text("".join(lines) + row("val", 20, loss=1.5, accuracy=0.75))
    return tmp_path


def test_a_canvas():
    canvas = Canvas(4, 2, [(0, 0), (7, 7)])
    canvas.line([(0, 0), (7, 7)])
    rows = canvas.rows()
    assert [text[:3] for text in rows] == ["7 |", "0 |"]
    drawn = [[ord(c) - EMPTY for c in text[3:]] for text in rows]
    assert sum(bits.bit_count() for line in drawn for bits in line) == 8
    assert drawn[0][3] & 0x08 and drawn[1][0] & 0x40  # the upper right and the lower left corner
    one = Canvas(4, 2, [(3.0, 5.0)])
    one.dots([(3.0, 5.0)])
    assert sum((ord(c) - EMPTY).bit_count() for text in one.rows() for c in text.partition("|")[2]) == 1


def test_a_frame(folder):
    run = WatchedRun(folder)
    assert "no line of the log yet" in frame(run, 80, 40) and run.update() and not run.update()
    lines = frame(run, 80, 40).splitlines()
    assert lines[0] == f"{folder}: pytorch, mlp" and lines[1].startswith("epoch 3/3, step 20, lr 0.1 (")
    assert lines[3] == "loss: train 2, val 1.5" and "accuracy: val 0.75" in lines
    assert lines[4].startswith("  4 |") and lines[12].split() == ["0", "20", "steps"]
    assert all(len(line) <= 90 for line in lines[1:]) and len(frame(run, 80, 14).splitlines()) <= 14
    assert [*news(run, 0)] == ["epoch 3, step 20: validation loss 1.5000, accuracy 0.7500"]


def test_damaged_files_are_no_end(folder):
    with open(folder / "metrics.jsonl", "ab") as stream:
        stream.write(b'\xff{"half')
    (folder / "config.yaml").write_text("[1")
    run = WatchedRun(folder)
    run.update()
    assert len(run.rows) == 6 and "loss" in frame(run, 80, 40)
    with pytest.raises(ConfigError, match="there is no such run folder"):
        WatchedRun(folder / "gone")


def test_it_ends_with_the_run(folder, monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(watch.time, "monotonic", lambda: now[0])
    run = WatchedRun(folder)
    run.update()
    with Lock(folder):
        assert lock.state(folder) == "held" and run.end() == "" and run.state_words() == "goes on"
        (folder / "summary.json").write_text('{"steps": 20, "val_loss": 1.5, "val_samples": 5}')
        assert run.end() == ""
    assert run.end() == "done: val loss 1.5000"
    (folder / "summary.json").write_text('{"steps": 10, "val_loss": 1.5}')  # of before it was resumed
    now[0] += watch.GRACE_SECONDS["free"] - 1
    assert run.end() == ""
    now[0] += 1
    assert run.end() == "stopped after step 20 or later; --resume auto goes on"


def test_a_process_that_is_gone(folder, monkeypatch):
    held = Lock(folder)
    with held:
        text = (folder / "lock").read_text()
    (folder / "lock").write_text(text.replace(f'"ticks":{held._holder.ticks}', '"ticks":1'))
    assert lock.state(folder) == "dead"
    # Of another host: its age alone tells.
    (folder / "lock").write_text(text.replace(held._holder.place, "elsewhere"))
    assert lock.state(folder) == "held"
    os.utime(folder / "lock", (1, 1))
    assert lock.state(folder) == "dead" and "its process is gone, after step 20" in _words(folder)


def _words(folder):
    run = WatchedRun(folder)
    run.update()
    return run.state_words()

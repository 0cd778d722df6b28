"""``watch`` and ``compare`` on a folder that somebody else filled: a line or a result, never a hang or a traceback."""

from __future__ import annotations

import json
import os
import shutil
import threading

import pytest

from hvd_train.checkpoint import store
from hvd_train.errors import CheckpointError, TrainError
from hvd_train.report.plots import curves
from hvd_train.report.text_tables import side_by_side
from hvd_train.report.watch import WatchedRun, frame, news
from hvd_train.run_folder import lock
from tests.limits import SECONDS

SUMMARY = {"framework": "pytorch", "model": "mlp", "world_size": 1, "epochs": 2, "steps": 20}
SUMMARY |= {"samples_per_second": 5.0, "val_loss": 1.5}
ROW = {"event": "val", "epoch": 2, "step": 20, "samples": 5, "loss": 1.5, "lr": 0.1, "samples_per_second": 3.0}
DIGITS = "9" * 400
NESTED = "a: &a [x, x]\n" + "".join(
    f"{chr(c + 1)}: &{chr(c + 1)} [{', '.join([f'*{chr(c)}'] * 9)}]\n" for c in range(97, 115)
)
ESCAPE = "\x1b]0;title\x07\x1b[2J\nerror: no such line"


def with_number(record, name, text):
    return json.dumps(record | {name: "@"}).replace('"@"', text)


FILES = {
    **{f"summary {text[:9]}": {"summary.json": text} for text in ("[]", "null", '"x"', "1", "[" * 9999, "{", "")},
    **{
        f"{name} {text[:9]}": {"summary.json": with_number(SUMMARY, name, text)}
        for name in ("val_loss", "steps", "samples_per_second", "epochs")
        for text in (DIGITS, "9" * 9999, "NaN", "-Infinity", "1e999", "1e308", "[]", "null", "true", '"x"')
    },
    **{
        f"row {name} {text[:9]}": {"metrics.jsonl": f"{json.dumps(ROW)}\n{with_number(ROW, name, text)}\n"}
        for name in ("loss", "step", "lr", "samples_per_second", "samples")
        for text in (DIGITS, "9" * 9999, "NaN", "1e999", "-1e308", "1e308", "[]", "null", "true", '"x"')
    },
    "aliases": {"config.yaml": NESTED},
    "numbers": {"config.yaml": f"max_epochs: {DIGITS}\nmax_steps: {DIGITS}\n"},
    "long": {"config.yaml": f"max_epochs: {'9' * 9999}\n"},
    "bytes": {name: "\udcff\udcfe" for name in ("config.yaml", "summary.json", "metrics.jsonl", "lock")},
    "lists": {"config.yaml": "[" * 5000},
    "escapes": {
        "config.yaml": json.dumps({"framework": ESCAPE, "model": {"name": ESCAPE}, "max_epochs": ESCAPE}),
        "summary.json": json.dumps(SUMMARY | {f"val_{ESCAPE}": 1.0, "model": ESCAPE, "paused_at": ESCAPE}),
        "metrics.jsonl": json.dumps(ROW | {ESCAPE: 1.0}) + "\n",
    },
}  # fmt: skip
NAMES = ("config.yaml", "summary.json", "metrics.jsonl", "lock")


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.yaml").write_text("framework: pytorch\nmodel: {name: mlp}\nmax_epochs: 3\n")
    (tmp_path / "summary.json").write_text(json.dumps(SUMMARY))
    (tmp_path / "metrics.jsonl").write_text(json.dumps(ROW) + "\n")
    return tmp_path


def shown(run_dir, picture=None):
    """All that the two commands print of a folder."""
    run = WatchedRun(run_dir)
    run.update()
    texts = [frame(run, 80, 40), run.state_words(), run.title(), *news(run, 0), run.end()]
    for work in (lambda: side_by_side([run_dir]), lambda: picture and curves([run_dir], picture, "step")):
        try:
            texts.append(work() or "")
        except TrainError as error:
            texts.append(str(error))
    return texts


def in_time(work):
    """Do it in a thread: one that hangs must not hold up the tests."""
    told = []
    thread = threading.Thread(target=lambda: told.append(work()), daemon=True)
    thread.start()
    thread.join(SECONDS)
    assert not thread.is_alive(), "it hangs"
    assert told, "it raised"
    return told[0]


@pytest.mark.parametrize("case", FILES)
def test_no_content_is_a_traceback_or_reaches_the_terminal(folder, case):
    for name, text in FILES[case].items():
        (folder / name).write_text(text, encoding="utf-8", errors="surrogateescape")
    texts = in_time(lambda: shown(folder))
    assert not [text for text in texts if "\x1b" in text or "\x07" in text or "\nerror: " in text]
    assert all(len(line) < 400 for text in texts for line in text.splitlines())


@pytest.mark.parametrize("kind", ["pipe", "endless", "folder", "huge"])
@pytest.mark.parametrize("name", NAMES)
def test_no_name_holds_them_up(folder, kind, name):
    (folder / name).unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(folder / name)
    elif kind == "endless":
        (folder / name).symlink_to("/dev/zero")
    elif kind == "folder":
        (folder / name).mkdir()
    else:
        with (folder / name).open("wb") as stream:
            stream.truncate(1 << 40)
    assert in_time(lambda: shown(folder, folder / "p.png"))
    assert lock.state(folder) == ("held" if name == "lock" else "free")


@pytest.mark.parametrize("name", ["manifest.json", "weights.safetensors", "optimizer.safetensors"])
def test_a_pipe_is_no_file_of_a_checkpoint(tmp_path, name):
    """``eval`` and the like read it."""
    from tests.checkpoint.test_store import snapshot

    path = store.save(tmp_path, snapshot())
    shutil.move(path / name, tmp_path / "aside")
    os.mkfifo(path / name)
    with pytest.raises(CheckpointError, match=r"no plain file|has 0 of [0-9,]+ bytes"):
        store.load(path, model_only=True)


def test_a_damaged_line_is_told(folder, capsys):
    with (folder / "metrics.jsonl").open("ab") as stream:
        stream.write(bytes(30))
    run = WatchedRun(folder)
    run.update()
    assert "epoch 2/3, step 20, 3 samples/s, lr 0.1, 1 damaged line left out" in frame(run, 80, 40)
    curves([folder], folder / "p.png")
    assert "warning: 1 damaged line of " in capsys.readouterr().err

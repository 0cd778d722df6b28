"""Rank 0's words and numbers: a bar on a terminal, plain lines elsewhere, files that a kill does not spoil."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import hvd_train
from hvd_train.errors import CheckpointError
from hvd_train.run_folder import log as module
from hvd_train.run_folder import metrics_file, terminal
from hvd_train.run_folder.log import NullLog, RunLog
from tests.limits import SECONDS

PACKAGE = Path(hvd_train.__file__).parent


@pytest.fixture
def made(tmp_path, monkeypatch):
    """A log, on a terminal of that width or (0) on none; closed at the end."""
    logs = []

    def make(width="0", total_epochs=2, resumed_at=None):
        monkeypatch.setenv("HVD_TRAIN_TERMINAL", width)
        logs.append(RunLog(tmp_path / "run", tensorboard=False, total_epochs=total_epochs))
        logs[-1].files = {"config.yaml": "seed: 3\n"}
        logs[-1].resumed_at = resumed_at
        logs[-1].begin(0)
        return logs[-1]

    yield make
    for one in logs:
        one.close()


TOLD = {"train_loss": 1.5, "train_accuracy": 0.5, "val_loss": 1.25, "val_accuracy": 0.75, "val_samples": 10}


def line(epoch=0, **other):
    row = {"epoch": epoch, "step": 7, "values": TOLD | other, "lr": 0.01}
    return row | {"samples_per_second": 1234.5, "seconds": 2.0}


def test_a_line_per_epoch_under_one_header(made, capsys):
    log = made()
    log.epoch_line(**line())
    log.epoch_line(**line(epoch=1, val_loss=None, val_accuracy=None))
    header, first, second = capsys.readouterr().out.splitlines()
    assert header == " epoch     step     loss  accuracy  val loss  val accuracy        lr  samples/s  seconds"
    assert first.split() == ["1/2", "7", "1.5000", "0.5000", "1.2500", "0.7500", "0.01", "1,234", "2.0"]
    assert second.split()[4:6] == ["-", "-"]
    assert len(first) == len(header) == len(second)


@pytest.mark.parametrize("loss", [12345.678, -123456.7, 9.87e12, -1e99, float("nan")])
def test_large_numbers_do_not_shift_the_columns(made, capsys, loss):
    log = made(total_epochs=10_000)
    log.epoch_line(**line(epoch=9_999, train_loss=loss))
    log.epoch_line(**line() | {"samples_per_second": None, "notes": ["", "input 12 %", "rank 1 is slow: 51 %"]})
    header, row, second = capsys.readouterr().out.splitlines()
    assert row.startswith(" 10000/10000 ")
    assert len(header) == len(row) == second.index("  input 12 %; rank 1 is slow: 51 %")
    assert second[: len(header)].split()[-2] == "-"
    assert float(row.split()[2]) == pytest.approx(loss, rel=0.05, nan_ok=True)


def test_a_line_has_the_names_of_the_task(made, capsys):
    values = {"train_loss": 1.5, "train_words_accuracy": 0.5, "val_loss": 1.25, "val_words_accuracy": None}
    made().epoch_line(epoch=0, step=7, values=values, lr=0.1, samples_per_second=3.0, seconds=1.0)
    header, row = capsys.readouterr().out.splitlines()
    assert "loss  words accuracy  val loss  val words accuracy " in header and len(row) == len(header)
    assert row.split()[2:6] == ["1.5000", "0.5000", "1.2500", "-"]


def test_without_a_terminal_progress_is_a_plain_line_now_and_then(made, capsys, monkeypatch):
    log, now = made(), [1000.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    log._last = now[0]
    for _ in range(41):
        now[0] += 0.5
        log.progress(0, 640, 1438, lambda: 5000.0)
    assert capsys.readouterr().out.splitlines() == ["epoch 1/2: 640/1,438 samples, 5,000 samples/s"] * 2


def test_on_a_terminal_progress_stays_on_one_line_that_is_wiped(made, capsys, monkeypatch):
    log, now = made("80"), [1000.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    log._last = 0.0
    for done in (100, 719):
        now[0] += 1.0
        log.progress(0, done, 1438, lambda: 100.0)
    log.message("words")
    out = capsys.readouterr().out
    assert "epoch 1/2" in out and "719/1,438" in out and "0:07 left" in out
    assert out.count("\n") == 1 and out.endswith("\r\x1b[2Kwords\n")


@pytest.mark.parametrize("width", ["80", "0"])
def test_a_long_step_is_shown_until_it_ends(monkeypatch, capsys, width):
    monkeypatch.setenv("HVD_TRAIN_TERMINAL", width)
    monkeypatch.setattr(terminal, "LONG_SECONDS" if width == "80" else "PLAIN_LONG_SECONDS", 0.05)
    monkeypatch.setattr(terminal.time, "monotonic", lambda: 1000.0)
    out, stop = "", time.perf_counter() + SECONDS
    with terminal.long_step("opening the data"):
        while "opening the data (0 s)" not in out:
            assert time.perf_counter() < stop
            out += capsys.readouterr().out
            time.sleep(0.01)
    out += capsys.readouterr().out
    assert out.endswith("\r\x1b[2K") if width == "80" else out.endswith("(0 s)\n")
    with terminal.long_step("a quiet one", shown=False):
        assert "long step" not in [thread.name for thread in threading.enumerate()]
    assert capsys.readouterr().out == ""


def test_a_message_ends_the_long_step(made, capsys):
    log = made("80")
    for end in (lambda: log.message("words"), lambda: log.warning("words"), lambda: log.progress(0, 1, 2, float)):
        log.waits_for("the first step")
        thread = log._long_step._thread
        end()
        assert not thread.is_alive() and log._long_step is None


def test_a_quiet_log_prints_warnings_and_its_last_line(tmp_path, capsys):
    log = RunLog(tmp_path / "run", tensorboard=False, total_epochs=2, quiet=True)
    log.begin(0)
    log.waits_for("the first step")
    log.message("words")
    log.epoch_line(**line())
    log._last = -1e9
    log.progress(0, 1, 2, float)
    log.warning("look")
    log.last_message("done")
    log.close()
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("done\n", "warning: look\n")


def test_warnings_go_to_stderr(made, capsys):
    made().warning("look")
    assert capsys.readouterr().err == "warning: look\n"


def test_numbers_that_are_not_finite_become_null(made, tmp_path):
    log = made()
    log.val(0, 7, {"loss": float("nan"), "accuracy": 0.5, "samples": 10}, 0.1, 3.0)
    row = json.loads((tmp_path / "run" / "metrics.jsonl").read_text())
    assert row == {
        "event": "val", "epoch": 1, "step": 7, "loss": None, "accuracy": 0.5, "samples": 10, "lr": 0.1,
        "samples_per_second": 3.0,
    }  # fmt: skip


def test_lines_after_the_resumed_step_are_dropped(made, tmp_path):
    log = made()
    for step in (2, 4, 5, 6):
        log.train(0, step, {"loss": 1.0, "accuracy": 0.5, "samples": 10}, 0.1, 3.0)
    log.close()
    log = made(resumed_at=4)
    log.train(0, 5, {"loss": 1.0, "accuracy": 0.5, "samples": 10}, 0.1, 3.0)
    rows = [json.loads(text) for text in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [2, 4, 5]


def test_a_damaged_line_does_not_keep_a_run_from_going_on(made, tmp_path, capsys):
    """One bit makes a line that is not UTF-8."""
    log, path = made(), tmp_path / "run" / "metrics.jsonl"
    for step in (2, 4, 6):
        log.train(0, step, {"loss": 1.0, "accuracy": 0.5, "samples": 10}, 0.1, 3.0)
    log.close()
    content = bytearray(path.read_bytes())
    content[3] ^= 0x80
    path.write_bytes(bytes(content))
    made(resumed_at=4)
    assert [json.loads(text)["step"] for text in path.read_text().splitlines()] == [4]
    assert capsys.readouterr().out == "1 damaged line of metrics.jsonl left out\n"


@pytest.mark.parametrize("end", [bytes(40), b'{"event": "tr' + bytes(40), bytes(40) + b"\n"])
def test_a_last_line_of_zeros_is_a_damaged_line(made, tmp_path, capsys, end):
    """What a power cut leaves. A line that a kill cut short is none."""
    log, path = made(), tmp_path / "run" / "metrics.jsonl"
    log.train(0, 4, {"loss": 1.0, "accuracy": 0.5, "samples": 10}, 0.1, 3.0)
    log.close()
    with path.open("ab") as stream:
        stream.write(end)
    assert metrics_file.read(tmp_path / "run")[1] == 1
    made(resumed_at=4)
    assert capsys.readouterr().out == "1 damaged line of metrics.jsonl left out\n"


def test_a_run_that_finds_no_checkpoint_keeps_the_lines_of_the_one_before(made, tmp_path, capsys):
    """They were dropped without a word. Those that a resumed run repeats are dropped."""
    log, run = made(), tmp_path / "run"
    for step in (2, 4, 6):
        log.train(0, step, {"loss": 1.0, "accuracy": 0.5, "samples": 10}, 0.1, 3.0)
    log.summary({"steps": 6, "samples_per_second": 3.0})
    before = {name: (run / name).read_bytes() for name in ("metrics.jsonl", "summary.json")}
    capsys.readouterr()
    made(resumed_at=0)
    (left,) = run.glob("left-*")
    assert {path.name: path.read_bytes() for path in left.iterdir()} == before
    assert (run / "metrics.jsonl").read_bytes() == b"" and not (run / "summary.json").exists()
    words = "there is no checkpoint, so the run begins at step 0; 3 lines of metrics.jsonl and the summary of an"
    assert capsys.readouterr().err == f"warning: {words} earlier start are now in {left}\n"
    made(resumed_at=0)
    assert capsys.readouterr().err == "" and [*run.glob("left-*")] == [left]


def test_a_summary_of_later_steps_is_not_of_a_run_that_goes_on_from_earlier_ones(made, tmp_path, capsys):
    """``watch`` would say "done" of it, and ``compare`` show its numbers."""
    log, run = made(), tmp_path / "run"
    log.summary({"steps": 6, "samples_per_second": 3.0})
    capsys.readouterr()
    made(resumed_at=6)
    assert capsys.readouterr().err == "" and (run / "summary.json").exists()
    made(resumed_at=4)
    (left,) = run.glob("left-*")
    assert [path.name for path in left.iterdir()] == ["summary.json"] and not (run / "summary.json").exists()
    assert "the run is at step 4; the summary of an earlier start" in capsys.readouterr().err


def test_a_link_is_not_followed(made, tmp_path):
    """One that leads nowhere looked as if there was no file, and rows went to where it leads."""
    (run := tmp_path / "run").mkdir()
    (run / "metrics.jsonl").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="symbolic link"):
        made()
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize(("encoding", "told"), [("ascii", r"\xfc? a\u6f22"), ("latin-1", r"\u00fc? a\u6f22")])
def test_names_are_shown_whatever_they_hold(monkeypatch, encoding, told):
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr("sys.stdout", stream)
    terminal.say("\u00fc\x1b a\u6f22")
    assert stream.buffer.getvalue().decode(encoding) == told.replace(r"\u00fc", "\u00fc") + "\n"


def test_one_place_prints():
    """It may hold names of others. The rest prints what it made itself, tables, or what a script asks for."""
    others = {f"script/{name}.py" for name in ("keras/api", "pytorch/api", "shared/main_rank")}
    others |= {"doctor/host.py", "doctor/host_table.py", "report/text_tables.py", "run_folder/terminal.py"}
    others |= {"launch/ssh_starter.py", "launch/host_news.py", "launch/hosts.py", "cli/guide.py"}
    found = {str(p.relative_to(PACKAGE)) for p in PACKAGE.rglob("*.py") if re.search(r"\bprint\(", p.read_text())}
    assert found - others == {"launch/heartbeat.py"}  # in a comment


class Disk:
    """A file on a disk with room for so many bytes more."""

    closed = False

    def __init__(self, room):
        self.room, self.content = room, b""

    def write(self, data):
        taken = data[: self.room]
        if not taken:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.content, self.room = self.content + taken, self.room - len(taken)
        return len(taken)

    def close(self):
        self.closed = True


def test_lines_that_a_full_disk_refused_are_written_when_there_is_room(made, tmp_path):
    log, disk = made(), Disk(100)
    log._metrics._stream = disk
    for step in (2, 4):
        log.train(0, step, {"loss": 1.0, "accuracy": 0.5, "samples": 10}, 0.1, 3.0)
    assert log.incomplete() and len(disk.content) == 100
    with pytest.raises(CheckpointError) as caught:
        log.end_incomplete(4)
    words = r"metrics.jsonl cannot be written: No space left on device \(2 lines are missing\); .*/metrics.jsonl; "
    assert re.match(words + "make room: the run is saved at step 4, and --resume auto goes on$", str(caught.value))
    disk.room = 1000
    assert not log.incomplete()
    assert [json.loads(text)["step"] for text in disk.content.splitlines()] == [2, 4]
    disk.room = 0
    log.train(0, 6, {"loss": 1.0, "accuracy": 0.5, "samples": 10}, 0.1, 3.0)
    with pytest.raises(CheckpointError, match="1 line is missing.*saved at step 6"):
        log.summary({"steps": 6})
    assert json.loads((tmp_path / "run" / "summary.json").read_text()) == {"steps": 6}
    log.close(), "and that is told once"


def test_a_summary_that_cannot_be_written(made, tmp_path):
    log = made()
    (tmp_path / "run" / "summary.json").mkdir()
    with pytest.raises(
        CheckpointError, match="the summary cannot be written: Is a directory; .*summary.json; make room"
    ):
        log.summary({"steps": 3})


@pytest.mark.parametrize("at", ["begin", "train"])
def test_training_goes_on_without_tensorboard(tmp_path, monkeypatch, capsys, at):
    """On a disk that is full for its events alone."""
    pytest.importorskip("tensorboard")
    log = RunLog(tmp_path / "run", tensorboard=True, total_epochs=2)

    def full(*args, **fields):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(module.Events, "_write" if at == "begin" else "scalars", full)
    log.begin(0)
    for step in (2, 4):
        log.train(0, step, {"loss": 1.0, "accuracy": 0.5, "samples": 10}, 0.1, 3.0)
    log.close()
    told = "warning: TensorBoard's events cannot be written: No space left on device; "
    said = capsys.readouterr().err
    assert said.startswith(told) and said.count("\n") == 1
    assert (tmp_path / "run" / "metrics.jsonl").read_text().count("\n") == 2


def test_the_files_of_a_run(made, tmp_path):
    log = made()
    log.summary({"steps": 3})
    assert (tmp_path / "run" / "config.yaml").read_text() == "seed: 3\n"
    assert json.loads((tmp_path / "run" / "summary.json").read_text()) == {"steps": 3}
    names = ["checkpoints", "config.yaml", "metrics.jsonl", "steps.jsonl", "summary.json"]
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == names


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"HVD_TRAIN_TERMINAL": "80"}, True),
        ({"HVD_TRAIN_TERMINAL": "0"}, False),
        ({}, True),
    ],
)
def test_a_launcher_knows_better_where_the_output_goes(monkeypatch, environ, expected):
    monkeypatch.delenv("HVD_TRAIN_TERMINAL", raising=False)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert module.on_terminal() is expected


@pytest.mark.parametrize(("launcher", "shown"), [("OMPI_COMM_WORLD", "False"), ("HOROVOD", "True")])
def test_ranks_of_mpirun_are_not_deceived_by_their_pty(launcher, shown):
    program = """if True:
        import sys
        from hvd_train.run_folder.terminal import on_terminal
        from hvd_train import session
        session._load = lambda *_, **__: None  # no framework
        sys.stdout.isatty = lambda: True
        session.Session.prepare("pytorch", user_process=True)
        print(on_terminal())
    """
    place = {"RANK": "0", "SIZE": "2", "LOCAL_RANK": "0", "LOCAL_SIZE": "2"}
    env = {name: value for name, value in os.environ.items() if name != "HVD_TRAIN_TERMINAL"}
    env |= {f"{launcher}_{name}": value for name, value in place.items()}
    line = [sys.executable, "-c", program]
    assert subprocess.run(line, env=env, capture_output=True, text=True, timeout=SECONDS).stdout.split() == [shown]


def test_the_silent_log_has_every_verb():
    verbs = {name for name in vars(RunLog) if not name.startswith("_")}
    assert verbs == {name for name in vars(NullLog) if not name.startswith("_")}

"""Ranks that are killed, stop or fail under real launchers: named, ended, started again to the same bits."""

from __future__ import annotations

import json
import os
import re
import signal
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from hvd_train.launch import stub
from hvd_train.run_folder import step_times
from tests.ranks.held import VARIABLE
from tests.ranks.job import (
    EPOCHS,
    LONG,
    OFTEN,
    ROOT,
    Job,
    lines_of,
    settings,
    summary,
)


@pytest.mark.parametrize(
    ("launcher", "framework"),
    [
        ("-np", "pytorch"),
        ("horovodrun --gloo", "pytorch"),
        pytest.param("mpirun", "tensorflow", marks=pytest.mark.long("the same, in the other framework")),
    ],
)
def test_killed_and_resumed_is_bit_identical(tmp_path, expected, launcher, framework):
    """SIGKILL on a rank within an epoch, also while rank 0 saves: all end, and the resumed run ends with the
    bits of one that nobody killed."""
    cut, sets = tmp_path / "cut", [f"framework={framework}", *LONG, OFTEN]
    job = Job(launcher, tmp_path, *settings(cut, *sets), HVD_TRAIN_FAULT="rename:0:13:hang")
    job.wait_for(lambda: lines_of(cut) >= 105)
    job.ranks()[1].send_signal(signal.SIGKILL)
    code, out, err = job.end()
    assert "step-00000090" in os.listdir(cut / "checkpoints") and "step-00000100" not in os.listdir(cut / "checkpoints")
    assert code != 0 and "done:" not in out
    if launcher == "-np":
        assert code == 5 and err.startswith("error: rank 1 was ended by SIGKILL; in "), "the cause alone"
        assert err.count("\n") == 1
    assert not (cut / "summary.json").exists()
    code, out, err = Job(launcher, tmp_path, *settings(cut, *sets), "--resume", "auto").end()
    assert code == 0, err
    assert "resumed at step" in out
    a, b = expected(framework, *LONG), summary(cut)
    assert {k: v for k, v in a.items() if k not in ("samples_per_second", "time")} == {
        k: v for k, v in b.items() if k not in ("samples_per_second", "time")
    }
    rows = [json.loads(line) for line in (cut / "metrics.jsonl").read_text().splitlines()]
    steps = [row["step"] for row in rows if row["event"] == "train"]
    assert steps == list(range(1, 29 * EPOCHS + 1)), "each step is reported once"


# ---- faults on purpose, and ranks that stop

FAULTS = [
    ("-np", "pytorch", "step:1:60:stop", "rank 1 is stopped (SIGSTOP), for more than 4 s; in training, step 60"),
    ("-np horovodrun", "tensorflow", "step:0:60:hang", "rank 0 has not moved for 4 s (in _hang, "),
]


@pytest.mark.parametrize(("launcher", "framework", "fault", "words"), FAULTS)
def test_a_fault_starts_all_again_to_the_same_bits(tmp_path, expected, monkeypatch, launcher, framework, fault, words):
    sets = [f"framework={framework}", *LONG]
    monkeypatch.setenv("HVD_TRAIN_FAULT", fault)
    more = ["--max-restarts", "1", "--set", OFTEN, "--set", "watchdog_s=4"]
    code, out, err = Job(launcher, tmp_path, *settings(tmp_path / "run", *sets), *more).end()
    assert code == 0, err
    assert (f"restart 1 of 1: {words}" in err) if words else "restart" not in err, err
    monkeypatch.delenv("HVD_TRAIN_FAULT")
    assert summary(tmp_path / "run")["weights_sha256"] == expected(framework, *LONG)["weights_sha256"]


def test_ranks_watch_one_another_where_nobody_else_does(tmp_path, monkeypatch):
    monkeypatch.setenv("HVD_TRAIN_FAULT", "step:1:60:stop")
    code, out, err = Job("mpirun", tmp_path, *settings(tmp_path / "run", *LONG, "watchdog_s=4")).end()
    words = "error[rank 1]: is stopped (SIGSTOP), for more than 4 s; in training, step 60"
    assert code == 5 and words in out + err, out + err


def test_a_slow_rank_is_named_and_the_job_finishes(tmp_path, monkeypatch):
    """50 ms after each step of rank 1, from the second epoch on."""
    monkeypatch.setenv("HVD_TRAIN_FAULT", "step:1:30:delay")
    sets = settings(tmp_path / "run", "framework=tensorflow", "max_epochs=5")
    code, out, err = Job("-np", tmp_path, *sets).end()
    assert code == 0 and "rank 1 is slow: the others wait for it " in out, out + err
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    slow = [row for row in rows if row["event"] == "straggler"]
    late = [row for row in slow if row["step"] > 40]  # before, the machine may have made a rank slow
    assert {row["rank"] for row in late} == {1} and all(0 < row["since"] < row["step"] for row in late), slow
    assert max(row["share"] for row in slow) > 0.4 and max(row["seconds"] for row in slow) > 0.03, slow
    # Its own time is that of a hook, and the other rank's a wait: 50 ms a step, from step 30 on.
    last = [row for row in step_times.read(tmp_path / "run") if row["event"] == "steps"][-1]
    slept = 0.05 * (last["step"] - 30)
    assert last["seconds"]["rest"][1] > 0.9 * slept and last["seconds"]["wait"][0] > 0.7 * slept, last["seconds"]


@pytest.mark.parametrize("point", ["write:0:3", "check:0:2"])
def test_a_save_that_hangs_ends_the_job(tmp_path, monkeypatch, point):
    """The second one, at its first file, where the third one waits for it; or before it, in the main thread."""
    monkeypatch.setenv("HVD_TRAIN_FAULT", f"{point}:hang")
    rule = ["checkpoint.every_n_steps=20", "checkpoint.every_n_epochs=0", "watchdog_s=3"]
    code, out, err = Job("-np", tmp_path, *settings(tmp_path / "run", *LONG, *rule)).end()
    told = re.findall(r"error\[rank 0\]: (.*)", out + err)
    run = tmp_path / "run"
    what = f"the checkpoint cannot be written: there was no progress for 3 s; {run}/checkpoints/step-00000040"
    if point.startswith("check"):
        what = f"the file system has not answered for 2.7 s; {run}/lock"
    assert code == 4 and len(told) == 1, out + err
    assert told[0].startswith(f"{what}; look for a disk"), told
    assert "step-00000020" in os.listdir(tmp_path / "run" / "checkpoints")


@pytest.mark.parametrize(
    ("launcher", "framework"),
    [
        ("-np", "pytorch"),
        pytest.param("-np horovodrun", "tensorflow", marks=pytest.mark.long("the same places, handed over alike")),
    ],
)
def test_spares_take_the_places_of_ranks_to_the_same_bits(tmp_path, expected, monkeypatch, launcher, framework):
    """Rank 1 stands in the first start until the spares are ready; then it is killed, and then what stands for it. What
    is repeated is what came after the newest snapshot, which lies in memory; before the end none lies on the disk."""
    own = ["optim.lr=0.01", "max_epochs=6", "checkpoint.every_n_epochs=0"]
    sets = [f"framework={framework}", *own, "hooks=['tests.ranks.held:Held']", f"code_dir={ROOT}"]
    may_go_on = tmp_path / "may-go-on"
    monkeypatch.setenv(VARIABLE, str(may_go_on))
    monkeypatch.setenv("HVD_TRAIN_FAULT", "step:1:31:stop")
    more = ["--max-restarts", "2", "--spares", "2", "--set", "checkpoint.snapshot_every_n_steps=5"]
    job = Job(launcher, tmp_path, *settings(tmp_path / "run", *sets), *more)

    def find(word):
        found = {}
        for process in job.processes():
            with suppress(psutil.Error):
                found[process] = process.cmdline()
        return [(process, line) for process, line in found.items() if word in line]

    job.wait_for(lambda: find("hvd_train.cli.spare"))
    ((spare, line),) = find("hvd_train.cli.spare")
    job.wait_for(lambda: f"@{line[4]}" in Path("/proc/net/unix").read_text())
    job.stopped(1).kill()
    job.wait_for(lambda: len(spare.children()) == 2)
    next(process for process, line in find(stub.__file__) if line[2] == "-S").kill()
    may_go_on.touch()
    code, out, err = job.end()
    assert code == 0 and err.count("restart ") == 2 and "in training, step 31" in err, err
    assert out.count("resumed at step 25:") + out.count("resumed at step 30:") >= 1, out
    assert not list(Path("/dev/shm").glob(f"hvd-train-memory-{job.started.pid}-*"))
    monkeypatch.delenv("HVD_TRAIN_FAULT")
    assert summary(tmp_path / "run")["weights_sha256"] == expected(framework, *own)["weights_sha256"]


def test_a_full_disk_ends_with_what_was_saved_before(tmp_path, monkeypatch):
    monkeypatch.setenv("HVD_TRAIN_FAULT", "manifest:0:2:enospc")
    code, out, err = Job("-np", tmp_path, *settings(tmp_path / "run", *LONG), "--set", OFTEN).end()
    assert code == 4 and "the checkpoint cannot be written: No space left on device" in err and "Traceback" not in err
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000010"]

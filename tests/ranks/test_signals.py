"""A signal to a job under every launcher: it saves and ends, and what goes on has the same bits."""

from __future__ import annotations

import json
import signal
import time
from contextlib import suppress

import psutil
import pytest

from tests.ranks.job import (
    EPOCHS,
    LONG,
    Job,
    pending,
    settings,
    summary,
)

# (launcher, framework, who is sent it, the signal, the job's code)

ASKED = [
    ("-np", "pytorch", "job", signal.SIGHUP, 75),  # its terminal was closed; UCX would take the signal
    ("horovodrun --gloo", "tensorflow", "rank", signal.SIGTERM, 75),
]
ASKED_LONG = [
    ("mpirun", "pytorch", "rank", signal.SIGUSR1, 75),
    ("-np", "tensorflow", "job", signal.SIGINT, 130),
    ("-np", "tensorflow", "job", signal.SIGTERM, 75),
    ("-np", "tensorflow", "rank", signal.SIGTERM, 75),
    ("-np horovodrun", "pytorch", "job", signal.SIGUSR1, 75),
    ("mpirun", "tensorflow", "job", signal.SIGUSR1, 75),
    ("mpirun", "pytorch", "job", signal.SIGTERM, 1),  # mpirun's own, which leaves ranks a second to save
    ("mpirun", "pytorch", "rank", signal.SIGINT, 130),
    ("horovodrun --gloo", "pytorch", "job", signal.SIGTERM, 75),
]
LONG_REASON = "the same signals and the same loop as in the cases that run always; a launch each, and one to go on"


@pytest.mark.parametrize(
    ("launcher", "framework", "who", "number", "code"),
    [*ASKED, *(pytest.param(*case, marks=pytest.mark.long(LONG_REASON)) for case in ASKED_LONG)],
)
def test_a_signal_saves_and_the_run_goes_on_bit_identical(tmp_path, expected, launcher, framework, who, number, code):
    """All ranks leave at one step, within the seconds that launchers leave them; what goes on, through
    the death of a rank as well, ends with the bits of a run that nobody disturbed."""
    # Saved by itself only with an epoch. It stands until the signal has come.
    cut, sets = tmp_path / "cut", [f"framework={framework}", *LONG]
    # Slow later on: mpirun lets a stopped rank go on before it sends the signal, and may be late with that.
    held = "step:1:100:stop,step:1:400:delay"
    job = Job(launcher, tmp_path, *settings(cut, *sets, "data.workers=2"), HVD_TRAIN_FAULT=held)
    rank = job.stopped(1)
    (rank if who == "rank" else job.started).send_signal(number)
    with suppress(psutil.NoSuchProcess, FileNotFoundError):
        job.wait_for(lambda: rank.status() != psutil.STATUS_STOPPED or pending(rank, number))
        rank.send_signal(signal.SIGCONT)
    found, out, err = job.end()
    assert code == found, err
    assert "done:" not in out and "Traceback" not in err and not (cut / "summary.json").exists(), err
    saved = int(sorted((cut / "checkpoints").glob("step-*"))[-1].name[5:])
    if code != 1:  # a second after its own SIGTERM mpirun kills: enough to save where nothing else computes
        assert out.count("stopped by SIG") == 1 and not (cut / "lock").exists()
        assert saved == json.loads((cut / "metrics.jsonl").read_text().splitlines()[-1])["step"]
        assert saved < 2**8, "two syncs are at most twice as far apart as the last ones"
    fault = "step:1:100:stop" if (launcher, who) == ("-np", "job") else None
    more = "--resume", "auto", "--max-restarts", "1"
    job = Job("-np", tmp_path, *settings(cut, *sets), *more, HVD_TRAIN_FAULT=fault)
    if fault:
        job.stopped(1).send_signal(signal.SIGKILL)
    found, out, err = job.end()
    assert found == 0, err
    assert f"resumed at step {saved}:" in out
    if (launcher, who) == ("-np", "job"):
        assert err.startswith("restart 1 of 1: rank 1 was ended by SIGKILL; in ") and err.count("\n") == 1, err
    a, b = expected(framework, *LONG), summary(cut)
    assert {k: v for k, v in a.items() if k not in ("samples_per_second", "time")} == {
        k: v for k, v in b.items() if k not in ("samples_per_second", "time")
    }
    rows = [json.loads(line) for line in (cut / "metrics.jsonl").read_text().splitlines()]
    steps = [row["step"] for row in rows if row["event"] == "train"]
    assert steps == list(range(1, 29 * EPOCHS + 1)), "each step is reported once"


@pytest.mark.parametrize(
    ("framework", "who", "seconds"),
    [
        ("pytorch", "job", 0.0),  # while ranks load their framework
        ("tensorflow", "rank", 2.0),
        *(
            pytest.param(framework, who, seconds, marks=pytest.mark.long("other moments before the first step"))
            for framework, who, seconds in (("pytorch", "rank", 1.0), ("tensorflow", "job", 3.0))
        ),
    ],
)
def test_a_signal_before_there_is_anything_to_save(tmp_path, framework, who, seconds):
    """While ranks load their framework, meet, compile; or just after, when they save."""
    job = Job("-np", tmp_path, *settings(tmp_path / "run", f"framework={framework}", "max_epochs=1000"))
    job.wait_for(lambda: len(job.ranks()) == 2)
    time.sleep(seconds)
    (job.ranks()[1] if who == "rank" else job.started).send_signal(signal.SIGTERM)
    found, out, err = job.end()
    assert found == 75 and "Traceback" not in err, (found, err)
    assert "before the first step: there was nothing to save" in err or "and saved" in out, (out, err)

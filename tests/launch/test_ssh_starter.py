"""The start of ranks over Gloo in horovodrun's place: codes, signals, nobody left. Ranks of a few lines."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.limits import SECONDS

ROOT = Path(__file__).parents[2]
MEETS = """
import os, time, urllib.error, urllib.request as http
rank, address = int(os.environ["HOROVOD_RANK"]), os.environ["HOROVOD_GLOO_RENDEZVOUS_ADDR"]
http.urlopen(http.Request(f"http://{address}/global/{rank}", data=b"here", method="PUT"))
for other in range(int(os.environ["HOROVOD_SIZE"])):
    while True:
        try:
            assert http.urlopen(f"http://{address}/global/{other}").read() == b"here"
            break
        except urllib.error.HTTPError as error:
            assert error.code == 404
            time.sleep(0.01)
try:
    http.urlopen(f"http://{address.partition('/')[0]}/{'0' * 64}/global/0")
except urllib.error.HTTPError as error:
    assert error.code == 403
    os.write(1, f"met {rank}\\n".encode())  # at once: lines of three ranks in one pipe
"""


def begin(program, size=2):
    line = [sys.executable, "-m", "hvd_train.launch.ssh_starter", "-np", str(size), *program]
    return subprocess.Popen(line, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def shell(*ranks):
    words = "".join(f"{rank}) {word};; " for rank, word in enumerate(ranks))
    return ["/bin/sh", "-c", f"case $HOROVOD_RANK in {words} esac"]


def test_ranks_meet_and_strangers_do_not():
    started = begin([sys.executable, "-c", MEETS], 3)
    out, _ = started.communicate(timeout=SECONDS)
    assert sorted(out.splitlines()) == ["met 0", "met 1", "met 2"] and started.returncode == 0


@pytest.mark.parametrize(
    ("ranks", "code"),
    [
        (("exec sleep 600", "exit 3"), 3),
        (("kill -9 $$", "exec sleep 600"), 128 + signal.SIGKILL),
        (("sleep 0.5; exit 75", "exit 75"), 75),  # ranks that have saved leave by themselves
    ],
)
def test_the_first_code_counts_and_the_others_follow(ranks, code):
    began = time.monotonic()
    started = begin(shell(*ranks))
    started.communicate(timeout=SECONDS)
    assert started.returncode == code and time.monotonic() - began < SECONDS


def test_a_signal_ends_all():
    started = begin(shell("echo up; exec sleep 600", "echo up; exec sleep 600"))
    assert [started.stdout.readline() for _ in range(2)] == ["up\n", "up\n"]
    ranks = psutil.Process(started.pid).children()
    started.terminate()
    started.communicate(timeout=SECONDS)
    assert started.returncode == 128 + signal.SIGTERM and not any(p.is_running() for p in ranks)


def test_a_signal_between_two_starts_reaches_all():
    """The first rank signals its launcher, which is still starting the others."""
    started = begin(shell(*["kill -TERM $PPID; exec sleep 600"] + ["exec sleep 600"] * 5), 6)
    began = time.monotonic()
    started.communicate(timeout=SECONDS)
    assert started.returncode == 128 + signal.SIGTERM and time.monotonic() - began < SECONDS

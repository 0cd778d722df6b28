"""``hvd_train.launch``: results, errors and ends of a function on ranks of this host. One rank where one is enough."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

import hvd_train
from hvd_train.errors import CommunicationError, ConfigError, RankError
from tests.limits import SECONDS, until


@dataclass
class Point:
    x: int


@pytest.fixture(autouse=True)
def nothing_left(tmp_path, monkeypatch):
    """No file, no process."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield
    assert not list(tmp_path.glob("hvd-train-launch-*"))
    until(lambda: not any(str(tmp_path) in " ".join(p.info["cmdline"] or ()) for p in psutil.process_iter(["cmdline"])))


def test_ranks_talk_and_give_back_in_their_order():
    base = 10

    def work(factor, plus=0):
        import hvd_train.torch as ht

        here = hvd_train.world()
        return here.rank, here.size, base + factor * ht.sum(here.rank + 1) + plus

    assert hvd_train.launch(work, np=2, args=(2,), kwargs={"plus": 1}) == [(0, 2, 17), (1, 2, 17)]


def test_an_error_of_one_rank_ends_all():
    """Rank 0 would wait for ten minutes."""

    def work():
        if hvd_train.world().rank == 0:
            time.sleep(600)
        raise KeyError("no column")

    began = time.monotonic()
    with pytest.raises(RankError) as caught:
        hvd_train.launch(work, np=2)
    error = caught.value
    assert (error.kind, error.message, error.rank) == ("KeyError", "'no column'", 1)
    assert str(error).startswith("rank 1: KeyError: 'no column'\n\nTraceback (most recent call last):\n")
    assert 'raise KeyError("no column")' in error.trace and "rank.py" not in error.trace
    assert time.monotonic() - began < SECONDS


def test_what_travels():
    """Lambdas, closures and classes of a script; a class that comes back is the one that was sent."""
    assert hvd_train.launch(lambda *args: args, np=1, args=(Point(3), "é")) == [(Point(3), "é")]
    script = "class A: pass\nimport hvd_train\n(a,) = hvd_train.launch(lambda: A(), np=1)\nassert type(a) is A"
    assert run_script(script)[0] == 0


def run_script(text, number=None):
    """(exit code, output) of a script on standard input; a signal follows its first line."""
    job = subprocess.Popen([sys.executable, "-"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    job.stdin.write(text)
    job.stdin.close()
    first = job.stdout.readline()
    if number:
        job.send_signal(number)
    code = job.wait(SECONDS)
    rest = job.stdout.read()
    job.stdout.close()
    return code, first + rest


INTERRUPTED = """
import time, hvd_train
def work():
    print("at work", flush=True)
    time.sleep(600)
try:
    hvd_train.launch(work, np=2)
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


def test_ctrl_c_ends_all():
    """A script without a guard: its ranks do not run it again."""
    code, output = run_script(INTERRUPTED, signal.SIGINT)
    assert code == 0 and output.splitlines()[-1] == "interrupted"


def test_from_another_thread():
    found = []
    thread = threading.Thread(target=lambda: found.extend(hvd_train.launch(os.getpid, np=1)))
    thread.start()
    thread.join(SECONDS)
    assert len(found) == 1 and found[0] != os.getpid()


@pytest.mark.parametrize(
    ("work", "error", "text"),
    [
        (lambda: sys.exit(3), RankError, "rank 0: SystemExit: 3"),
        (threading.Lock, RankError, "rank 0: TypeError: cannot pickle '_thread.lock' object"),
        (lambda: os._exit(3), CommunicationError, "a rank ended with code 3, before the function did; rank 0; "),
        (lambda: os._exit(0), CommunicationError, "a rank ended with code 0, before the function did; rank 0; "),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), CommunicationError, "a rank ended with code 137, before "),
        (lambda: hvd_train.launch(os.getpid), RankError, "rank 0: ConfigError: a rank starts no ranks of its own; "),
    ],
)
def test_other_ends(monkeypatch, work, error, text):
    with pytest.raises(error) as caught:
        hvd_train.launch(work, np=2 if "own; " in text else 1)
    assert str(caught.value).replace("rank 1:", "rank 0:").startswith(text)  # of two, either may be the first


def test_what_cannot_start(monkeypatch):
    lock = threading.Lock()
    with pytest.raises(ConfigError, match="cannot be sent to the ranks: cannot pickle '_thread.lock'"):
        hvd_train.launch(lambda: lock, np=1)
    with pytest.raises(ConfigError, match="np=0"):
        hvd_train.launch(os.getpid, np=0)
    with pytest.raises(ConfigError, match="there is no launcher 'abacus'; --launcher; one of auto, horovodrun, mpirun"):
        hvd_train.launch(os.getpid, launcher="abacus")


def test_only_this_user_can_read_what_travels(monkeypatch):
    def modes():
        folder = Path(sys.argv[1])
        return [oct(folder.stat().st_mode & 0o777), sorted(path.name for path in folder.iterdir())]

    assert hvd_train.launch(modes, np=1) == [["0o700", ["call", "path.json"]]]
